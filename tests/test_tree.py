"""Leaves that bypass every function, cast, references, and how the scaler of a tree is found."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing


def test_cast_converts_only_floating_point_arrays():
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


def test_gradients_with_respect_to_a_cast_array_have_its_original_dtype():
    grads = jax.grad(lambda p: jnp.sum(jmpscale.cast(p, jnp.float16)["w"].astype(jnp.float32)))({"w": jnp.ones(2)})
    assert grads["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.complex64, None], ids=str)
def test_cast_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
        jmpscale.cast({"w": jnp.ones(2)}, dtype)


def test_cast_leaves_scalers_alone():
    opt_state = jmpscale.with_loss_scaling(optax.trace(0.9), max_norm=1.0).init(jnp.ones(2))
    out = jmpscale.cast(opt_state, jnp.float16)
    assert out.scaler is opt_state.scaler
    assert out.inner_state.trace.dtype == jnp.float16


TX = jmpscale.with_loss_scaling(optax.identity())
REF_CALLS = {
    "apply_if": lambda tree: jmpscale.apply_if(True, lambda tree: tree, tree),
    "all_finite": jmpscale.all_finite,
    "unscale": lambda tree: jmpscale.unscale(jmpscale.dynamic(), tree),
    "unscale_and_check": lambda tree: jmpscale.unscale_and_check(jmpscale.dynamic(), tree),
    "scale": lambda tree: jmpscale.scale(jmpscale.dynamic(), tree),
    "scale, disabled": lambda tree: jmpscale.scale(jmpscale.disabled(), tree),
    "cast": lambda tree: jmpscale.cast(tree, jnp.float16),
    "grad_report": jmpscale.grad_report,
    "with_loss_scaling": lambda tree: TX.update(tree, TX.init(jnp.ones(2))),
}


@pytest.mark.parametrize("call", REF_CALLS.values(), ids=REF_CALLS)
def test_every_function_refuses_a_jax_ref(call):
    """Its values would be neither checked nor unscaled, and a skipped step would change it."""
    if not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no public references")
    message = r"must hold values, got a jax\.Ref at \w+(\[0\])?\['w'\]\. Read it with ref\[\.\.\.\]"
    with pytest.raises(TypeError, match=message):
        call({"w": jax.new_ref(jnp.array([1.0, jnp.inf]))})

    @jax.jit
    def run(x):
        return call({"w": jax.new_ref(x)})

    with pytest.raises(TypeError, match=message):
        run(jnp.ones(2))


def test_get_scaler_refuses_a_scaler_whose_arrays_a_filter_removed():
    with pytest.raises(ValueError, match="got one without loss_scale"):
        jmpscale.get_scaler({"scaler": jax.tree.map(lambda _: None, jmpscale.dynamic())})


def test_step_applied_is_that_of_the_most_recent_step(variant):
    scaler = jmpscale.dynamic()
    assert scaler.step_applied
    for finite in (False, False, True, False):
        scaler = variant(jmpscale.update)(scaler, jnp.array(finite))
        assert bool(scaler.step_applied) is finite


def test_shapes_may_be_symbolic():
    """As in a program that is exported for every batch size."""
    (size,) = jax.export.symbolic_shape("size")
    shapes = jax.ShapeDtypeStruct((size,), jnp.float32)

    def run(x):
        state = jmpscale.update(jmpscale.dynamic(), jmpscale.all_finite(x), loss=x)
        return state.skipped, jmpscale.cast(x, jnp.float16)

    stored = jax.export.export(jax.jit(run))(shapes)
    for n in (3, 5000):
        assert stored.call(jnp.ones(n))[0] == 0
        assert stored.call(jnp.ones(n).at[-1].set(jnp.nan))[0] == 1


@pytest.mark.parametrize("max_norm", [None, 100.0])
def test_with_loss_scaling_takes_symbolic_shapes(max_norm):
    tx = jmpscale.with_loss_scaling(optax.sgd(optax.constant_schedule(1.0)), jmpscale.static(4.0), max_norm=max_norm)
    shapes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("size"), jnp.float32)
    stored = jax.export.export(jax.jit(lambda g: tx.update(g, tx.init(g))[0]))(shapes)
    for n in (1, 3):
        assert stored.call(jnp.full(n, 8.0)).tolist() == [-8.0] * n
        assert stored.call(jnp.full(n, jnp.inf)).tolist() == [0.0] * n


@pytest.mark.usefixtures("standard_promotion")
def test_with_loss_scaling_initialises_from_abstract_float16_parameters():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    for state in (tx.init(jax.ShapeDtypeStruct((2,), jnp.float16)), tx.init(jnp.ones(2, jnp.float16))):
        assert state.inner_state[0].mu.dtype == jnp.float32


def test_complex_parameters_keep_the_signs_of_their_zeros_on_a_skip():
    zeros = jax.lax.complex(jnp.full(2, -0.0), jnp.full(2, -0.0))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0))
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(zeros + jnp.inf, tx.init(zeros), zeros)
        testing.assert_step_is_noop(zeros, optax.apply_updates(zeros, updates))


def test_optax_step_keeps_leaves_without_an_update():
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
