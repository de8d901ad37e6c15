"""Whole training runs: float16 reaches float32's loss, and batches with faults change nothing."""

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop, inject, inject_backward

import reference

pytestmark = pytest.mark.usefixtures("standard_promotion")

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((16, 32, 4)), jnp.float32)  # batches
Y = jnp.sin(X.sum(2, keepdims=True))
PARAMS = [jnp.asarray(RANDOM.standard_normal(shape) / 2, jnp.float32) for shape in ((4, 16), (16, 1))]
# Halves the compile time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
GRADIENTS, LOSS = jmpscale.SkipReason.GRADIENTS, jmpscale.SkipReason.LOSS


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


# Faults. A run is equal, bit for bit, to one without the batches in which there was a fault.

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))
# The scale must not change, because float16 rounds subnormal numbers differently at another scale.
CONSTANT_SCALE = jmpscale.dynamic(2.0**10, hysteresis=100)
WRAPPED_ADAMW = jmpscale.with_loss_scaling(ADAMW, CONSTANT_SCALE)
FAULTS = {  # step: the value, and the gradient that it replaces, or None for a target, which the loss depends on
    2: (jnp.inf, "[0]"),
    3: (jnp.nan, "[1]"),
    7: (jnp.nan, None),
    9: (-jnp.inf, "[1]"),
    15: (jnp.inf, None),
}


def faulty_loss(params, x, y, number):
    for at, (value, path) in FAULTS.items():
        if path is None:
            y = inject(y, value, path="", when=number == at)
        else:
            params = inject_backward(params, value, path=path, when=number == at)
    return loss_fn(params, x, y)


def functional(carry, x, y, number):
    params, opt_state, ema, scaler = carry
    loss, grads = jmpscale.value_and_grad(faulty_loss)(scaler, params, x, y, number)

    def step(params, opt_state, ema):
        params, opt_state = jmpscale.optax_step(ADAMW, grads)(params, opt_state)
        return params, opt_state, optax.incremental_update(params, ema, 0.1)

    finite = jmpscale.all_finite(grads)
    return *jmpscale.apply_if(finite, step, params, opt_state, ema), jmpscale.update(scaler, finite, loss=loss)


def wrapper(carry, x, y, number):
    params, opt_state, ema, _ = carry
    loss, grads = jmpscale.value_and_grad(faulty_loss)(opt_state, params, x, y, number)
    updates, opt_state = WRAPPED_ADAMW.update(grads, opt_state, params, value=loss)
    params = optax.apply_updates(params, updates)
    applied = opt_state.scaler.step_applied
    ema = jmpscale.apply_if(applied, lambda ema: optax.incremental_update(params, ema, 0.1), ema)
    return params, opt_state, ema, opt_state.scaler


STEPS = {"functional": (functional, ADAMW), "wrapper": (wrapper, WRAPPED_ADAMW)}


def start(tx):
    return PARAMS, tx.init(PARAMS), PARAMS, jax.tree.map(jnp.asarray, CONSTANT_SCALE)


@functools.cache
def compiled_step(api):
    """Returns the one program that runs all steps of a test."""
    step, tx = STEPS[api]
    return jit(step).lower(start(tx), X[0], Y[0], 0).compile()


@pytest.mark.parametrize("api", ["wrapper", pytest.param("functional", marks=pytest.mark.full)])
def test_run_with_faults_equals_the_run_without_these_batches(api):
    step, tx = compiled_step(api), STEPS[api][1]

    def run(numbers):
        carry = start(tx)
        for number in numbers:
            carry = step(carry, X[number], Y[number], number)
            if number in FAULTS:
                assert carry[-1].last_skip_reason == (GRADIENTS if FAULTS[number][1] else LOSS)
        params, opt_state, ema, scaler = carry
        return (params, getattr(opt_state, "inner_state", opt_state), ema), scaler

    (with_faults, scaler), (without, _) = run(range(16)), run(sorted(set(range(16)) - FAULTS.keys()))
    assert_step_is_noop(without, with_faults)
    assert (scaler.total_skips, scaler.loss_scale) == (len(FAULTS), 2.0**10)
    assert with_faults[1][-1].count == 16 - len(FAULTS)  # the count of the learning rate's schedule


@pytest.mark.parametrize("api", STEPS)
def test_step_makes_no_transfer_between_host_and_device(api):
    assert not re.search(r"callback|infeed|outfeed|\bsend\b|\brecv\b", compiled_step(api).as_text())


@pytest.mark.full
def test_memory_of_a_training_loop_does_not_grow():
    step, carry, sizes = compiled_step("functional"), start(ADAMW), []
    for i in range(300):
        carry = step(carry, X[i % 16], Y[i % 16], i % 16)
        jmpscale.metrics(carry[-1])
        jmpscale.grad_report(carry[0]).describe()
        jmpscale.raise_if_stuck(carry[-1], max_consecutive_skips=5)
        if i in (100, 299):
            gc.collect()
            sizes.append((len(jax.live_arrays()), len(gc.get_objects())))
    (arrays, objects), (arrays_after, objects_after) = sizes
    assert arrays_after == arrays
    assert objects_after - objects < 100  # one object for each step would add 199
