"""A program that is edited by the remedy of a diagnosis has the errors and scales that the summary promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_diagnose_faults import FAULTS, diagnose, diagnosis_of

import jmpscale

import diagnosis_programs as programs
from arrays import normal
from messages import NO_HALF_RESULT, REMEDY, REMEDY_OF_ALL_LINES
from repair import repaired
from tables import names

pytestmark = pytest.mark.full

PROMISE = re.compile(REMEDY + r"([<\d.]+)%?.*?(?:from 2\^(\S+) to 2\^(\S+) fit|\.)")
# After the edit, the derivative rule of this program multiplies a float32 residual by values in half precision, and a
# second diagnosis names that line.
NEED_A_SECOND_EDIT = {"reciprocal saved in half"}
REPAIRED = {name: fault for name, fault in FAULTS.items() if fault.lines and name not in NEED_A_SECOND_EDIT}
CARRIED = {  # the first value of a loop and the other branch of a condition have the dtype of the edited line, too
    "scan": [("layer, x.astype(H), jnp.stack", "layer, x.astype(H).astype(jnp.float32), jnp.stack")],
    "while": [
        (
            "grow, (jax.lax.stop_gradient(x.astype(H)), 0)",
            "grow, (jax.lax.stop_gradient(x.astype(H)).astype(jnp.float32), 0)",
        )
    ],
    "cond": [("large, lambda h: h, x", "large, lambda h: h.astype(jnp.float32), x")],
    "running sum": [("add, H(2048)", "add, jnp.float32(2048)")],
}


@pytest.mark.parametrize("name", names(REPAIRED))
def test_remedy_holds_after_the_edit(name):
    fault, told = REPAIRED[name], diagnosis_of(name)
    numbers = [int(re.search(r":(\d+) ", line)[1]) for line in told.lines]
    edited = diagnose(fault, repaired(programs, numbers, CARRIED.get(name, ()))[fault.fun.__name__])
    assert edited.lines == ()
    if REMEDY_OF_ALL_LINES in told.summary:
        assert edited.summary.startswith(NO_HALF_RESULT)
        return
    error, *promised = PROMISE.search(told.summary).groups()
    found = np.log2(edited.fitting_scales)
    np.testing.assert_allclose(found, np.array(promised, float), atol=1)
    smallest = 100 * min(error for _, error in edited.scale_errors)
    assert smallest == pytest.approx(float(error.strip("<")), rel=0.1, abs=0.02)


# --- Float32 results of autocast. ---


def scores(w, x):
    return jnp.mean((jax.nn.softmax(x @ (w @ x.T) / 1e4) @ x) ** 2)


def attention(w, x):
    q, k, v = (w * x.reshape(1, 64, 2, 8) for _ in range(3))
    return jnp.mean(jax.nn.dot_product_attention(q, k, v, scale=1e-4, implementation="xla") ** 2)


def in_half_by_hand(w, x):
    return scores(w.astype(jnp.float16), x.astype(jnp.float16)).astype(jnp.float32)


def large_operands(w, x):
    return jnp.mean(jnp.tanh((1e4 * x) @ w * 1e-6))


def rounded_operands(w, x):
    return jnp.mean(jnp.cos(x @ (3000 * w)))


def products(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


X = normal(0, 64, 16, scale=40)
W = 3 * np.eye(16, dtype=np.float32)
CAUSES = {  # the loss function, its arguments, and whether half results are the cause
    "scores": (scores, (W, X), True),
    "attention": (attention, (4 * jnp.ones((1, 1, 1, 8)), X), True),
    "compiled before": (jax.jit(jmpscale.autocast(scores)), (W, X), True),
    "casts by hand": (in_half_by_hand, (W, X), False),
    "large operands": (large_operands, (W, X), False),
    "rounded operands": (rounded_operands, (normal(1, 16, 8), X / 100), False),
    "healthy": (products, (W, X / 100), False),
}


@functools.cache
def summary_of(name):
    """Returns the summary of a row of the causes, which two tests read."""
    fun, args, _ = CAUSES[name]
    return jmpscale.diagnose(jmpscale.autocast(fun))(jmpscale.dynamic(2.0**4), *args).summary


@pytest.mark.parametrize("name", names(CAUSES))
def test_summary_offers_float32_results_if_half_results_are_the_cause(name):
    _, _, is_cause = CAUSES[name]
    summary = summary_of(name)
    assert ("result_dtype=jnp.float32" in summary) == is_cause
    assert ("Compute" in summary) == (name != "healthy")


@pytest.mark.parametrize("name", names(["scores", "attention"]))
def test_offer_of_float32_results_holds_after_the_edit(name):
    fun, args, _ = CAUSES[name]
    told = summary_of(name)
    edited = jmpscale.diagnose(jmpscale.autocast(fun, result_dtype=jnp.float32))(jmpscale.dynamic(2.0**4), *args)
    offer = told.partition("result_dtype=jnp.float32")[2]
    error, *promised = PROMISE.search(offer).groups()
    assert edited.lines == ()
    np.testing.assert_allclose(np.log2(edited.fitting_scales), np.array(promised, float), atol=1)
    smallest = 100 * min(error for _, error in edited.scale_errors)
    assert smallest == pytest.approx(float(error.strip("<")), rel=0.1, abs=0.02)


def test_offer_names_a_scale_if_the_present_one_does_not_fit_then():
    summary = jmpscale.diagnose(jmpscale.autocast(scores))(jmpscale.dynamic(2.0**30), W, X).summary
    assert re.search(r"result_dtype=jnp\.float32.*yours is 2\^30, so also use dynamic\(", summary)


def test_float32_results_are_not_offered_for_a_function_that_runs_once():
    functions = iter([scores])
    fun = jmpscale.autocast(lambda *args: next(functions)(*args))
    summary = jmpscale.diagnose(fun)(jmpscale.dynamic(), W, X).summary
    assert "Compute" in summary
    assert "result_dtype=" not in summary
