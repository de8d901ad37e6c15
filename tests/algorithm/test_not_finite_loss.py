"""A step whose loss or gradients are not finite is skipped, and derivatives of a finite loss keep their bits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

import meshes
from messages import CONSTANT
from tables import rows

RANDOM = np.random.default_rng(0)
W = jnp.asarray(RANDOM.normal(size=(32, 64)) * 20, jnp.float32)
X = jnp.asarray(RANDOM.normal(size=(16, 32)), jnp.float32)
OVERFLOWING = X.at[0].multiply(1e4)  # one of 16 examples, whose result in the last layer is above 65504
TARGETS = 2.0 * jnp.asarray(RANDOM.integers(0, 2, (16, 1)), jnp.float32) - 1

# In these losses, a comparison selects a derivative of zero where the result y of the last layer is NaN.
LOSSES = {
    "hinge": lambda y: jnp.mean(optax.hinge_loss(y, TARGETS)),
    "squared hinge": lambda y: jnp.mean(jax.nn.relu(1 - TARGETS * y) ** 2),
    "ReLU": lambda y: jnp.mean(jax.nn.relu(y)),
    "maximum": lambda y: jnp.mean(jnp.maximum(0.0, 1 - TARGETS * y)),
    "clip": lambda y: jnp.mean(jnp.clip(y, -1e6, 1e6)),
    "Huber": lambda y: jnp.mean(optax.huber_loss(y)),
    "triplet": lambda y: jnp.mean(optax.losses.triplet_margin_loss(y[:5], y[5:10], y[10:15])),
    "all gradients are masked": lambda y: jnp.sum(jnp.where(jnp.isfinite(y).all(), y, jax.lax.stop_gradient(y))),
}


def matmul_by_hand(x, w):
    return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)


def invalid_data(x, w):
    """A matmul in float32 whose result has a NaN, as from invalid data."""
    return (x @ w).at[0, 0].set(jnp.where(jnp.isfinite(x).all() & (x > 1e3).any(), jnp.nan, 0))


FORWARD = {  # a wrapper of the loss function, and a matmul
    "autocast": (jmpscale.autocast, jnp.matmul),
    "casts by hand": (lambda fun: fun, matmul_by_hand),
    "invalid data in float32": (lambda fun: fun, invalid_data),
}


def wrapper_step(value_and_grad, loss_fn, scaler):
    tx = jmpscale.with_loss_scaling(optax.sgd(1e-3), scaler)

    def step(w, x):
        opt_state = tx.init(w)
        loss, grads = value_and_grad(loss_fn)(opt_state, w, x)
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        return loss, optax.apply_updates(w, updates), opt_state.scaler

    return step


def functional_step(value_and_grad, loss_fn, scaler):
    tx = optax.sgd(1e-3)

    def step(w, x):
        loss, grads = value_and_grad(loss_fn)(scaler, w, x)
        finite = jmpscale.all_finite((loss, grads))
        w, _ = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), w, tx.init(w))
        return loss, w, jmpscale.update(scaler, finite, loss=loss)

    return step


def scale_and_unscale(loss_fn):
    def grad(scaler, w, x):
        scale = functools.partial(jmpscale.scale, scaler)
        loss, pullback = jax.vjp(lambda w: scale(loss_fn(w, x)), w)
        return loss, jmpscale.unscale(scaler, pullback(jnp.ones_like(loss))[0])

    return grad


def scaled_backward(loss_fn):
    def grad(scaler, w, x):
        return jax.value_and_grad(jmpscale.scaled_backward(loss_fn, scaler))(w, x)

    return grad


STEPS = {  # a function that creates a training step, and a function that takes gradients
    "optax wrapper": (wrapper_step, jmpscale.value_and_grad),
    "functional API": (functional_step, jmpscale.value_and_grad),
    "optax wrapper, scaled_backward": (wrapper_step, scaled_backward),
    "functional API, scale and unscale": (functional_step, scale_and_unscale),
}
CASES = {
    **{f"{loss}, {forward}": (loss, "optax wrapper", forward) for loss in LOSSES for forward in FORWARD},
    **{f"{loss}, {step}": (loss, step, "autocast") for loss in ("hinge", "all gradients are masked") for step in STEPS},
}
DEFAULT = {"hinge, autocast", "all gradients are masked, functional API"}


@pytest.mark.filterwarnings(f"ignore:the .* {CONSTANT}")
@pytest.mark.parametrize("case", rows(CASES, default=DEFAULT))
def test_step_with_a_loss_that_is_not_finite_is_skipped(case):
    loss, step, forward = LOSSES[case[0]], STEPS[case[1]], FORWARD[case[2]]
    wrap, matmul = forward
    make_step, value_and_grad = step
    scaler = jmpscale.dynamic(16.0)
    train_step = jax.jit(make_step(value_and_grad, wrap(lambda w, x: loss(matmul(x, w))), scaler))
    value, after, new = train_step(W, X)
    assert jnp.isfinite(value)
    assert new.total_skips == 0
    assert not np.array_equal(after, W)
    value, after, new = train_step(W, OVERFLOWING)
    if not jnp.isfinite(value):  # casts by hand of a clip give a finite loss
        np.testing.assert_array_equal(after, W)
        assert (new.loss_scale, new.total_skips) == (16.0, 1)
        assert new.last_skip_reason == jmpscale.SkipReason.LOSS


@pytest.mark.full
@pytest.mark.filterwarnings(f"ignore:the .* {CONSTANT}")
def test_step_that_is_skipped_because_of_its_loss_needs_no_loss_scale():
    """`static(1.0)` is the guard against losses of NaN in float32 and bfloat16."""
    fun = jmpscale.autocast(lambda w, x: jnp.mean(jax.nn.relu(x @ w)), dtype=jnp.bfloat16)
    step = jax.jit(wrapper_step(jmpscale.value_and_grad, fun, jmpscale.static(1.0)))
    _, after, scaler = step(W, X.at[0, 0].set(jnp.nan))
    np.testing.assert_array_equal(after, W)
    assert (scaler.total_skips, scaler.last_skip_reason) == (1, jmpscale.SkipReason.LOSS)


@pytest.mark.full
def test_gradients_of_a_loss_that_is_not_finite_are_nan():
    """Even if a comparison hides the NaN from the backward pass, so that `all_finite(grads)` alone suffices."""
    masked = jmpscale.autocast(lambda w, x: LOSSES["all gradients are masked"](x @ w))
    _, grads = jmpscale.value_and_grad(masked, argnums=(0, 1))(jmpscale.dynamic(16.0), W, OVERFLOWING)
    assert jnp.isnan(grads[0]).all()
    assert jnp.isnan(grads[1]).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("call", [jmpscale.scale, lambda scaler, x: jmpscale.scaled_backward(lambda x: x, scaler)(x)])
def test_derivatives_of_a_loss_that_is_not_finite_are_nan(call, value, variant):
    """Its value remains."""
    loss, derivative = variant(jax.value_and_grad(lambda x: call(jmpscale.static(2.0), x)))(jnp.float32(value))
    np.testing.assert_array_equal(loss, value * (2 if call is jmpscale.scale else 1))
    assert jnp.isnan(derivative)


COMPARISONS = {  # that select a derivative of zero for all gradients
    "where": lambda w: jnp.where(jnp.sum(w) > 0, jnp.inf, jnp.sum(w)),
    "ReLU": lambda w: jax.nn.relu(jnp.sum(w) + jnp.nan),
}


@pytest.mark.parametrize("loss", rows(COMPARISONS, default={"where"}))
def test_comparison_may_hide_a_loss_that_is_not_finite_from_all_gradients_but_not_from_value_and_grad(loss):
    scaler, w = jmpscale.static(2.0), jnp.ones(3)
    value, grads = jmpscale.value_and_grad(loss)(scaler, w)
    assert not jmpscale.all_finite((value, grads))
    assert jnp.isnan(grads).all()
    for fun in (lambda w: jmpscale.scale(scaler, loss(w)), jmpscale.scaled_backward(loss, scaler)):
        value, grads = jax.value_and_grad(fun)(w)
        assert not jmpscale.all_finite((value, grads))
        np.testing.assert_array_equal(grads, 0.0)


def test_forward_mode_derivative_of_a_loss_that_is_not_finite_is_nan():
    assert jnp.isnan(jax.jvp(lambda x: jmpscale.scale(jmpscale.static(2.0), x / 0), (1.0,), (1.0,))[1])


ARRAYS = {  # derivatives that must remain finite, because the elements that are not finite are unused
    "masked logits": jax.nn.logsumexp,
    "losses of examples that a where drops": lambda y: jnp.sum(jnp.where(jnp.isfinite(y), y, 0)),
}


@pytest.mark.parametrize("reduce", rows(ARRAYS, only_full={"masked logits"}))
def test_arrays_that_are_not_finite_keep_finite_derivatives(reduce):
    """Only a scalar is a loss: `scale` and `scaled_backward` do not know which elements of an array are used."""

    def losses(w):
        return jnp.where(X > 1, -jnp.inf, X * w)

    expected = jax.grad(lambda w: reduce(losses(w)))(2.0)
    assert jnp.isfinite(expected)
    by_scale = jax.grad(lambda w: reduce(jmpscale.scale(jmpscale.static(4.0), losses(w)) / 4))(2.0)
    by_scaled_backward = jax.grad(lambda w: reduce(jmpscale.scaled_backward(losses, 4.0)(w)))(2.0)
    chex.assert_trees_all_close((by_scale, by_scaled_backward), (expected, expected), rtol=1e-6)


def test_auxiliary_data_that_are_not_finite_change_no_gradient():
    def loss_fn(w, x):
        return jnp.sum(w * x), {"ratio": jnp.sum(w) / 0}

    expected = jax.grad(loss_fn, has_aux=True)(W, W)[0]
    _, by_value_and_grad = jmpscale.value_and_grad(loss_fn, has_aux=True)(jmpscale.dynamic(), W, W)
    by_scaled_backward, _ = jax.grad(jmpscale.scaled_backward(loss_fn, 2.0**16, has_aux=True), has_aux=True)(W, W)
    chex.assert_trees_all_equal((by_value_and_grad, by_scaled_backward), (expected, expected))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.full)])
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_derivatives_of_a_finite_loss_keep_their_bits(order, dtype):
    def derivative(fun):
        for _ in range(order):
            fun = jax.grad(fun)
        return jax.jit(fun)

    w = jnp.asarray(0.7, dtype)
    expected = 2.0**10 * derivative(lambda w: jnp.sin(w) * w)(w)
    result = derivative(lambda w: jmpscale.scale(jmpscale.static(2.0**10), jnp.sin(w) * w))(w)
    chex.assert_trees_all_equal(result, expected)
    assert jax.typeof(result) == jax.typeof(expected)
    assert derivative(jmpscale.scaled_backward(lambda w: jnp.sin(w) * w, 2.0**10))(w) == expected / 2.0**10


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_loss_that_is_not_finite_on_one_device_skips_the_step_on_all(check_vma):
    """Under `shard_map`, each device has a loss of its own, and the gradients may be summed already."""
    mesh = meshes.make_mesh(data=2)

    loss_fn = jmpscale.autocast(lambda w, x: LOSSES["ReLU"](x @ w))
    tx = jmpscale.with_loss_scaling(optax.sgd(1e-3), axis_name=None if check_vma else "data")

    def on_each_device(w, opt_state, x):
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, w, x)
        grads = grads if check_vma else jax.lax.psum(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state.scaler.total_skips

    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P()}
    run = jax.jit(jax.shard_map(on_each_device, mesh=mesh, check_vma=check_vma, **specs))
    for x, skips in (X, 0), (OVERFLOWING, 1):
        w, total_skips = run(W, tx.init(W), x)
        assert total_skips == skips
        assert np.array_equal(w, W) == bool(skips)
