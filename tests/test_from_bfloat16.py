"""The page on moving from bfloat16: masks, weights in 16 bits, subsets, and what a skip does not change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop

import pages

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning"),  # Equinox, on JAX 0.7
]

PAGE = "from_bfloat16"
HALF = jnp.float16


@pytest.fixture(scope="module")
def step():
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield pages.run(PAGE, "The step")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_version(step):
    carry = step["params"], step["opt_state"], step["version"]
    before, scaler = jax.tree.map(np.array, carry), jmpscale.dynamic(2.0**31)
    *after, skipped, _ = step["train_step"](*carry, scaler, step["rollout"])
    assert not skipped.step_applied
    assert skipped.loss_scale == 2.0**30
    assert_step_is_noop(before, tuple(after))
    *_, version, applied, _ = step["train_step"](*carry, jmpscale.dynamic(2.0**10), step["rollout"])
    assert applied.step_applied
    assert version == step["version"] + 1


def test_padding_changes_nothing_and_makes_no_nan(step):
    """Tokens where `real` is False affect neither the loss nor its gradients."""
    rollout = step["rollout"]
    other = rollout | {"tokens": jnp.where(rollout["real"], rollout["tokens"], 7)}
    value_and_grad = jax.jit(jax.value_and_grad(step["loss_fn"]))
    (loss, grads), (other_loss, other_grads) = (value_and_grad(step["params"], x) for x in (rollout, other))
    assert jmpscale.all_finite(grads)
    assert loss == other_loss
    padded_with_7 = grads["embed"] - other_grads["embed"]
    np.testing.assert_allclose(padded_with_7, jnp.zeros_like(padded_with_7), atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_masks_that_work_in_bfloat16_are_nan_in_float16():
    nothing = jnp.zeros(4, bool)
    for dtype, expected in ((jnp.bfloat16, 0.25), (HALF, jnp.nan)):
        filled = jnp.where(nothing, jnp.ones(4, dtype), -1e9)
        np.testing.assert_array_equal(jax.nn.softmax(filled).astype(jnp.float32), jnp.full(4, expected))
        assert (jax.nn.softmax(jnp.ones(4, dtype), where=nothing) == 0).all()
    assert jnp.isneginf(jnp.asarray(jnp.finfo(jnp.bfloat16).min, HALF))
    smallest = jnp.finfo(HALF).min
    assert (jax.nn.softmax(jnp.where(nothing, jnp.ones(4, HALF), smallest)) == 0.25).all()
    assert jnp.isneginf(HALF(smallest) + HALF(-100))


@pytest.mark.parametrize(("dtype", "bits"), [(HALF, 11), (jnp.bfloat16, 8)])
def test_the_smallest_update_that_changes_a_weight_of_1(dtype, bits):
    one = jnp.ones((), dtype)
    assert one + jnp.asarray(2.0**-bits, dtype) == one
    assert one + jnp.asarray(1.01 * 2.0**-bits, dtype) > one


def test_parameters_in_float16_with_the_optax_wrapper_and_the_functional_api():
    params = {"w": jnp.ones((4, 1), HALF)}

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    x = jnp.ones((2, 4), HALF)
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2))
    opt_state = tx.init(params)
    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, x)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    assert updates["w"].dtype == jnp.float32
    assert all(leaf.dtype != HALF for leaf in jax.tree.leaves(opt_state))
    assert optax.apply_updates(params, updates)["w"].dtype == HALF

    tx = optax.adam(1e-2)
    _, grads = jmpscale.value_and_grad(loss_fn)(jmpscale.dynamic(2.0**10), params, x)
    finite, step = jmpscale.all_finite(grads), jmpscale.optax_step(tx, grads)
    with pytest.raises(TypeError, match=r"carry\[1\].*was float16\[4,1\] and is float32\[4,1\]"):
        jmpscale.apply_if(finite, step, params, tx.init(params))
    after, _ = jmpscale.apply_if(finite, step, params, tx.init(jmpscale.cast(params, jnp.float32)))
    assert after["w"].dtype == HALF
    assert (after["w"] < 1).all()


def test_the_report_reads_the_activations_that_linen_captures():
    net = nn.Sequential([nn.Dense(4, dtype=HALF), nn.Dense(1, dtype=HALF)])
    x = jnp.full((2, 3), 6e4, HALF)
    variables = net.init(jax.random.key(0), x)
    _, seen = net.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    report = jmpscale.grad_report(seen)
    assert any("layers_0" in path for path in report.paths)
    assert report.max_abs.max() > 1e3


@pytest.mark.full
def test_lora_trains_only_what_it_adds():
    page = pages.run(PAGE, "LoRA and other subsets")
    assert jax.tree.leaves(page["frozen"])[0].dtype == HALF
    assert (page["lora"]["up"] != 0).any()
    assert jmpscale.get_scaler(page["opt_state"]).skipped == 0


@pytest.mark.full
def test_a_subset_of_an_equinox_model():
    """As the page says: `eqx.partition` by a filter, and a loss that begins with `eqx.combine`."""
    eqx = pytest.importorskip("equinox")  # here: what it imports on JAX 0.7 warns
    model = eqx.nn.MLP(3, 1, 8, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    spec = eqx.tree_at(lambda tree: tree.layers[-1].weight, jax.tree.map(lambda _: False, model), True)
    trained, frozen = eqx.partition(model, spec)

    def loss_fn(trained, x):
        half = jmpscale.cast(eqx.combine(trained, frozen), HALF)
        return jnp.mean(jax.vmap(half)(x.astype(HALF)).astype(jnp.float32) ** 2)

    value_and_grad = jmpscale.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
    _, grads = value_and_grad(jmpscale.dynamic(2.0**8), trained, jnp.ones((4, 3)))
    finite = jmpscale.all_finite(grads)
    assert finite
    assert [leaf.shape for leaf in jax.tree.leaves(grads)] == [(1, 8)]
    tx = optax.sgd(0.1)
    after, _ = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), trained, tx.init(trained))
    assert (after.layers[-1].weight != trained.layers[-1].weight).any()


def test_freezing_a_part_of_one_tree_with_optax():
    labels = {"a": "train", "b": "freeze"}
    tx = optax.partition({"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, labels)
    tx = jmpscale.with_loss_scaling(tx)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert (updates["a"] < 0).all()
    assert (updates["b"] == 0).all()
    masked = optax.masked(optax.adam(0.1), {"a": True, "b": False})
    assert (masked.update(params, masked.init(params), params)[0]["b"] == 1).all(), "returns the gradients as updates"
