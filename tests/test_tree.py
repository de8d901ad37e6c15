"""What goes around, what is cast, and how the scaler is found: in trees that hold more than arrays."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing


def test_cast_converts_floating_point_arrays_and_nothing_else():
    key = jax.random.key(0)
    tree = {
        "w": jnp.ones(2, jnp.float32),
        "np": np.ones(2, np.float64),
        "half": jnp.ones(2, jnp.bfloat16),
        "ids": jnp.arange(2),
        "mask": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": key,
        "python": (1.5, 2, True, None, "text", jnp.tanh, jnp.float32),
    }
    out = jmpscale.cast(tree, jnp.float16)
    for name in ("w", "np", "half"):
        assert out[name].dtype == jnp.float16
        np.testing.assert_array_equal(out[name], np.ones(2))
    assert all(out[name] is tree[name] for name in ("ids", "mask", "complex", "key"))
    assert all(now is was for now, was in zip(out["python"], tree["python"], strict=True))


def test_gradients_of_what_was_cast_are_in_its_own_dtype():
    grads = jax.grad(lambda p: jnp.sum(jmpscale.cast(p, jnp.float16)["w"].astype(jnp.float32)))({"w": jnp.ones(2)})
    assert grads["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.complex64], ids=str)
def test_cast_refuses_what_is_no_floating_point_dtype(dtype):
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
        jmpscale.cast({"w": jnp.ones(2)}, dtype)


def test_a_scaler_whose_arrays_a_filter_took_out_is_told():
    with pytest.raises(ValueError, match="got one without loss_scale"):
        jmpscale.get_scaler({"scaler": jax.tree.map(lambda _: None, jmpscale.dynamic())})


def test_step_taken_tells_about_the_newest_step(variant):
    scaler = jmpscale.dynamic()
    assert scaler.step_taken
    for finite in (False, False, True, False):
        scaler = variant(jmpscale.update)(scaler, jnp.array(finite))
        assert bool(scaler.step_taken) is finite


@pytest.mark.parametrize(
    "holder", [lambda s: s, lambda s: {"model": jnp.ones(3), "state": (s, None)}], ids=["it", "tree"]
)
def test_scaled_value_and_grad_takes_the_scaler_or_what_holds_it(holder, variant):
    def loss_fn(w, x):
        return jnp.sum((w * x) ** 2)

    def run(w, x):
        return jmpscale.scaled_value_and_grad(loss_fn)(holder(jmpscale.static(2.0**10)), w, x)

    w, x = jnp.array([1.0, 3.0]), jnp.array([0.5, 2.0])
    loss, grads = variant(run)(w, x)
    assert loss == loss_fn(w, x)
    np.testing.assert_array_equal(grads, 2**10 * jax.grad(loss_fn)(w, x))


def test_scaled_value_and_grad_needs_exactly_one_scaler():
    run = jmpscale.scaled_value_and_grad(lambda w: w)
    for holder, number in (({}, 0), ([jmpscale.dynamic()] * 2, 2)):
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number}"):
            run(holder, 1.0)
    batch = jax.tree.map(lambda x: jnp.stack([x] * 2), jmpscale.dynamic())
    with pytest.raises(ValueError, match="holder must hold one scaler, got a batch"):
        run(batch, 1.0)


def test_shapes_may_be_symbolic():
    """As in a program that is exported for every size of a batch."""
    (size,) = jax.export.symbolic_shape("size")
    shapes = jax.ShapeDtypeStruct((size,), jnp.float32)

    def run(x):
        state = jmpscale.update(jmpscale.dynamic(), jmpscale.all_finite(x), loss=x)
        return state.skipped, jmpscale.cast(x, jnp.float16)

    stored = jax.export.export(jax.jit(run))(shapes)
    for n in (3, 5000):
        assert stored.call(jnp.ones(n))[0] == 0
        assert stored.call(jnp.ones(n).at[-1].set(jnp.nan))[0] == 1


def test_in_optax_too_even_where_it_is_not_known_whether_the_state_is_larger_than_the_gradients():
    tx = jmpscale.with_loss_scaling(optax.sgd(optax.constant_schedule(1.0)), jmpscale.static(4.0))
    shapes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("size"), jnp.float32)
    stored = jax.export.export(jax.jit(lambda g: tx.update(g, tx.init(g))[0]))(shapes)
    for n in (1, 3):
        assert stored.call(jnp.full(n, 8.0)).tolist() == [-2.0] * n
        assert stored.call(jnp.full(n, jnp.inf)).tolist() == [0.0] * n


@pytest.mark.usefixtures("standard_promotion")
def test_states_are_planned_for_abstract_float16_parameters():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    for state in (tx.init(jax.ShapeDtypeStruct((2,), jnp.float16)), tx.init(jnp.ones(2, jnp.float16))):
        assert state.inner_state[0].mu.dtype == jnp.float32


def test_complex_parameters_keep_the_signs_of_their_zeros_on_a_skip():
    zeros = jax.lax.complex(jnp.full(2, -0.0), jnp.full(2, -0.0))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0))
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(zeros + jnp.inf, tx.init(zeros), zeros)
        testing.assert_step_is_noop(zeros, optax.apply_updates(zeros, updates))


def test_optax_step_leaves_what_has_no_update_as_it_is():
    params = {"w": jnp.ones(2), "fn": jnp.tanh, "size": 3}
    grads = {"w": jnp.ones(2), "fn": None, "size": None}
    tx = optax.sgd(0.5)
    run = jax.jit(lambda finite, w: jmpscale.apply_if(
        finite, jmpscale.optax_step(tx, grads), params | {"w": w}, tx.init(None)
    )[0]["w"])  # fmt: skip
    np.testing.assert_array_equal(run(True, params["w"]), [0.5, 0.5])
    np.testing.assert_array_equal(run(False, params["w"]), [1, 1])
    after, _ = jmpscale.apply_if(True, jmpscale.optax_step(tx, grads), params, tx.init(None))
    assert after["fn"] is jnp.tanh
    assert after["size"] == 3


@pytest.mark.usefixtures("standard_promotion")
def test_optax_step_passes_extra_arguments_on():
    tx = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, accumulation_size=1)
    params, grads = jnp.ones(2), jnp.ones(2)
    state = tx.init(params)
    for _ in range(3):
        _, state = jmpscale.apply_if(True, jmpscale.optax_step(tx, grads, value=jnp.float32(1.0)), params, state)
    assert state.scale < 1
