"""Whole training runs: float16 reaches float32's loss; test_random_programs.py trains with faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

import reference

pytestmark = pytest.mark.usefixtures("standard_promotion")

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((16, 32, 4)), jnp.float32)  # batches
Y = jnp.sin(X.sum(2, keepdims=True))
PARAMS = [jnp.asarray(RANDOM.standard_normal(shape) / 2, jnp.float32) for shape in ((4, 16), (16, 1))]
# Halves the compile time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def assert_follows_the_rule(start, states):
    """Compares the states after each step with the states of the rule in plain Python."""
    states = jax.tree.map(np.asarray, states)
    expected = {name: getattr(start, name).item() for name in reference.FIELDS}
    for step, skipped in enumerate(np.diff(states.total_skips, prepend=0)):
        expected = reference.step(start.config, expected, not skipped)
        assert {name: getattr(states, name)[step] for name in reference.FIELDS} == expected


def loss_fn(params, x, y, dtype=jnp.float16, factor=1.0):
    x, (inner, outer) = jmpscale.cast((x, params), dtype)
    prediction = (jnp.tanh(x @ inner) @ outer).astype(jnp.float32)
    return factor * jnp.mean((prediction - y) ** 2)


# With this factor before the loss nearly all gradients underflow in float16, whose smallest number is 2^-24.
SMALL = 2.0**-28
SGD = optax.sgd(0.05 / SMALL, momentum=0.9)
WAYS = {  # the dtype of the model, the scaler, and the API
    "float32": (jnp.float32, jmpscale.disabled(), "functional"),
    "float16": (jnp.float16, jmpscale.disabled(), "functional"),
    "functional": (jnp.float16, jmpscale.dynamic(2.0**40, growth_interval=20, max_scale=2.0**60), "functional"),
    "wrapper": (jnp.float16, jmpscale.dynamic(2.0**40, growth_interval=20, max_scale=2.0**60), "wrapper"),
    "loss_scaled": (jnp.float16, jmpscale.static(2.0**24), "loss_scaled"),
    "too_large_scale": (jnp.float16, jmpscale.dynamic(2.0**60, max_scale=2.0**60), "functional"),
}


@functools.cache
def train(way, steps=1_000):
    """Returns the mean loss of the last steps in units of SMALL, and the history of the scaler."""
    dtype, scaler, api = WAYS[way]
    tx = SGD if api == "functional" else jmpscale.with_loss_scaling(SGD, scaler)
    loss = functools.partial(loss_fn, dtype=dtype, factor=SMALL)

    def step(carry, number):
        params, opt_state, scaler = carry
        holder, batch = scaler if api == "functional" else opt_state, (X[number % 16], Y[number % 16])
        if api == "loss_scaled":
            value, grads = jax.value_and_grad(jmpscale.loss_scaled(loss, holder))(params, *batch)
        else:
            value, grads = jmpscale.value_and_grad(loss)(holder, params, *batch)
        if api == "functional":
            finite = jmpscale.all_finite(grads)
            params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
            scaler = jmpscale.update(scaler, finite, loss=value)
        else:
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            params, scaler = optax.apply_updates(params, updates), opt_state.scaler
        return (params, opt_state, scaler), (value, scaler)

    run = jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[1])
    losses, scalers = run((PARAMS, tx.init(PARAMS), jax.tree.map(jnp.asarray, scaler)))
    return float(losses[-32:].mean() / SMALL), scalers


FULL = [pytest.param(way, marks=pytest.mark.full) for way in ("functional", "loss_scaled", "too_large_scale")]


@pytest.mark.parametrize("way", ["wrapper", *FULL])
def test_float16_with_loss_scaling_reaches_the_loss_of_float32(way):
    (scaled, scalers), float32, float16 = train(way), train("float32")[0], train("float16")[0]
    assert float16 > 50 * float32
    assert scaled == pytest.approx(float32, rel=0.2)
    assert_follows_the_rule(WAYS[way][1], scalers)
    assert (scalers.total_skips[-1] > 10) == (way != "loss_scaled")
