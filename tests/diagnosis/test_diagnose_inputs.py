"""The inputs of a diagnosis: arguments that are not finite, the float32 reference, and the traced step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmpscale
from jmpscale._diagnosis.arguments import named_arguments, non_finite
from jmpscale._diagnosis.run.errors import measure
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.not_finite import RepairTrials
from jmpscale._diagnosis.thresholds import AcceptedErrors
from jmpscale._diagnosis.trace.program import Program
from jmpscale._diagnosis.trace.trace_loss import trace_loss

H = jnp.float16


# --- Arguments that are not finite. ---


def step(fun, *consts):
    closed = jax.make_jaxpr(lambda scale: fun(*consts))(jnp.float32(1))
    return Program(closed.jaxpr, closed.consts, ("",) * len(closed.consts))


def forms(program):
    return Forms(program, len(program.jaxpr.outvars))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_zeros_in_place_of_invalid_arguments_make_a_step_finite(value):
    x = jnp.float32([value, 1])
    right, wrong = (lambda x: [jnp.sum(x * x), x]), (lambda x: [jnp.sum(1 / (x * 0)), x])
    assert RepairTrials(forms(step(right, x)).repair).is_finite_with_finite_arguments()
    assert not RepairTrials(forms(step(wrong, x)).repair).is_finite_with_finite_arguments()


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_invalid_loss_scale_raises(value):
    scaler = jmpscale.dynamic()._replace(loss_scale=jnp.float32(value))
    with pytest.raises(ValueError, match=r"scaler\.loss_scale must be .*, got (0|inf|nan)\."):
        jmpscale.diagnose(jnp.sum)(scaler, jnp.ones(2))


def test_largest_loss_scale_is_valid():
    assert jmpscale.diagnose(jnp.sum)(jmpscale.static(2.0**126), jnp.ones(2)).loss_scale == 2.0**126


def keywords(w, batch, bias=None):
    """Has arguments with names."""


def unnamed(*args, **options):
    """Has arguments without names."""


ONE, INF = jnp.ones(2), jnp.float32([np.inf, 0])
NAN = jnp.float32([1.0, np.nan])
ARGUMENTS = {  # a function, its arguments, and the paths of the arguments that are not finite
    "positional": (keywords, (ONE, {"image": NAN, "label": ONE}), {}, ["batch['image']"]),
    "keyword": (keywords, (INF, ONE), {"bias": NAN}, ["w", "bias"]),
    "without names": (unnamed, (ONE, [ONE, NAN]), {"bias": INF}, ["args[1][1]", "bias"]),
    "without a signature": (max, (ONE, NAN), {"key": INF}, ["args[1]", "key"]),
    "another signature": (lambda: None, (NAN,), {}, ["args[0]"]),
    "integers and texts": (keywords, (np.arange(2), "text"), {"bias": None}, []),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_are_not_finite_are_named(name):
    fun, args, kwargs, expected = ARGUMENTS[name]
    assert non_finite(named_arguments(fun, args, kwargs)) == expected


# --- The reference in float32. ---


def trials(fun, *consts):
    program = step(fun, *consts)
    gradients = [""] * (len(program.jaxpr.outvars) - 1)
    options = {"has_scaler": True, "may_be_scaled": True, "may_be_halved": True}
    return GradientTrials(forms(program), gradients, (), AcceptedErrors(), **options)


@pytest.mark.full
def test_gradients_that_are_rounding_noise_or_negligible_are_not_decisive():
    x = jnp.float32(np.linspace(0.7, 1.3, 64))
    noise = (x - x.mean()).sum()  # zero except for rounding
    found = trials(lambda x: [2 * x[0], x, (x - x.mean()).sum(), 0 * x, x * 2.0**-50, x * 2.0**-70], x)
    assert noise != 0
    assert found.decisive.tolist() == [True, False, False, True, False]
    assert found.measured.are_finite
    assert float(found.reference[0]) == 2 * x[0]
    assert [g.shape for g in found.reference[1:]] == [(64,), (), (64,), (64,), (64,)]


def test_array_without_elements_has_no_error():
    found = measure([jnp.ones(2), jnp.ones(0)], [jnp.ones(2), jnp.ones(0)])
    assert (found.errors.tolist(), found.severity.tolist()) == ([0, 0], [0, 0])


def test_error_of_a_loss_counts_if_it_exceeds_the_rounding_of_the_arguments():
    def error(x, loss):
        errors, loss_error = trials(lambda x: [x.sum(), x], x).compare([jnp.float32(loss), x])
        assert errors.tolist() == [0]
        return loss_error

    x = jnp.float32([1.0, 2.0])
    assert error(x, 3.08) == 0
    assert error(x, 3.1) == pytest.approx(0.1 / 3, rel=1e-3)
    assert error(x, np.nan) == math.inf
    assert error(jnp.float32([1000.7, -1000.1, 1000.3, -1000.2]), 0.75) == 0


def test_errors_of_gradients_that_are_not_finite():
    found = trials(lambda x: [x.sum(), x, x * 0], jnp.ones(2))
    assert found.compare([jnp.float32(2), jnp.float32([1.0, np.inf]), jnp.zeros(2)])[0].tolist() == [math.inf] * 2
    assert found.compare([jnp.float32(2), jnp.ones(2), jnp.float32([0.0, np.nan])])[0].tolist() == [math.inf] * 2
    assert found.compare([jnp.float32(2), jnp.float32([1.0, 2.0]), jnp.ones(2)])[0] == pytest.approx([2**-0.5, 0])


# --- Tracing. ---


class Counter(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.calls = nnx.Variable(jnp.int32(0))


def traced(loss, *args, transform=jax.value_and_grad, **kwargs):
    differentiated = jmpscale.value_and_grad(loss, transform=transform)
    return trace_loss(lambda state, args, kwargs: differentiated(state, *args, **kwargs), args, kwargs, {}, axes=())


def test_tracing_does_not_change_nnx_objects():
    model, teacher, counter = Counter(), Counter(), Counter()
    teacher.calls = counter.calls

    def loss(model, others):
        model.calls[...] += 1
        others["counter"].calls[...] += 1
        assert others["teacher"].calls is others["counter"].calls
        return jnp.sum(model.weight[...] * others["teacher"].weight[...])

    others = {"teacher": teacher, "counter": counter, "count": 3}
    found = traced(loss, model, others, transform=nnx.value_and_grad)
    assert len(found.jaxpr.outvars) == 2
    for unchanged in (model, counter):
        assert unchanged.calls[...] == 0
        assert not isinstance(unchanged.calls[...], jax.core.Tracer)


def test_numpy_arrays_are_part_of_the_program():
    def loss(w, x, flags, rate):
        return jnp.sum(w * x) if rate > 0 and flags.all() else jnp.sum(w)

    found = traced(loss, ONE, np.full(2, 7.0, np.float32), np.ones(3, bool), np.float32(0.1))
    assert any(np.array_equal(x, [7.0, 7.0]) for x in found.consts)

    def rounds(w, x, rate):
        return jnp.sum(w * x.astype(np.float16).astype(np.float32)) if rate > 0 else jnp.sum(w)

    arrays = np.ones(2, np.float32), np.array(0.1, np.float32)
    dtypes = {eqn.outvars[0].aval.dtype for eqn in traced(rounds, ONE, *arrays).jaxpr.eqns}
    assert np.dtype(np.float16) in dtypes

    def reads(w, x):
        return jnp.sum(w) * (1 if x[0] > 0 else 2)

    assert len(traced(reads, ONE, np.ones(2, np.float32)).jaxpr.outvars) == 2


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no jax.new_ref")
def test_new_ref_raises_with_the_line():
    def loss(w):
        total = jax.new_ref(jnp.zeros(()))  # line
        total[...] += jnp.sum(w)
        return total[...]

    line = loss.__code__.co_firstlineno + 1
    words = (
        rf"fun must not create a jax\.Ref, got new_ref at test_diagnose_inputs\.py:{line} \(loss\)\. diagnose replaces"
    )
    with pytest.raises(TypeError, match=words):
        traced(jax.jit(loss), ONE)
