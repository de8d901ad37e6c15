"""A diagnosis says in one to three sentences which line to change, and lists the measured numbers in a table."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from jmpscale._diagnosis.evaluate import Evaluation, Result, Site
from jmpscale._diagnosis.findings import Findings
from jmpscale._diagnosis.inputs import Constant
from jmpscale._diagnosis.remedy import Remedy, try_remedy

import jmpscale
from jmpscale._base.jaxpr import equations
from jmpscale._diagnosis import remedy
from jmpscale._diagnosis.measure import Measured
from jmpscale._diagnosis.report import Diagnosis, DiagnosisRow, make_rows
from jmpscale._diagnosis.scales import Reference, Scales
from jmpscale._diagnosis.step import trace_step
from jmpscale._diagnosis.summary import summarize, summarize_argument, summarize_constant

from diagnosis_programs import W, X


def site(line, operation="mul", dtype="float16", *, backward=False, moves=False):
    return Site(line, "", operation, np.dtype(dtype), backward=backward, moves=moves)


def result(number, *operands, operation="mul", dtype="float16", backward=False, steps=(), amplifies=False, **measured):
    """Returns a result on the line of its number."""
    where = site(f"model.py:{number} (f)", operation, dtype, backward=backward)
    return Result(number, where, steps, Measured(**measured), operands, amplifies)


def overflow(number, *operands, **fields):
    return result(number, *operands, finite=0.0, error=math.inf, overflow=0.5, **({"extreme": -1e5} | fields))


def findings(
    *origins, errors=None, fitting=None, loss=2.0, loss_error=0.0, scale=2.0**10, overflows=(), results=None, **fields
):
    """Returns what was measured of a step, of which no scale fits, with an error of 40%."""
    errors = {9: 0.4, 10: 0.41, 11: math.inf} if errors is None else errors
    finite = [k for k, error in errors.items() if math.isfinite(error)]
    best = min(finite, key=lambda k: errors[k]) if finite else None
    scales = Scales(jnp.float32(loss), errors.get(round(math.log2(scale)), math.inf), errors, fitting, best)
    reference = Reference(jnp.float32(2.0), [], True, [True], 0.0)._replace(**fields)
    evaluation = Evaluation([], [*origins, result(1)] if results is None else results, [])
    return Findings(reference, scales, evaluation, scale, loss_error, list(origins), list(overflows))


def healthy(**fields):
    return findings(errors={-3: 0.0021, 10: 0.0022, 12: 0.0021}, fitting=(-3, 12), results=[result(1)], **fields)


NO_REMEDY = "Compute model.py:1 (f), and the lines that read the result, in float32."
NORMALIZE = NO_REMEDY.removesuffix(".") + ", or normalize its input."
ROUNDED = result(3, result(1, result(0)), result(2), operation="cholesky", dtype="float32", error=0.5, amplifies=True)
SUMMARIES = {  # what was measured, the present scale, and the summary
    "it fits": (
        healthy(),
        2.0**10,
        "Loss scales from 2^-3 to 2^12 fit; yours is 2^10. The gradients differ from float32 by 0.22%.",
    ),
    "the limits fit": (
        findings(errors={-3: 0.0021, 12: 0.0022}, fitting=(-3, 12), results=[result(1)], scale=2.0**-3),
        2.0**-3,
        "Loss scales from 2^-3 to 2^12 fit; yours is 2^-3. The gradients differ from float32 by 0.21%.",
    ),
    "too small": (
        healthy()._replace(origins=[result(1, backward=True, error=1.0, underflow=0.5)]),
        2.0**-4,
        "Loss scales from 2^-3 to 2^12 fit; yours is 2^-4, which is too small: mul at model.py:1 (f) underflows. "
        "Choose init_scale of dynamic, or a static scale, in this range. At the best scale the gradients differ from "
        "float32 by 0.21%.",
    ),
    "too large": (
        healthy()._replace(origins=[overflow(1, backward=True)]),
        2.0**13,
        "Loss scales from 2^-3 to 2^12 fit; yours is 2^13, which is too large: mul at model.py:1 (f) overflows. A "
        "dynamic scale backs off; decrease a static scale. At the best scale the gradients differ from float32 by "
        "0.21%.",
    ),
    "clipped": (
        healthy(),
        2.0**13,
        "Loss scales from 2^-3 to 2^12 fit; yours is 2^13, which is too large: the backward pass depends on the scale, "
        "because it clips or compares scaled values. A dynamic scale backs off; decrease a static scale. At the best "
        "scale the gradients differ from float32 by 0.21%.",
    ),
    "zero gradients": (
        findings(result(1), decisive=[False, False]),
        1.0,
        "All gradients are zero, in float32 too. No loss scale changes that.",
    ),
    "float32": (
        findings(results=[result(1, dtype="float32")]),
        1.0,
        "The program computes in float32: it holds no result in half precision, and needs no loss scale. "
        "jmpscale.autocast runs its matmuls in half precision.",
    ),
    "forward overflow": (
        findings(overflow(1, steps=(2, 0))),
        1.0,
        "The forward pass overflows: mul at model.py:1 (f) in step 2/0 reaches -1e+05, and the largest number of "
        f"float16 is 65504. A loss scale cannot prevent that. {NORMALIZE}",
    ),
    "backward overflow": (
        findings(overflow(1, backward=True), errors={0: math.inf}),
        1.0,
        "The backward pass overflows: mul at model.py:1 (f) reaches -1e+05, and the largest number of float16 is "
        f"65504. A loss scale cannot prevent that. {NORMALIZE}",
    ),
    "partial sum": (
        findings(overflow(1, operation="reduce_sum", extreme=65504.0)),
        1.0,
        "The forward pass overflows: reduce_sum at model.py:1 (f) is not finite, although its exact results fit: a "
        f"partial sum exceeds 65504. A loss scale cannot prevent that. {NORMALIZE}",
    ),
    "two overflows": (
        findings(overflow(1), overflow(1), overflow(2), overflow(3)),
        1.0,
        "The forward pass overflows: mul at model.py:1 (f) reaches -1e+05, and the largest number of float16 is 65504. "
        "A loss scale cannot prevent that. Overflows also begin at model.py:2 (f) and model.py:3 (f). " + NORMALIZE,
    ),
    "overflows at two lines": (
        findings(overflow(1), overflow(2)),
        1.0,
        "The forward pass overflows: mul at model.py:1 (f) reaches -1e+05, and the largest number of float16 is 65504. "
        "A loss scale cannot prevent that. Overflows also begin at model.py:2 (f). " + NORMALIZE,
    ),
    "many overflows": (
        findings(*map(overflow, range(1, 8))),
        1.0,
        "The forward pass overflows: mul at model.py:1 (f) reaches -1e+05, and the largest number of float16 is 65504. "
        "A loss scale cannot prevent that. Overflows also begin at model.py:2 (f), model.py:3 (f), model.py:4 (f) and "
        "3 others. " + NORMALIZE,
    ),
    "five overflows": (
        findings(*map(overflow, range(1, 6))),
        1.0,
        "The forward pass overflows: mul at model.py:1 (f) reaches -1e+05, and the largest number of float16 is 65504. "
        "A loss scale cannot prevent that. Overflows also begin at model.py:2 (f), model.py:3 (f), model.py:4 (f) and "
        "model.py:5 (f). " + NORMALIZE,
    ),
    "pole": (
        findings(overflow(1, result(0, underflow=0.1), operation="log")),
        1.0,
        "The forward pass overflows: log at model.py:1 (f) is not finite, because float16 rounds its operand to zero. "
        f"A loss scale cannot prevent that. {NO_REMEDY}",
    ),
    "forward underflow": (
        findings(result(1, error=1.0, underflow=0.5, subnormal=0.1)),
        1.0,
        "The forward pass underflows: mul at model.py:1 (f) underflows: 60% of its result is zero or subnormal in "
        f"float16. A loss scale cannot prevent that. {NO_REMEDY}",
    ),
    "no scale fits": (
        findings(result(1, backward=True, error=1.0, underflow=0.5), overflows=[overflow(2)], scale=2.0**9),
        1.0,
        "No loss scale fits. At 2^9, the best, mul at model.py:1 (f) underflows: 50% of its result is zero or "
        f"subnormal in float16. At larger scales, mul at model.py:2 (f) overflows. {NO_REMEDY}",
    ),
    "no scale fits, without an overflow": (
        findings(result(1, backward=True, error=1.0, underflow=0.5), scale=2.0**9),
        1.0,
        "No loss scale fits. At 2^9, the best, mul at model.py:1 (f) underflows: 50% of its result is zero or "
        f"subnormal in float16. {NO_REMEDY}",
    ),
    "rounding": (
        findings(result(1, error=0.5)),
        1.0,
        "The gradients differ from float32 by 40%: rounding, not range. The error begins with mul at model.py:1 (f). "
        + NO_REMEDY,
    ),
    "amplified rounding": (
        findings(ROUNDED),
        1.0,
        "The gradients differ from float32 by 40%: rounding, not range. cholesky at model.py:3 (f) amplifies the "
        "rounding of model.py:1 (f) and model.py:2 (f). Compute model.py:1 (f) and model.py:2 (f), and the lines that "
        "read the result, in float32.",
    ),
    "rounding without a line": (
        findings(results=[result(1)]),
        1.0,
        "The gradients differ from float32 by 40%: rounding, not range. Compute these operations, and the lines that "
        "read the result, in float32.",
    ),
    "rounding of the loss": (
        findings(result(1, error=0.5), errors={10: 0.24}, loss_error=0.1, decisive=[False]),
        1.0,
        "The loss differs from float32 by 10%: rounding, not range. The error begins with mul at model.py:1 (f). "
        + NO_REMEDY,
    ),
    "loss that is not finite": (
        findings(overflow(1, dtype="float32"), result(2), loss=math.nan, loss_error=math.inf),
        1.0,
        "The loss is nan, but in float32 it is 2: rounding, not range. The error begins with mul at model.py:1 (f). "
        + NO_REMEDY,
    ),
    "gradients that are not finite": (
        findings(overflow(1, dtype="float32"), result(2), errors={0: math.inf}),
        1.0,
        "The gradients are not finite at any loss scale, but are finite in float32: rounding, not range. The "
        "error begins with mul at model.py:1 (f). " + NO_REMEDY,
    ),
    "not finite in float32": (
        findings(overflow(1), overflow(2))._replace(scales=None),
        1.0,
        "The result of mul at model.py:1 (f) is not finite in float32 either, and reaches the loss or a gradient. No "
        "loss scale helps: correct this line. Common causes are invalid data; a softmax over a row that is masked "
        "everywhere, which needs a finite mask or where=; and a derivative such as the derivative of a norm at zero.",
    ),
}


@pytest.mark.parametrize(("found", "scale", "summary"), SUMMARIES.values(), ids=SUMMARIES)
def test_summary(found, scale, summary):
    assert summarize(found, None, scale) == summary


def test_summary_of_operations_that_were_not_entered():
    entered = findings(results=[result(1, dtype="float32")])
    kernel = entered._replace(evaluation=Evaluation([], entered.evaluation.results, ["model.py:1 (f): pallas_call"]))
    assert summarize(kernel, None, 1.0).startswith("The gradients differ from float32 by 40%")
    without = findings()._replace(scales=None)
    assert summarize(without, None, 1.0).startswith("The result of an operation that was not entered is not finite in")


REMEDIES = {  # what was measured with the remedy, and the sentences
    "helps": (
        healthy(),
        'Pass precision="highest" to the matmul at model.py:1 (f) and model.py:2 (f), or use '
        'jax.default_matmul_precision("highest") around it: then the gradients differ by 0.21%, and loss scales from '
        '2^-3 to 2^12 fit. The autocast guide lists such programs under "Keep these in float32".',
    ),
    "does not help": (
        findings(ROUNDED),
        'precision="highest" at model.py:1 (f) and model.py:2 (f) does not remove the error. Also keep in float32 the '
        "operands that the function casts to half precision, or compute the function in float32, without autocast "
        "and without casts.",
    ),
    "has another loss": (
        healthy(loss_error=0.1),
        'precision="highest" at model.py:1 (f) and model.py:2 (f) does not remove the error. Also keep in float32 the '
        "operands that the function casts to half precision, or compute the function in float32, without autocast "
        "and without casts.",
    ),
}


@pytest.mark.parametrize(("found", "sentences"), REMEDIES.values(), ids=REMEDIES)
def test_summary_of_a_remedy(found, sentences):
    tried = Remedy(["model.py:1 (f)", "model.py:2 (f)"], found)
    summary = summarize(findings(ROUNDED), tried, 1.0)
    assert summary.removeprefix(summarize(findings(ROUNDED), None, 1.0).partition(" Compute")[0]) == f" {sentences}"


CONSTANTS = {
    "zero": (
        Constant("model.py:1 (f)", "mul", np.dtype(np.float16), 0.0),
        "A constant of mul at model.py:1 (f) is zero in float16, and therefore the loss or the gradients are zero "
        "or not finite. If you have written another number, compute this line in float32, because float16 cannot hold "
        "a number below 6e-08.",
    ),
    "infinity": (
        Constant("model.py:1 (f)", "div", np.dtype(np.float16), -math.inf),
        "A constant of div at model.py:1 (f) is infinite in float16, and therefore the loss or the gradients are "
        "zero or not finite. If you have written another number, compute this line in float32, because float16 cannot "
        "hold a number above 65504.",
    ),
}


@pytest.mark.parametrize(("constant", "summary"), CONSTANTS.values(), ids=CONSTANTS)
def test_summary_of_a_constant(constant, summary):
    assert summarize_constant(constant) == summary


def test_summary_of_an_argument():
    assert summarize_argument("batch['image']") == (
        "batch['image'] contains infinities or NaN, and with zeros in their place the loss and the gradients are "
        "finite. Correct this argument."
    )


# --- Trying a remedy. ---


def six_matmuls(w, x):
    h = x
    h = h @ w  # 0
    h = h @ w  # 1
    h = h @ w  # 2
    h = h @ w  # 3
    h = h @ w  # 4
    h = h @ w  # 5
    return jnp.sum(h)


FIRST = six_matmuls.__code__.co_firstlineno + 2


def line(index):
    return f"test_diagnose_report.py:{FIRST + index} (six_matmuls)"


def origin(index):
    return Result(0, site(line(index)), (), Measured(error=0.5), (), amplifies=False)


def trace():
    differentiated = jmpscale.value_and_grad(jmpscale.autocast(six_matmuls))
    return trace_step(lambda state, args, kwargs: differentiated(state, *args, **kwargs), (W, X), {})


def narrow_matmuls(step):
    matmuls = [eqn for eqn, _, _ in equations(step.jaxpr) if eqn.primitive.name == "dot_general"]
    return sum(eqn.outvars[0].aval.dtype == jnp.float16 for eqn in matmuls)


TRIED = {  # the origins of errors in each round, and the lines whose matmuls are in float32 in the end
    "one round": ([[0], "healthy"], [0]),
    "two rounds": ([[1], [1, 4], "healthy"], [1, 4]),
    "the first new line": ([[3, 2], [3, 2], "healthy"], [3, 2]),
    "no new line": ([[3], [3]], [3]),
    "no line at all": ([[3], []], [3]),
    "five rounds at most": ([[0], [1], [2], [3], [4], [5]], [0, 1, 2, 3, 4]),
    "not a matmul": ([[6]], None),
    "not a matmul in the second round": ([[3], [6]], [3]),
    "a matmul besides another line": ([[3], [3, 6, 4]], [3]),
    "no origin": ([[]], None),
}


@pytest.mark.parametrize(("rounds", "expected"), TRIED.values(), ids=TRIED)
def test_remedy_is_tried_until_no_error_is_left(rounds, expected, monkeypatch):
    measured = [healthy() if indices == "healthy" else findings(*map(origin, indices)) for indices in rounds]
    steps, texts = [], []

    def examine(step, scale, progress):
        assert scale == 4.0
        steps.append(step)
        return measured[len(steps)]

    monkeypatch.setattr(remedy, "examine", examine)
    found = try_remedy(trace, measured[0], 4.0, texts.append)
    assert texts == ["trying a remedy"] * len(steps)
    if expected is None:
        assert found is None
        return
    assert found.lines == [line(i) for i in expected]
    assert found.findings is measured[len(steps)]
    assert narrow_matmuls(trace()) - narrow_matmuls(steps[-1]) == 3 * len(expected) - (0 in expected)


# --- The rows and the table. ---


def test_row_has_the_worst_of_all_executions():
    executions = [
        Measured(extreme=-3.0, error=0.1, overflow=0.0, underflow=0.3, subnormal=0.1),
        Measured(extreme=2.0, error=0.2, overflow=0.1, underflow=0.2, subnormal=0.3),
        Measured(),
    ]
    shown = site("model.py:1 (f)")
    results = [Result(i, shown, (i, 0), measured, (), amplifies=False) for i, measured in enumerate(executions)]
    moved = Result(3, site("model.py:2 (f)", moves=True), (), Measured(), (), amplifies=False)
    rows = make_rows([moved, *results, result(2, dtype="int32")])
    assert list(rows) == [shown]
    row = rows[shown]
    assert row == DiagnosisRow(
        line="model.py:1 (f)",
        module="",
        operation="mul",
        dtype="float16",
        backward=False,
        max_abs=3.0,
        error=0.2,
        overflow=0.1,
        underflow=0.3,
        subnormal=0.3,
        steps=(1, 0),
    )
    assert row.name == "mul at model.py:1 (f) in step 1/0"
    assert row.headroom == pytest.approx(math.log2(65504 / 3))


def row(line, **fields):
    default = {"module": "", "operation": "mul", "dtype": "float16", "backward": False, "max_abs": 2.0, "error": 0.0}
    default |= {"overflow": 0.0, "underflow": 0.0, "subnormal": 0.0, "steps": ()}
    return DiagnosisRow(line=f"model.py:{line} (f)", **(default | fields))


ROWS = [
    row(1, error=1e-6, max_abs=0.0),
    row(2, error=0.00123, underflow=0.00101, dtype="float32", backward=True),
    row(3, error=math.inf, overflow=0.5, max_abs=1e5),
    row(4, error=12.3, module="block", steps=(3,)),
    row(5, error=0.02),
]


def diagnosis(rows=ROWS, causes=(4,), not_entered=()):
    return Diagnosis(
        loss=1.0,
        loss_float32=1.0,
        gradient_error=0.1,
        loss_scale=1.0,
        scale_errors=(),
        rows=tuple(rows),
        causes=tuple(rows[i] for i in causes),
        not_entered=tuple(not_entered),
        summary="A sentence.",
        _fitting=(1.0, 2.0),
    )


def test_table_has_the_causes_first_and_then_the_largest_errors():
    assert diagnosis().describe().splitlines() == [
        "A sentence.",
        "result               module      pass    dtype  max_abs  headroom    error  overflow  underflow  step",
        "mul, model.py:5 (f)           forward  float16        2      15.0       2%         0          0      ",
        "mul, model.py:3 (f)           forward  float16    1e+05      -0.6      inf       50%          0      ",
        "mul, model.py:4 (f)   block   forward  float16        2      15.0    1230%         0          0     3",
        "mul, model.py:2 (f)          backward  float32        2     127.0   0.123%         0     0.101%      ",
        "mul, model.py:1 (f)           forward  float16        0       inf  <0.001%         0          0      ",
    ]
    assert [text.split()[1] for text in diagnosis().describe(2).splitlines()[2:]] == ["model.py:5", "model.py:3"]


def test_table_has_twenty_rows_by_default():
    assert len(diagnosis([row(i) for i in range(30)], causes=()).describe().splitlines()) == 2 + 20


def test_table_has_no_empty_columns():
    assert diagnosis(ROWS[:1], causes=()).describe().splitlines()[1].split() == [
        *["result", "pass", "dtype", "max_abs", "headroom", "error", "overflow", "underflow"],
    ]
    assert diagnosis([], causes=()).describe() == "A sentence."


def test_operations_that_were_not_entered_are_listed():
    names = [f"model.py:{i} (f): pallas_call" for i in range(10)]
    lines = diagnosis([], causes=(), not_entered=names).describe().splitlines()
    assert lines == [
        "A sentence.",
        "These operations were evaluated as a whole, or in their own dtype:",
        *[f"  {x}" for x in names[:8]],
        "  and 2 more",
    ]
    assert diagnosis([], causes=(), not_entered=names[:8]).describe().splitlines()[2:] == [f"  {x}" for x in names[:8]]


def test_repr_shows_the_documented_attributes():
    assert "_fitting" not in repr(diagnosis())
    assert repr(diagnosis()).startswith("Diagnosis(loss=1.0, loss_float32=1.0, gradient_error=0.1, loss_scale=1.0, ")
