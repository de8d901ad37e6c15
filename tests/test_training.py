"""Whole training loops with both APIs: one compilation, no transfer, and never a non-finite parameter."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

import hlo

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 8)), jnp.float32)
Y = jnp.sin(X.sum(1, keepdims=True))
BATCH = (X, Y)


def _params():
    rng = np.random.default_rng(1)
    sizes = [(8, 16), (16, 1)]
    return [{"w": jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32), "b": jnp.zeros(s[1])} for s in sizes]


def _loss(params, batch, dtype=jnp.float16):
    x, y = batch
    h = x.astype(dtype)
    for layer in params:
        h = jnp.tanh(h @ layer["w"].astype(dtype) + layer["b"].astype(dtype)[None])
    return jnp.mean((h.astype(jnp.float32) - y) ** 2)


SCALER = jmpscale.dynamic(2.0**12, growth_interval=5)
TX = optax.adamw(1e-2)
WRAPPED_TX = jmpscale.with_loss_scaling(TX, SCALER)
NO_FAULT = np.int32(-1), np.int32(0), np.float32(0)
FAULT_FREE = tuple(map(jnp.asarray, NO_FAULT))


def _inject(grads, fault):
    """Replaces one value of one leaf of the gradients."""
    leaf, place, value = fault
    leaves, treedef = jax.tree.flatten(grads)
    for i, x in enumerate(leaves):
        here = (leaf == i) & (jnp.arange(x.size) == place % x.size).reshape(x.shape)
        leaves[i] = jnp.where(here, value, x)
    return jax.tree.unflatten(treedef, leaves)


def _functional(carry, batch, fault):
    params, opt_state, scaler = carry
    loss, grads = jmpscale.value_and_grad(_loss)(scaler, params, batch)
    grads = _inject(grads, fault)
    finite = jmpscale.all_finite(grads)
    params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(TX, grads), params, opt_state)
    return params, opt_state, jmpscale.update(scaler, finite, loss=loss)


def _wrapped(carry, batch, fault):
    params, opt_state = carry
    loss, grads = jmpscale.value_and_grad(_loss)(opt_state, params, batch)
    updates, opt_state = WRAPPED_TX.update(_inject(grads, fault), opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def _start(api):
    params = _params()
    if api is _functional:
        return params, TX.init(params), jax.tree.map(jnp.asarray, SCALER)
    return params, WRAPPED_TX.init(params)


@functools.cache
def _jitted(api):
    """One compilation serves all tests of an API; a second trace is an error."""
    return jax.jit(chex.assert_max_traces(n=1)(api), donate_argnums=0)


BOTH_APIS = pytest.mark.parametrize("api", [_functional, _wrapped], ids=["functional API", "optax wrapper"])


@BOTH_APIS
def test_it_trains_with_one_compilation(api):
    step, carry = _jitted(api), _start(api)
    before = _loss(carry[0], BATCH)
    for _ in range(150):
        carry = step(carry, BATCH, FAULT_FREE)
    assert _loss(carry[0], BATCH) < 0.2 * before
    assert int(jmpscale.get_scaler(carry).finite_steps) < 5
    assert step._cache_size() == 1


def _forbid_reading(monkeypatch):
    """Makes every conversion of a device array to a Python value raise."""

    def forbidden(self, *args, **kwargs):
        raise AssertionError("a device array was read by the host")

    array = type(X)
    for name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "__array__"):
        monkeypatch.setattr(array, name, forbidden)


@BOTH_APIS
def test_no_value_crosses_between_host_and_device_inside_the_loop(api, monkeypatch):
    step, carry = _jitted(api), _start(api)
    program = step.lower(carry, BATCH, FAULT_FREE).compile().as_text()
    assert not re.search(r"callback|infeed|outfeed|\bsend\b|\brecv\b", program)
    carry = step(carry, BATCH, FAULT_FREE)
    with monkeypatch.context() as patch, jax.transfer_guard("disallow"):
        _forbid_reading(patch)
        for _ in range(5):
            carry = step(carry, BATCH, FAULT_FREE)
        jmpscale.metrics(jmpscale.get_scaler(carry))
    assert jmpscale.get_scaler(carry).finite_steps == 1


@BOTH_APIS
def test_the_program_has_one_conditional_and_no_collective(api):
    program = _jitted(api).lower(_start(api), BATCH, FAULT_FREE).compile().as_text()
    assert hlo.count(program, "conditional") == 1
    assert hlo.count(program, "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute") == 0


def test_the_checks_for_transfers_detect_one(monkeypatch):
    one = jnp.array(1)
    with monkeypatch.context() as patch:
        _forbid_reading(patch)
        for read in (bool, float, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: [0, 1, 2][x]):
            with pytest.raises(AssertionError, match="read by the host"):
                read(one)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed host-to-device"):
        jax.jit(lambda x: x + 1)(np.ones(3))


@BOTH_APIS
def test_one_non_finite_value_in_any_gradient_never_reaches_a_parameter(api):
    step = _jitted(api)
    carry = step(_start(api), BATCH, FAULT_FREE)
    frozen = jax.tree.map(np.array, carry[0])
    for leaf in range(4):
        for place in (0, 1, 7, 8, 127, 255):
            for value in (np.nan, np.inf, -np.inf):
                fault = jnp.int32(leaf), jnp.int32(place), jnp.float32(value)
                carry = step(carry, BATCH, fault)
                chex.assert_trees_all_equal(carry[0], frozen)
    assert jmpscale.get_scaler(carry).skipped == 72
    carry = step(carry, BATCH, FAULT_FREE)
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (carry[0], frozen)), strict=True))


@BOTH_APIS
def test_a_loop_in_scan_equals_a_loop_in_python(api):
    faults = [NO_FAULT] * 12
    faults[3], faults[4], faults[9] = (0, 5, np.nan), (3, 0, np.inf), (2, 200, -np.inf)
    faults = tuple(jnp.asarray(x, dtype) for x, dtype in zip(zip(*faults, strict=True), "iif", strict=True))
    step, carry = _jitted(api), _start(api)
    for i in range(12):
        carry = step(carry, BATCH, jax.tree.map(lambda x, i=i: x[i], faults))
    scan = jax.jit(lambda start: jax.lax.scan(lambda c, fault: (api(c, BATCH, fault), None), start, faults)[0])
    scanned = scan(_start(api))
    assert jmpscale.get_scaler(scanned).skipped == 3
    chex.assert_trees_all_close(scanned, carry, rtol=2e-3, atol=1e-5)


def test_value_and_grad_recovers_gradients_that_underflow_in_float16():
    """With a loss so small that every float16 gradient of the unscaled loss is zero."""
    params = _params()

    @jax.jit
    def gradients(scaler):
        return jmpscale.value_and_grad(lambda p: _loss(p, BATCH) * 1e-9)(scaler, params)[1]

    exact = jax.jit(jax.grad(lambda p: _loss(p, BATCH, jnp.float32) * 1e-9))(params)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradients(jmpscale.static(1.0))))
    for scaled, reference in zip(*map(jax.tree.leaves, (gradients(jmpscale.static(2.0**26)), exact)), strict=True):
        np.testing.assert_allclose(scaled, reference, atol=0.02 * float(jnp.abs(reference).max()))
