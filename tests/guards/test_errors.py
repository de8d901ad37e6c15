"""A wrong call of a tool raises an error, or gives a warning, that names the argument, its value and the remedy.

The errors and warnings of the algorithm are in test_guards_*.py, the errors of settings in test_settings.py, the
diagnoses of `RunMonitor` in test_monitor.py, the assertions of `jmpscale.testing` in test_check_step.py and
test_testing.py, and the errors of the command line in test_main.py.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import plots, testing

from calls import (
    ADAM,
    GRADS,
    LOSS,
    OPT_STATE,
    REPORT,
    STATE,
    W32,
    Mistake,
    check_message,
    float16,
    loss_of,
    raises,
    stuck,
    traced,
)
from messages import BETWEEN, NO_FLOATING_DTYPE, NO_FUNCTION, NO_INTEGER
from tables import rows

REPORTS = jax.tree.map(lambda x: np.stack([x, x]), REPORT)


NAMED = {  # a call with an argument by position that must be given by name, and the names in its error
    "autocast": (lambda: jmpscale.autocast(loss_of, jnp.bfloat16), "dtype, result_dtype by name, got bfloat16"),
    "RunMonitor": (lambda: jmpscale.RunMonitor(50), "max_consecutive_skips by name, got 50"),
    "update": (lambda: jmpscale.update(STATE, True, LOSS), "loss, axis_name by name, got float32[]"),
    "all_finite": (lambda: jmpscale.all_finite(GRADS, "d"), "scaler, axis_name by name, got 'd'"),
    "with_loss_scaling": (lambda: jmpscale.with_loss_scaling(ADAM, STATE, 1.0), "max_norm, axis_name, ... got 1.0"),
    "dynamic": (lambda: jmpscale.dynamic(2.0**16, 2.0), "growth_factor, ... by name, got 2.0"),
    "check_step": (lambda: testing.check_step(loss_of, ".step"), "ignore by name, got '.step'"),
}


SHOWN = {  # a call with arguments of another function by position, and the call that its error shows
    "all_finite": (lambda: jmpscale.all_finite(LOSS, GRADS), "got dict by position. Call all_finite((loss, grads));"),
    "autocast": (lambda: jmpscale.autocast(loss_of, GRADS), "got dict by position. Call autocast(fun)(*args);"),
    "value_and_grad": (
        lambda: jmpscale.value_and_grad(loss_of, OPT_STATE, GRADS, LOSS),
        "got float32[] by position. Call value_and_grad(fun)(scaler, *args);",
    ),
    "scaled_backward": (
        lambda: jmpscale.scaled_backward(loss_of, 2.0, GRADS),
        "got dict by position. Call scaled_backward(fun, scale)(*args);",
    ),
    "diagnose_step": (
        lambda: jmpscale.diagnose_step(loss_of, 0.1),
        "got 0.1 by position. Call diagnose_step(step)(*args);",
    ),
    "diagnose": (
        lambda: jmpscale.diagnose(loss_of, OPT_STATE, GRADS, LOSS),
        "got float32[] by position. Call diagnose(fun)(scaler, *args);",
    ),
    "check_step": (
        lambda: testing.check_step(loss_of, GRADS, LOSS),
        "got dict by position. Call check_step(step)(*args);",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_function_shows_the_usual_call(name):
    check_message(Mistake(*SHOWN[name]))


@pytest.mark.parametrize("name", NAMED)
def test_function_requires_the_names_of_its_options(name):
    call, words = NAMED[name]
    shown = "Call" if name in SHOWN else "Write the name before the value, such as"
    check_message(Mistake(call, f"{name} takes {words} by position. {shown}"))


def test_every_public_function_with_options_requires_their_names():
    modules = {jmpscale: jmpscale.__all__, testing: testing.__all__, plots: ["diagnosis"]}
    functions = [getattr(module, name) for module, names in modules.items() for name in names]
    for fun in filter(inspect.isfunction, functions):
        kinds = [parameter.kind for parameter in inspect.signature(fun).parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds:
            with raises(TypeError, f"{fun.__name__} takes ... by name, got 5 by position."):
                fun(*[5] * len(kinds))


AUTOCAST = {
    "number": Mistake(lambda: jmpscale.autocast(3.0), f"{NO_FUNCTION} 3.0. Call autocast(loss_fn, dtype"),
    "dtype": Mistake(lambda: jmpscale.autocast(jnp.float16), f"{NO_FUNCTION} float16. Call autocast"),
    "name of a dtype": Mistake(lambda: jmpscale.autocast("bfloat16"), f"{NO_FUNCTION} 'bfloat16'."),
    "to float32": Mistake(
        lambda: jmpscale.autocast(loss_of, dtype=jnp.float32), "must be float16 or bfloat16, got float32."
    ),
    "context manager": Mistake(
        lambda: jmpscale.autocast().__enter__(), "not a context manager. Wrap the loss function"
    ),
    "to None": Mistake(lambda: jmpscale.autocast(dtype=None), "dtype must be float16 or bfloat16, got None. Pass"),
    "to an array": Mistake(
        lambda: jmpscale.autocast(loss_of, dtype=W32), "dtype must ... got float32[2]. Pass jnp.float16"
    ),
    "result in another dtype": Mistake(
        lambda: jmpscale.autocast(loss_of, result_dtype=jnp.bfloat16),
        "result_dtype must be float32, or float16 like dtype, got bfloat16. Pass jnp.float32.",
    ),
    "result in an array": Mistake(
        lambda: jmpscale.autocast(result_dtype=W32), "result_dtype must be ... got float32[2]. Pass jnp.float32."
    ),
}


@pytest.mark.parametrize("mistake", rows(AUTOCAST))
def test_autocast_requires_a_function_and_a_half_dtype(mistake):
    check_message(mistake)


def _cast(tree, dtype):
    return lambda: jmpscale.cast(tree, dtype)


CAST_AND_MONITORING = {
    "method": Mistake(
        lambda: STATE.scale(LOSS), "no attribute 'scale'. It has no methods: pass it to", raises=AttributeError
    ),
    "scaler in a chain": Mistake(
        lambda: optax.chain(STATE, ADAM),
        "no attribute 'init'. It is not an optimizer: ... with_loss_scaling(optax.chain(...), jmpscale.dynamic(...)).",
        raises=AttributeError,
    ),
    "cast to int": Mistake(_cast(GRADS, jnp.int8), f"{NO_FLOATING_DTYPE} int8. Call cast(params,"),
    "cast to complex": Mistake(_cast(GRADS, jnp.complex64), NO_FLOATING_DTYPE),
    "cast to a tree": Mistake(_cast(jnp.float16, GRADS), "dtype must be ... got dict. Call cast(params, jnp"),
    "cast to an array": Mistake(_cast(GRADS, W32), "dtype must be ... got float32[2]. Call cast("),
    "cast to a string": Mistake(_cast(GRADS, "float17"), "dtype must be ... got 'float17'. Call cast("),
    "cast to None": Mistake(_cast(GRADS, None), f"{NO_FLOATING_DTYPE} None"),
    "fraction of skips": Mistake(stuck(2.5), f"max_consecutive_skips {NO_INTEGER} 2.5"),
    "traced report": Mistake(lambda: traced(lambda r: r.describe(), REPORT), "describe ... Return the report first."),
    "no skips": Mistake(stuck(0), f"max_consecutive_skips {BETWEEN} 1 and 2147483647 ... got 0.", raises=ValueError),
    "monitor under jit": Mistake(
        lambda: jax.jit(stuck(1))(STATE), "raise_if_stuck reads the state ... Call it between", raises=ValueError
    ),
    "report of no gradients": Mistake(
        lambda: jmpscale.grad_report({"n": 1}), "grads ... got none. Pass the gradients.", raises=ValueError
    ),
    "report of a large leaf": Mistake(
        lambda: traced(jmpscale.grad_report, float16(2**31)), "a leaf, got 2147483648.", raises=ValueError
    ),
    "limit of describe": Mistake(
        lambda: REPORT.describe(0), f"limit {BETWEEN} 1 and 2147483647 ... got 0.", raises=ValueError
    ),
    "several reports": Mistake(
        REPORTS.describe, "got a batch of shape (2,). Select one: jax.tree.map(lambda x: x[0],", raises=ValueError
    ),
    "cast of averages": Mistake(
        _cast(ADAM.init(GRADS), jnp.float16), "the tree contains averages ... parameters alone", raises=UserWarning
    ),
}


@pytest.mark.parametrize("mistake", rows(CAST_AND_MONITORING))
def test_cast_and_monitoring_require_their_arguments(mistake):
    check_message(mistake)


TORCH_DICT = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}


ULP = 2.0**-23  # the spacing of float32 numbers below 2


def _from_torch(limits=(), **values):
    return lambda: jmpscale.from_torch_state_dict(TORCH_DICT | values, **dict(limits))


def _to_torch(**fields):
    return lambda: jmpscale.to_torch_state_dict(STATE._replace(**fields))


TORCH = {
    "scaler": Mistake(
        lambda: jmpscale.from_torch_state_dict(STATE), "mapping must be the result of ... got ScalerState."
    ),
    "tracker": Mistake(_from_torch(_growth_tracker=1.5), f"['_growth_tracker'] {NO_INTEGER} 1.5"),
    "static": Mistake(
        lambda: jmpscale.to_torch_state_dict(jmpscale.static(8)),
        "scaler must be dynamic or disabled to become a torch state dict, got mode 'static'. ... multiply the loss",
        raises=ValueError,
    ),
    "nan": Mistake(
        _to_torch(loss_scale=jnp.float32(jnp.nan)),
        f"scaler.loss_scale {BETWEEN} ... got nan. The",
        raises=ValueError,
    ),
    "zero": Mistake(
        _to_torch(loss_scale=jnp.float32(0)),
        "scaler.loss_scale ... got 0. ... restore an older checkpoint",
        raises=ValueError,
    ),
    "empty": Mistake(
        lambda: jmpscale.from_torch_state_dict({}),
        "missing ['_growth_tracker', ... If it is empty, the",
        raises=ValueError,
    ),
    "nested": Mistake(
        lambda: jmpscale.from_torch_state_dict({"x": TORCH_DICT}),
        "missing ['_growth_tracker', ... ['x'].",
        raises=ValueError,
    ),
    "extra": Mistake(_from_torch(extra=1), "missing [], unexpected ['extra']", raises=ValueError),
    "negative tracker": Mistake(
        _from_torch(_growth_tracker=-2),
        f"['_growth_tracker'] {BETWEEN} -1 and 2147483647 ... got -2",
        raises=ValueError,
    ),
    "scale": Mistake(
        _from_torch(scale=0.0),
        "mapping['scale'] must ... got 0. The limits are min_scale and max_scale.",
        raises=ValueError,
    ),
    "below": Mistake(
        _from_torch({"min_scale": 2.0}, scale=2 - ULP), f"mapping['scale'] {BETWEEN} 2 and", raises=ValueError
    ),
    "above": Mistake(
        _from_torch({"max_scale": 2.0}, scale=2 + ULP), "mapping['scale'] must ... got 2.0000001192", raises=ValueError
    ),
}


@pytest.mark.parametrize("mistake", rows(TORCH))
def test_torch_state_dict_requires_valid_values(mistake):
    check_message(mistake)


def _check(state, step=lambda state: state, **options):
    return lambda: testing.check_step(step, **options)(state)


def _widens(params, scaler):
    return jax.tree.map(lambda w: w.astype(jnp.float32), params), scaler


def _unscales_by_hand(params, scaler):
    grads = jax.grad(lambda params: jmpscale.scale(scaler, loss_of(params)))(params)
    grads = jax.tree.map(lambda g: g / scaler.loss_scale, grads)
    finite = jmpscale.all_finite(grads)
    params = jmpscale.apply_if(finite, lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), params)
    return params, jmpscale.update(scaler, finite, loss=loss_of(params))


TOOLS = {
    "replicated number": Mistake(
        lambda: testing.assert_replicated({"w": 1}),
        "tree['w'] must be an array or a text, got int. Pass the result of a step.",
    ),
    "replicated program": Mistake(
        lambda: testing.assert_replicated(jax.jit(loss_of).lower(GRADS)),
        "tree must be an array or a text, got Lowered. Pass its text, .as_text().",
    ),
    "check_step: no function": Mistake(
        lambda: testing.check_step((1, 2)), "step must be a function, got tuple of 2. Call"
    ),
    "check_step: no argument comes back": Mistake(
        _check(STATE, lambda state: {"loss": 1.0}),
        "step must return its state, but it returned dict, of which no part has ... an argument: state. Or write",
    ),
    "check_step: other dtype": Mistake(
        lambda: testing.check_step(_widens)({"w": W32.astype(jnp.float16)}, STATE),
        "step must return its state with ... but params['w'] was float16[2] and is float32[2]. Convert it in step.",
    ),
    "check_step: scaler does not come back": Mistake(
        lambda: testing.check_step(lambda params, scaler: params)(GRADS, STATE),
        "step must return scaler, which contains the scaler. Or write",
        raises=ValueError,
    ),
    "check_step: no scaler": Mistake(
        lambda: testing.check_step(lambda params: params)(GRADS),
        (
            "the state of step must contain a scaler, got none: params. ... For a step without loss scaling, call "
            "jmpscale.diagnose_step. ... a loss scale that is a number: run a few"
        ),
        raises=ValueError,
    ),
    "check_step: nothing is unscaled": Mistake(
        lambda: testing.check_step(_unscales_by_hand)({"w": W32}, jmpscale.static(2.0)),
        "step must unscale its gradients by jmpscale, got none that value_and_grad",
        raises=ValueError,
    ),
    "check_step: disabled": Mistake(
        _check(jmpscale.disabled()), "the state must contain a scaler that checks", raises=ValueError
    ),
    "check_step: batch": Mistake(
        _check(jax.tree.map(lambda *x: np.stack(x), jmpscale.dynamic(2.0), jmpscale.dynamic(4.0))),
        "state must contain one scaler, or copies of it ... got a batch with loss_scale [2. 4.]. If jax.vmap maps",
        raises=ValueError,
    ),
    "check_step: ignore": Mistake(
        _check(STATE, ignore=(".step",)),
        "ignore must name leaves ... got ['.step']. The paths are state.loss_scale, state.",
        raises=ValueError,
    ),
}


@pytest.mark.parametrize("mistake", rows(TOOLS))
def test_testing_requires_its_arguments(mistake):
    check_message(mistake)


NEED_VALUES = {  # a call with a tree, and the names of its argument and of the function in the error
    "check_step": (lambda state: testing.check_step(lambda state: state)(state), "state", "check_step"),
    "diagnose": (lambda w: jmpscale.diagnose(loss_of)(w), "args", "diagnose"),
    "diagnose_step": (lambda state: jmpscale.diagnose_step(lambda state: state)(state), "state", "diagnose_step"),
    "assert_replicated": (testing.assert_replicated, "tree", "assert_replicated"),
}


@pytest.mark.parametrize("name", NEED_VALUES)
def test_tool_requires_arrays_with_values(name):
    call, argument, function = NEED_VALUES[name]
    words = f"{argument} must hold arrays with values, got"
    for without_values in (lambda: jax.jit(call)(GRADS), lambda: call(jax.eval_shape(lambda: GRADS))):
        with raises(TypeError, f"{words} float32[2] without values at {argument} ... Call {function} outside of jax.j"):
            without_values()
    donated = jax.tree.map(jnp.copy, GRADS)
    jax.jit(lambda tree: tree, donate_argnums=0)(donated)
    with raises(
        ValueError, f"{words} a deleted float32[2] at {argument} ... pass the result ... or call {function} be"
    ):
        call(donated)


def test_to_torch_state_dict_requires_values():
    with raises(TypeError, "scaler must hold arrays with values, got float32[] without values at scaler.loss_scale"):
        traced(jmpscale.to_torch_state_dict, STATE)
