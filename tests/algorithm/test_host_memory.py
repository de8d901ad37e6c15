"""A step that is computed on the host has the results of the same step on the device, and its state stays there."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import compute_on

import jmpscale
from jmpscale import testing

from arrays import normal
from tables import names

F = jnp.float32
PARAMS = {"w": normal(0, 4, 2), "b": jnp.zeros(2), "scale": F(1)}
X, Y = normal(1, 8, 4), normal(2, 8, 2)
INITIAL = jmpscale.dynamic(2.0**10)

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")


@pytest.fixture
def host():
    memory = getattr(jax, "memory", None)
    if memory is None or jax.device_put(jnp.ones(()), memory.Space.Host).sharding.memory_kind != "pinned_host":
        pytest.skip("this version of JAX does not move arrays to a memory space")
    return memory.Space.Host


def on_host(fun):
    """Returns a function that the host computes."""
    newest = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return newest(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def in_context(fun):
    """Returns a function that the host computes, in the form that JAX 0.10 and older versions have."""
    if "out_memory_spaces" in inspect.signature(compute_on.compute_on).parameters:
        pytest.skip("this version of JAX has no such context")
    return compute_on.compute_on("device_host")(jax.jit(fun))


def memory_kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def loss_fn(params, x):
    return jnp.mean(((x @ params["w"] + params["b"]) * params["scale"] - Y) ** 2)


def wrapper(tx, scaler=INITIAL, **options):
    tx = jmpscale.with_loss_scaling(tx, scaler, **options)

    def update(params, opt_state, grads, loss):
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def gradients(opt_state, params, x):
        return jmpscale.value_and_grad(loss_fn)(opt_state, params, x)

    return update, gradients, tx.init(PARAMS)


def functional(tx):
    def update(params, state, grads, loss):
        scaler, opt_state = state
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        finite = finite & jmpscale.all_finite(loss)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, (jmpscale.update(scaler, finite, loss=loss), opt_state)

    def gradients(state, params, x):
        def scaled_loss(params):
            loss = loss_fn(params, x)
            return jmpscale.scale(state[0], loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        return loss, grads

    return update, gradients, (INITIAL, tx.init(PARAMS))


METHODS = {
    "wrapper": lambda: wrapper(optax.adam(1e-2)),
    "max_norm": lambda: wrapper(optax.adam(1e-2), max_norm=0.1),
    "static": lambda: wrapper(optax.sgd(1e-2, momentum=0.9), jmpscale.static(2.0**10)),
    "hysteresis": lambda: wrapper(optax.sgd(1e-2), jmpscale.dynamic(2.0**10, hysteresis=2, growth_interval=2)),
    "warn_after_skips": lambda: wrapper(optax.adamw(1e-2), warn_after_skips=100),
    "disabled": lambda: wrapper(optax.adam(1e-2), jmpscale.disabled()),
    "functional": lambda: functional(optax.adam(1e-2)),
}


def train(method, host=None, place=lambda fun: fun):
    """Returns the parameters and the state after each of some steps, which the host computes if `host` is given."""
    update, gradients, state = METHODS[method]()
    move = (lambda tree, space: jax.device_put(tree, space)) if host else (lambda tree, _: tree)

    @jax.jit
    def step(params, state, x):
        loss, grads = gradients(move(state, jax.memory.Space.Device), params, x)
        params, state = place(update)(*move((params, state, grads, loss), host))
        return move(params, jax.memory.Space.Device), state

    params, state = PARAMS, move(state, host)
    found = []
    for factor in (1.0, 1e18, 1.0, np.nan, 1.0):  # the gradients overflow in the second step, the loss in the fourth
        params, state = step(params, state, X * F(factor))
        found.append((params, state))
    return found


@pytest.mark.full
@pytest.mark.parametrize("place", [on_host, pytest.param(in_context, marks=pytest.mark.full)])
@pytest.mark.parametrize("method", names(METHODS, default={"functional"}))
def test_step_on_the_host_has_the_same_results(method, place, host):
    found, expected = train(method, host, place), train(method)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    if method != "disabled":
        assert [int(jmpscale.get_scaler(state).total_skips) for _, state in found] == [0, 1, 1, 2, 2]
        assert memory_kinds([state for _, state in found]) == {"pinned_host"}


GRADS = {
    "w": jnp.array([[1.0, -jnp.inf]]),
    "scalar": F(3),
    "half": jnp.ones(3, jnp.float16),
    "bfloat16": jnp.ones((3, 2), jnp.bfloat16),
    "float8": jnp.ones(3, jnp.float8_e4m3fn),
    "complex": jnp.array([1 + 2j, jnp.nan], jnp.complex64),
    "integers": jnp.arange(3),
    "empty": jnp.zeros((0, 2)),
    "large": jnp.ones(5000),
    "weak": jax.lax.full((3,), 2.0),
}
FUNCTIONS = {
    "all_finite": lambda scaler, grads: jmpscale.all_finite(grads),
    "unscale": jmpscale.unscale,
    "scale": lambda scaler, grads: jmpscale.scale(scaler, grads["w"]),
    "unscale_and_check": jmpscale.unscale_and_check,
    "update": lambda scaler, grads: jmpscale.update(scaler, jmpscale.all_finite(grads), loss=grads["scalar"]),
    "update by losses": lambda scaler, grads: jmpscale.update(scaler, jmpscale.all_finite(grads), loss=grads["w"]),
    "select_tree": lambda scaler, grads: jmpscale.select_tree(jmpscale.all_finite(grads["w"]), grads, grads),
    "apply_if": lambda scaler, grads: jmpscale.apply_if(jmpscale.all_finite(grads["w"]), lambda x: x, grads),
    "apply_if with a number": lambda scaler, grads: jmpscale.apply_if(
        jmpscale.all_finite(grads["half"]), lambda n: n + grads["scalar"], 3.0
    ),
    "metrics": lambda scaler, grads: jmpscale.metrics(scaler),
    "wrapper": lambda scaler, grads: _updates(scaler, grads),
    "max_norm": lambda scaler, grads: _updates(scaler, grads, max_norm=1.0),
}


def _updates(scaler, grads, **options):
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), scaler, **options)
    grads = jmpscale.unscale(scaler, grads)
    return tx.update(grads, tx.init(grads), value=grads["scalar"])[0]


@pytest.mark.full
@pytest.mark.parametrize("name", names(FUNCTIONS, default={"unscale_and_check"}))
@pytest.mark.usefixtures("platform")
def test_function_on_the_host_has_the_same_results(name, host):
    fun = FUNCTIONS[name]
    found = jax.jit(on_host(fun))(*jax.device_put((jmpscale.dynamic(4.0), GRADS), host))
    for x, y in zip(*map(jax.tree.leaves, (found, jax.jit(fun)(jmpscale.dynamic(4.0), GRADS))), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(jnp.complex64), y.astype(jnp.complex64))


def stored_step(params, opt_state, x):
    """A step whose optimizer state is stored on the host."""
    update, gradients, _ = wrapper(optax.adam(1e-2))
    opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
    loss, grads = gradients(opt_state, params, x)
    params, opt_state = update(params, opt_state, grads, loss)
    return params, jax.device_put(opt_state, jax.memory.Space.Host), loss


def computed_step(params, opt_state, x):
    """A step whose update is computed on the host."""
    update, gradients, _ = wrapper(optax.adam(1e-2))
    loss, grads = gradients(jax.device_put(opt_state.scaler, jax.memory.Space.Device), params, x)
    given = jax.device_put((params, grads, loss), jax.memory.Space.Host)
    params, opt_state = on_host(update)(given[0], opt_state, *given[1:])
    return jax.device_put(params, jax.memory.Space.Device), opt_state, loss


def plain_step(params, opt_state, x):
    update, gradients, _ = wrapper(optax.adam(1e-2))
    loss, grads = gradients(opt_state, params, x)
    return *update(params, opt_state, grads, loss), loss


STEPS = {"stored": stored_step, "computed": computed_step}


@pytest.fixture
def half_loss(monkeypatch):
    """Makes the loss compute in bfloat16, also where the state is."""

    def loss_fn(params, x):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return jnp.mean((((x.astype(jnp.bfloat16) @ half["w"] + half["b"]) * half["scale"]).astype(F) - Y) ** 2)

    monkeypatch.setitem(globals(), "loss_fn", loss_fn)


@pytest.mark.usefixtures("half_loss")
@pytest.mark.parametrize("name", names(STEPS, default=()))
def test_diagnose_step_of_a_state_on_the_host_is_the_same(name, host):
    opt_state = METHODS["wrapper"]()[2]
    found = jmpscale.diagnose_step(STEPS[name])(PARAMS, jax.device_put(opt_state, host), X)
    expected = jmpscale.diagnose_step(plain_step)(PARAMS, opt_state, X)
    assert found.state == expected.state
    assert found.loss == pytest.approx(expected.loss)
    assert found.gradient_error > 0
    assert found.gradient_error == pytest.approx(expected.gradient_error, rel=1e-3)
    assert [x.error for x in found.changes] == pytest.approx([x.error for x in expected.changes], rel=1e-2, abs=1e-6)
    assert {row.line for row in found.rows} == {row.line for row in expected.rows}


@pytest.mark.full
@pytest.mark.usefixtures("half_loss")
@pytest.mark.parametrize("name", STEPS)
def test_check_step_accepts_a_state_on_the_host(name, host):
    opt_state = jax.device_put(METHODS["wrapper"]()[2], host)
    testing.check_step(STEPS[name])(PARAMS, opt_state, X)
