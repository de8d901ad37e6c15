"""Whole training loops on both routes: one compilation, no transfer, and no bad value ever in a parameter."""

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
    sizes = [(8, 16), (16, 16), (16, 1)]
    return [{"w": jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32), "b": jnp.zeros(s[1])} for s in sizes]


def _loss(params, batch, dtype=jnp.float16):
    x, y = batch
    h = x.astype(dtype)
    for layer in params:
        h = jnp.tanh(h @ layer["w"].astype(dtype) + layer["b"].astype(dtype)[None])
    return jnp.mean((h.astype(jnp.float32) - y) ** 2)


def _functional(tx, corrupt=lambda grads, _: grads):
    def step(carry, batch, fault=None):
        params, opt_state, scaler = carry

        def scaled(params):
            loss = _loss(params, batch)
            return jmpscale.scale(scaler, loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        grads, finite = jmpscale.unscale_and_check(scaler, corrupt(grads, fault))

        def apply(params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jmpscale.apply_if(finite, apply, params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    def start():
        params = _params()
        return params, tx.init(params), jmpscale.dynamic(2.0**12, growth_interval=5)

    return start, step, lambda carry: carry[2]


def _in_optax(tx, corrupt=lambda grads, _: grads):
    tx = jmpscale.with_loss_scaling(tx, jmpscale.dynamic(2.0**12, growth_interval=5))

    def step(carry, batch, fault=None):
        params, opt_state = carry

        def scaled(params):
            loss = _loss(params, batch)
            return jmpscale.scale(jmpscale.get_scaler(opt_state), loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        updates, opt_state = tx.update(corrupt(grads, fault), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def start():
        params = _params()
        return params, tx.init(params)

    return start, step, lambda carry: jmpscale.get_scaler(carry[1])


ROUTES = pytest.mark.parametrize("route", [_functional, _in_optax], ids=["functional", "in optax"])


@ROUTES
def test_it_trains_with_one_compilation(route):
    start, step, scaler_of = route(optax.adam(1e-2))
    step = jax.jit(chex.assert_max_traces(n=1)(step), donate_argnums=0)
    carry = start()
    before = _loss(carry[0], BATCH)
    for _ in range(150):
        carry = step(carry, BATCH)
    assert _loss(carry[0], BATCH) < 0.2 * before
    assert int(scaler_of(carry).good_steps) < 5
    assert step._cache_size() == 1


def _forbid_reading(monkeypatch):
    """Makes every way from a device array to a Python value raise."""

    def forbidden(self, *args, **kwargs):
        raise AssertionError("a device array was read by the host")

    array = type(X)
    for name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "__array__"):
        monkeypatch.setattr(array, name, forbidden)


@ROUTES
def test_no_value_crosses_between_host_and_device_inside_the_loop(route, monkeypatch):
    start, step, scaler_of = route(optax.adam(1e-2))
    carry, jitted = start(), jax.jit(step)
    program = jitted.lower(carry, BATCH).compile().as_text()
    assert not re.search(r"callback|infeed|outfeed|\bsend\b|\brecv\b", program)
    carry = jitted(carry, BATCH)
    with monkeypatch.context() as patch, jax.transfer_guard("disallow"):
        _forbid_reading(patch)
        for _ in range(5):
            carry = jitted(carry, BATCH)
        jmpscale.metrics(scaler_of(carry))
    assert scaler_of(carry).good_steps == 1


def test_the_watch_over_transfers_can_see_one(monkeypatch):
    one = jnp.array(1)
    with monkeypatch.context() as patch:
        _forbid_reading(patch)
        for read in (bool, float, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: [0, 1, 2][x]):
            with pytest.raises(AssertionError, match="read by the host"):
                read(one)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed host-to-device"):
        jax.jit(lambda x: x + 1)(np.ones(3))


@ROUTES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_in_any_gradient_never_reaches_a_parameter(route, value):
    def plant(grads, fault):
        leaf, place = fault
        leaves, treedef = jax.tree.flatten(grads)
        for i, x in enumerate(leaves):
            bad = x.ravel().at[place % x.size].set(value).reshape(x.shape)
            leaves[i] = jnp.where(leaf == i, bad, x)
        return jax.tree.unflatten(treedef, leaves)

    start, step, scaler_of = route(optax.adamw(1e-2), plant)
    step, carry = jax.jit(step), start()
    carry = step(carry, BATCH, (jnp.int32(-1), jnp.int32(0)))
    frozen = jax.tree.map(np.asarray, carry[:1])
    for leaf in range(6):
        for place in (0, 1, 7, 8, 127, 255):
            carry = step(carry, BATCH, (jnp.int32(leaf), jnp.int32(place)))
            chex.assert_trees_all_equal(carry[:1], frozen)
    assert scaler_of(carry).skipped == 36
    carry = step(carry, BATCH, (jnp.int32(-1), jnp.int32(0)))
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (carry[:1], frozen)), strict=True))


@ROUTES
def test_a_loop_in_scan_equals_a_loop_in_python(route):
    start, step, _ = route(optax.adam(1e-2))
    jitted, carry = jax.jit(step), start()
    for _ in range(12):
        carry = jitted(carry, BATCH)
    scanned = jax.jit(lambda c: jax.lax.scan(lambda c, _: (step(c, BATCH), None), c, length=12)[0])(start())
    chex.assert_trees_all_close(scanned, carry, rtol=2e-3, atol=1e-5)


def test_scaling_brings_back_gradients_that_float16_loses():
    """On a loss so small that every unscaled float16 gradient is zero."""
    params = _params()

    def gradients(scale):
        return jmpscale.value_and_grad(lambda p: _loss(p, BATCH) * 1e-9)(jmpscale.static(scale), params)[1]

    exact = jax.grad(lambda p: _loss(p, BATCH, jnp.float32) * 1e-9)(params)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradients(1.0)))
    for scaled, reference in zip(*map(jax.tree.leaves, (gradients(2.0**26), exact)), strict=True):
        np.testing.assert_allclose(scaled, reference, atol=0.02 * float(jnp.abs(reference).max()))


def test_the_program_has_one_conditional_and_no_collective():
    start, step, _ = _functional(optax.adam(1e-2))
    program = hlo.compiled(step, start(), BATCH)
    assert hlo.count(program, "conditional") == 1
    assert hlo.count(program, "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute") == 0
