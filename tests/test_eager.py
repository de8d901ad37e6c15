"""Every public function returns the same eagerly, under jax.jit and under jax.disable_jit(), and compiles once."""

import resource

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

import compilations
from cases import some

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.array([[0.5, -1.0]])}
X = jnp.ones((4, 3))
GRADS = jax.tree.map(lambda x: x * 2.0**16, PARAMS)
BAD = GRADS | {"b": jnp.array([[1.0, jnp.inf]])}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
NUMBERS = {"w": 3.0, "b": -0.5}
BASE = optax.adam(1e-2)
TX = jmpscale.with_loss_scaling(BASE)
CLIPPED = jmpscale.with_loss_scaling(BASE, max_norm=1.0)
STATE = jmpscale.dynamic()
OPT_STATE = TX.init(PARAMS)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def _loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def _loss_and_aux(params, x):
    return _loss(params, x), {"pred": x @ params["w"]}


def _step(params, grads):
    return jax.tree.map(lambda p, g: p - g * jnp.asarray(0.1, p.dtype), params, grads)


def _stateful(finite, params, n):
    return jmpscale.apply_if(finite, lambda p, n: (_step(p, p), n + 1), params, n)


def _optax(tx, grads, opt_state, params, value):
    updates, opt_state = tx.update(grads, opt_state, params, value=value)
    return optax.apply_updates(params, updates), opt_state


def _functional(params, opt_state, scaler, x):
    loss, grads = jmpscale.value_and_grad(_loss)(scaler, params, x)
    finite = jmpscale.all_finite(grads)
    params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(BASE, grads), params, opt_state)
    return params, opt_state, jmpscale.update(scaler, finite, loss=loss)


def _wrapper(params, opt_state, x):
    loss, grads = jmpscale.value_and_grad(_loss)(opt_state, params, x)
    return _optax(CLIPPED, grads, opt_state, params, loss)


YES, NO = jnp.array(True), jnp.array(False)
LARGE = {"w": jnp.ones((70, 70)), "b": jnp.ones(5000).at[4999].set(jnp.nan)}

# By name: a function of arrays, and its arguments; the first word is the public name.
CALLS = {
    "scale": (jmpscale.scale, STATE, {"loss": jnp.bfloat16(3.0)}),
    "scale, numbers": (jmpscale.scale, STATE, 3.0),
    "unscale": (jmpscale.unscale, STATE, GRADS),
    "unscale, numbers": (jmpscale.unscale, STATE, NUMBERS),
    "unscale_and_check": (jmpscale.unscale_and_check, STATE, GRADS),
    "unscale_and_check, overflow": (jmpscale.unscale_and_check, STATE, BAD),
    "unscale_and_check, numbers": (jmpscale.unscale_and_check, STATE, NUMBERS),
    "update": (jmpscale.update, STATE, YES),
    "update, overflow": (jmpscale.update, STATE, NO),
    "update, a loss": (lambda s, f, loss: jmpscale.update(s, f, loss=loss), STATE, NO, jnp.float32(1.0)),
    "update, a number": (lambda s, f: jmpscale.update(s, f, loss=1.0), STATE, NO),
    "update, a bad loss": (lambda s, f: jmpscale.update(s, f, loss={"a": float("nan")}), STATE, NO),
    "all_finite": (jmpscale.all_finite, GRADS),
    "all_finite, large": (jmpscale.all_finite, LARGE),
    "all_finite, a number": (jmpscale.all_finite, 1.0),
    "all_finite, nothing": (jmpscale.all_finite, {}),
    "apply_if, applied": (_stateful, YES, PARAMS, jnp.array(3)),
    "apply_if, skipped": (_stateful, NO, PARAMS, jnp.array(3)),
    "apply_if, half": (_stateful, YES, HALF, 3),
    "value_and_grad": (jmpscale.value_and_grad(_loss), STATE, PARAMS, X),
    "value_and_grad, aux": (jmpscale.value_and_grad(_loss_and_aux, has_aux=True), STATE, PARAMS, X),
    "value_and_grad, optimizer state": (jmpscale.value_and_grad(_loss), OPT_STATE, PARAMS, X),
    "with_loss_scaling, init": (TX.init, PARAMS),
    "with_loss_scaling": (lambda *args: _optax(TX, *args), GRADS, OPT_STATE, PARAMS, 1.0),
    "with_loss_scaling, overflow": (lambda *args: _optax(TX, *args), BAD, OPT_STATE, PARAMS, 1.0),
    "with_loss_scaling, clipped": (lambda *args: _optax(CLIPPED, *args), GRADS, OPT_STATE, PARAMS, 1.0),
    "optax_step": (lambda g, p, o: jmpscale.optax_step(BASE, g)(p, o), GRADS, PARAMS, BASE.init(PARAMS)),
    "cast": (lambda tree: jmpscale.cast(tree, jnp.float16), PARAMS),
    "get_scaler": (jmpscale.get_scaler, OPT_STATE),
    "replace_scaler": (jmpscale.replace_scaler, OPT_STATE, STATE),
    "grad_report": (jmpscale.grad_report, BAD),
    "grad_report, scaler": (lambda g, s: jmpscale.grad_report(g, scaler=s), GRADS, STATE),
    "grad_report, numbers": (jmpscale.grad_report, NUMBERS),
    "GradReport": (lambda g: jmpscale.grad_report(g).totals(), BAD),
    "loss_scaled": (lambda p, x, s: jax.value_and_grad(jmpscale.loss_scaled(_loss, s))(p, x), PARAMS, X, STATE),
    "metrics": (jmpscale.metrics, STATE),
    "inject": (lambda t, w: testing.inject(t, jnp.nan, path="['w']", when=w), PARAMS, YES),
    "inject_backward": (jax.grad(lambda p: _loss(testing.inject_backward(p, jnp.inf, path="['b']"), X)), PARAMS),
    "functional": (_functional, PARAMS, BASE.init(PARAMS), STATE, X),
    "functional, overflow": (_functional, PARAMS, BASE.init(PARAMS), STATE, X * 1e30),
    "wrapper": (_wrapper, PARAMS, CLIPPED.init(PARAMS), X),
    "wrapper, overflow": (_wrapper, PARAMS, CLIPPED.init(PARAMS), X * 1e30),
}
BY_DEFAULT = [name for name in CALLS if not name.endswith((" numbers", " aux", " half", " scaler", " clipped"))]
# Functions that read values or create what is static, and so cannot be part of a compiled program.
NOT_COMPILED = {
    "ScalerConfig": lambda: jmpscale.ScalerConfig(growth_interval=3),
    "ScalerState": lambda: jmpscale.ScalerState(*STATE),
    "LossScalingState": lambda: jmpscale.LossScalingState(STATE, None, None),
    "SkipReason": lambda: jmpscale.SkipReason(STATE.last_skip.item()),
    "disabled": jmpscale.disabled,
    "dynamic": lambda: jmpscale.dynamic(8.0),
    "static": lambda: jmpscale.static(8.0),
    "from_torch_state_dict": lambda: jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(STATE)),
    "to_torch_state_dict": lambda: jmpscale.to_torch_state_dict(STATE),
    "raise_if_stuck": lambda: jmpscale.raise_if_stuck(STATE, max_consecutive_skips=3),
    "describe": lambda: jmpscale.grad_report(BAD).describe(),
    "assert_step_is_noop": lambda: testing.assert_step_is_noop(PARAMS, PARAMS),
    "assert_replicated": lambda: testing.assert_replicated(STATE),
}


def test_every_public_function_is_here():
    public = {name for name, value in vars(jmpscale).items() if callable(value) and not name.startswith("_")}
    public |= {name for name in vars(testing) if name.startswith(("assert_", "inject"))}
    assert public <= {name.split(",")[0] for name in (*CALLS, *NOT_COMPILED)}


def _assert_close(a, b):
    """Asserts equality up to the last bits: a compiled program may fuse a product and a sum."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", some(CALLS.keys(), BY_DEFAULT))
def test_the_same_eager_jitted_and_without_jit(name):
    call, *args = CALLS[name]
    eager = call(*args)
    _assert_close(eager, jax.jit(call)(*args))
    with jax.disable_jit():
        without = call(*args)
    _assert_close(eager, without)


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_the_same_with_and_without_jit_where_values_are_read(name):
    with_jit = NOT_COMPILED[name]()
    with jax.disable_jit():
        assert str(NOT_COMPILED[name]()) == str(with_jit)


@pytest.mark.parametrize("batched", [False, True])
def test_disable_jit_lets_apply_if_change_a_python_number(batched):
    def run(finite, w):
        return jmpscale.apply_if(finite, lambda w, n: (w + 1, n + 1), w, 3)

    if batched:
        run, finite, w = jax.vmap(run), jnp.array([True, False]), jnp.ones((2, 3))
    else:
        finite, w = NO, jnp.ones(3)
    with jax.disable_jit():
        _, number = run(finite, w)
    assert number.tolist() == [4, 3] if batched else number == 3


@pytest.mark.parametrize("name", ["update", "update, a loss", "grad_report", "grad_report, scaler", "all_finite"])
def test_an_eager_call_with_jax_arrays_transfers_nothing(name):
    call, *args = CALLS[name]
    args = jax.tree.map(jnp.asarray, args)
    call(*args)
    with jax.transfer_guard("disallow"):
        call(*args)


# --- eager use compiles once for each shape, and keeps nothing ---


def test_the_counter_counts():
    f, x = jax.jit(lambda x: x + 1), jnp.ones(3)
    for expected in (1, 0):
        with compilations.counted() as seen:
            f(x)
        assert len(seen) == expected


def _anew(leaf):
    """Returns a new array, so that nothing that JAX caches for the old one counts."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.parametrize("name", CALLS)
def test_an_eager_call_compiles_for_the_first_of_its_shapes_only(name):
    call, *args = CALLS[name]
    first, *others = (jax.tree.map(_anew, args) for _ in range(3))
    call(*first)
    with compilations.counted() as seen:
        for other in others:
            call(*other)
    assert not seen, f"{len(seen)} programs were compiled for shapes that were there before"


def _megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


APIS = {
    "functional": (_functional, lambda: (PARAMS, BASE.init(PARAMS), jmpscale.dynamic(growth_interval=7))),
    "wrapper": (
        _wrapper,
        lambda: (PARAMS, jmpscale.replace_scaler(CLIPPED.init(PARAMS), jmpscale.dynamic(growth_interval=7))),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("api", APIS)
def test_a_thousand_eager_steps_compile_nothing_and_keep_nothing(api):
    step, start = APIS[api]
    state = start()
    for number in range(20):  # applied and skipped steps
        state = step(*state, X * (1e30 if number % 5 == 4 else 1.0))
    arrays, memory = len(jax.live_arrays()), _megabytes()
    with compilations.counted() as seen:
        for number in range(1000):
            state = step(*state, X * (1e30 if number % 5 == 4 else 1.0))
    assert not seen
    assert len(jax.live_arrays()) == arrays
    assert _megabytes() - memory < 50, "each compiled step that is kept takes one or two megabytes"
    assert int(jmpscale.get_scaler(state).skipped) > 200


class _Net(equinox.Module):
    layer: equinox.nn.Linear
    act: object
    rate: float = 0.5


def test_a_notebook_that_trains_a_model_eagerly_compiles_its_first_steps_only():
    model = _Net(equinox.nn.Linear(3, 2, key=jax.random.key(0)), jnp.tanh)
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1, momentum=0.9))
    opt_state = tx.init(equinox.filter(model, equinox.is_inexact_array))

    def loss_fn(model, x):
        return jnp.mean(model.act(jax.vmap(model.layer)(x)) ** 2) * model.rate

    vag = jmpscale.value_and_grad(loss_fn, transform=equinox.filter_value_and_grad)
    counts = []
    for _ in range(6):
        with compilations.counted() as seen:
            loss, grads = vag(opt_state, model, X)
            updates, opt_state = tx.update(grads, opt_state, model, value=loss)
            model = equinox.apply_updates(model, updates)
        counts.append(len(seen))
    assert counts[0] > 0
    assert counts[2:] == [0] * 4
    assert model.rate == 0.5
    assert model.act is jnp.tanh
