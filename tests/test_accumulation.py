"""An overflow skips the right part of a step with micro-batches, multiple losses or optimizers, or two derivatives."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

pytestmark = pytest.mark.full

# Small integers: float16 holds every gradient exactly, but not their sum.
RNG = np.random.default_rng(0)
X, W = RNG.integers(0, 4, (16, 8, 3)).astype(np.float32), np.array([[1.0], [-2.0], [3.0]], np.float32)
Y = (X @ W - RNG.integers(1, 20, (16, 8, 1))).astype(np.float32)
OVERFLOW, INVALID = 1e6, np.nan  # targets: with the first the backward pass overflows, with the second the loss is NaN


def _loss(w, x, y):
    prediction = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((prediction - y) ** 2)


def _expected(indices):
    """Returns the mean gradient over some micro-batches, in float64."""
    x, y = (np.float64(a[indices]).reshape(-1, a.shape[-1]) for a in (X, Y))
    return 2 * x.T @ (x @ W - y) / len(x)


@functools.partial(jax.jit, static_argnames="skip")
def _accumulate(scaler, y, skip):
    """Returns the mean gradient over the finite micro-batches, or zero, and the scaler after the accumulated step."""

    def add(carry, micro_batch):
        total, count = carry
        loss, grads = jmpscale.value_and_grad(_loss)(scaler, jnp.asarray(W), *micro_batch)
        finite = jmpscale.all_finite(grads)
        add_grads = finite | (skip == "step")
        carry = jmpscale.apply_if(add_grads, lambda total, count: (total + grads, count + 1), total, count)
        return carry, (finite, loss)

    start = jnp.zeros_like(W), jnp.float32(0)
    (total, count), (flags, losses) = jax.lax.scan(add, start, (jnp.asarray(X), y))
    finite = flags.all() if skip == "step" else count > 0
    mean = jmpscale.apply_if(finite, lambda _: total / jnp.maximum(count, 1), jnp.zeros_like(W))
    return mean, jmpscale.update(scaler, flags.all(), loss=losses)


@pytest.mark.parametrize("skip", ["step", "micro-batch"])
@pytest.mark.parametrize(
    ("value", "at", "scale", "reason"),
    [(0.0, [], 16.0, "NONE"), (OVERFLOW, [4, 15], 8.0, "GRADIENTS"), (INVALID, [4], 16.0, "LOSS")],
    ids=["finite", "overflow", "NaN"],
)
def test_apply_if_skips_an_accumulated_step_or_a_micro_batch(value, at, scale, reason, skip):
    y = Y.copy()
    y[at, 0] = value
    grads, scaler = _accumulate(jmpscale.dynamic(16.0), jnp.asarray(y), skip)
    finite = np.setdiff1d(np.arange(16), at)
    expected = _expected(finite) if skip == "micro-batch" or not at else np.zeros_like(W)
    np.testing.assert_allclose(grads, expected, rtol=1e-6)
    assert (scaler.loss_scale, bool(scaler.total_skips)) == (scale, bool(at))
    assert scaler.last_skip_reason == jmpscale.SkipReason[reason]


def test_scan_accumulates_the_gradients_of_an_equinox_model():
    """The sum starts at zeros with the structure of the gradients: without the functions and integers of the model."""
    linear = eqx.nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))
    linear = eqx.tree_at(lambda layer: layer.weight, linear, jnp.asarray(W.T))
    model = eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.identity)])

    @jmpscale.value_and_grad(transform=eqx.filter_value_and_grad)
    @jmpscale.autocast
    def grad_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def accumulate(model, scaler, x, y):
        def add(total, micro_batch):
            loss, grads = grad_fn(scaler, model, *micro_batch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = optax.tree.zeros_like(eqx.filter(model, eqx.is_inexact_array))
        return jax.lax.scan(add, zeros, (x, y))[0]

    total = accumulate(model, jmpscale.dynamic(16.0), jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(total[0].weight.T / len(X), _expected(np.arange(len(X))), rtol=1e-6)


WEIGHTS = {"large": 1e3, "small": 1e-9}
PARAMS, TX = {name: jnp.ones((3, 1)) for name in WEIGHTS}, optax.trace(1.0)


@jax.jit
def _step_of_two_losses(scalers):
    flags, total = {}, jax.tree.map(jnp.zeros_like, PARAMS)
    for name, weight in WEIGHTS.items():

        def loss_fn(params, name=name, weight=weight):
            prediction = jnp.asarray(X[0], jnp.float16) @ params[name].astype(jnp.float16)
            return weight * jnp.mean(prediction.astype(jnp.float32))

        _, grads = jmpscale.value_and_grad(loss_fn)(scalers[name], PARAMS)
        flags[name] = jmpscale.all_finite(grads)
        total = jax.tree.map(jnp.add, total, grads)
    step = jmpscale.optax_step(TX, total)
    after = jmpscale.apply_if(flags["large"] & flags["small"], step, PARAMS, TX.init(PARAMS))
    return after, {name: jmpscale.update(scaler, flags[name]) for name, scaler in scalers.items()}


@pytest.mark.parametrize("overflows", [[], ["large"], ["small"], ["large", "small"]], ids="+".join)
def test_update_adjusts_the_scaler_of_each_loss(overflows):
    """An overflow of either loss skips the step, and only the scale of that loss backs off."""
    scales = {"large": 2.0**4, "small": 2.0**32} | dict.fromkeys(overflows, 2.0**80)
    (params, opt_state), scalers = _step_of_two_losses(
        {name: jmpscale.dynamic()._replace(loss_scale=jnp.float32(scale)) for name, scale in scales.items()}
    )
    if overflows:
        testing.assert_step_is_noop((PARAMS, TX.init(PARAMS)), (params, opt_state))
    else:
        for name, grads in opt_state.trace.items():
            np.testing.assert_allclose(grads, WEIGHTS[name] * X[0].mean(0)[:, None], rtol=1e-3)
    for name, scaler in scalers.items():
        assert scaler.loss_scale == scales[name] * (0.5 if name in overflows else 1.0)


@jax.jit
def _step_of_two_networks(params, scaler, factors):
    flags, tx = {}, optax.sgd(1.0)
    for name, other in (("d", "g"), ("g", "d")):

        def loss_fn(w, x, factor=factors[name]):
            return factor * jnp.sum(w * x)

        _, grads = jmpscale.value_and_grad(loss_fn)(scaler, params[name], params[other])
        flags[name] = jmpscale.all_finite(grads)
        step = jmpscale.optax_step(tx, grads)
        params = params | {name: jmpscale.apply_if(flags[name], step, params[name], tx.init(params[name]))[0]}
    return params, jmpscale.update(scaler, flags["d"] & flags["g"])


@pytest.mark.parametrize("overflows", [[], ["g"], ["d", "g"]], ids="+".join)
def test_update_adjusts_one_scaler_for_two_optimizers(overflows):
    """Each network skips independently, and the scale backs off once."""
    params = {"d": jnp.ones(2), "g": jnp.full(2, 2.0)}
    factors = {name: 2.0 ** (126 * (name in overflows)) for name in params}
    after, scaler = _step_of_two_networks(params, jmpscale.dynamic(16.0), factors)
    assert [name for name in params if (after[name] == params[name]).all()] == overflows
    assert (scaler.loss_scale, scaler.total_skips) == ((8.0, 1) if overflows else (16.0, 0))


def test_value_and_grad_under_vmap_differentiates_each_example():
    x, y = jnp.asarray(X[:, 0]), jnp.asarray(Y[:, 0]).at[4].set(OVERFLOW)
    run = jax.jit(jax.vmap(jmpscale.value_and_grad(_loss), in_axes=(None, None, 0, 0)))
    _, grads = run(jmpscale.static(2.0**6), jnp.asarray(W), x, y)
    expected = jax.jit(jax.vmap(jax.grad(_loss), in_axes=(None, 0, 0)))(jnp.asarray(W), x, y)
    others = np.arange(16) != 4
    chex.assert_trees_all_close(grads[others], expected[others], rtol=1e-6)
    np.testing.assert_array_equal(jax.vmap(jmpscale.all_finite)(grads), others)


def _penalty(w, slopes_of):
    slopes = slopes_of(lambda x: jnp.sum(jnp.tanh(x @ w.astype(x.dtype)).astype(jnp.float32)))(jnp.asarray(X[0] / 8))
    return jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=1)) - 1) ** 2)


def _half_slopes(scaler):
    def slopes_of(model):
        scaled = jax.grad(lambda x: jmpscale.scale(scaler, model(x)))
        return lambda x: jmpscale.unscale(scaler, scaled(x.astype(jnp.float16)))

    return slopes_of


@pytest.mark.parametrize(("scale", "finite"), [(1.0, True), (2.0**10, True), (2.0**40, False)])
def test_unscale_works_in_a_gradient_penalty(scale, finite):
    """Both derivatives are in float16, and either may overflow."""
    scaler = jmpscale.static(scale)
    loss_fn = functools.partial(_penalty, slopes_of=_half_slopes(scaler))
    _, grads = jax.jit(jmpscale.value_and_grad(loss_fn))(scaler, jnp.asarray(W))
    assert jmpscale.all_finite(grads) == finite
    if finite:
        np.testing.assert_allclose(grads, jax.jit(jax.grad(_penalty), static_argnums=1)(W, jax.grad), rtol=0.02)


def test_value_and_grad_under_jvp_gives_hessian_vector_products():
    scaled = functools.partial(jmpscale.value_and_grad(lambda w: jnp.sum(jnp.sin(w) * w)), jmpscale.static(2.0**10))
    product = jax.jvp(scaled, (jnp.asarray(W),), (jnp.ones_like(W),))[1][1]
    np.testing.assert_allclose(product, 2 * np.cos(W) - W * np.sin(W), rtol=1e-5)
