"""A diagnosis says in one to four sentences which line to change, and lists the measured numbers in a table."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import jmpscale

import pages
from diagnosis_programs import H, clip_cotangent, normalized_backward, tiny_backward
from messages import (
    FORWARD_ALONE,
    GRADIENTS_DIFFER,
    LARGEST_NUMBER,
    LOSS_DIFFERS,
    NO_GRADIENT,
    NO_HALF_RESULT,
    NO_SCALE_FITS,
    NO_SCALE_HELPS,
    NORMALIZE,
    ONLY_A_RUN,
    OVERFLOW,
    PRECISE_MATMUL,
    REMEDY,
    REMEDY_OF_ALL_LINES,
    ROUNDING,
    TOO_LARGE,
    TOO_SMALL,
    UNDERFLOW,
)
from tables import rows

pytestmark = pytest.mark.full

W, X = jnp.float32([1, 0.5]), jnp.float32([1, 2])


def diagnose(fun, *args, scaler=None):
    return jmpscale.diagnose(fun)(scaler or jmpscale.dynamic(2.0**10), *(args or (W, X)))


def squared(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def line(fun, index=0):
    """Returns the name of a line of a function's body."""
    fun = inspect.unwrap(fun)
    return f"test_diagnose_report.py:{fun.__code__.co_firstlineno + 1 + index} ({fun.__name__})"


# --- A loss scale is enough: the call that creates a scaler that fits. ---


def product(w):
    return jnp.sum((w.astype(H) * H(2.0**-20)).astype(jnp.float32))


def clipped(w):
    return squared(clip_cotangent(w.astype(H)))


def clipped_if_scaled(w):
    return 1e-3 * clipped(w)


SMALL, LARGE = f"{TOO_SMALL}differ from float32 by 100%, in w.", f"{TOO_LARGE}are not finite."
BEST = "At the best scale the gradients differ from float32 by "
ROOM = (
    "It is within 2 bits of the largest one, and a static scale does not back off if the gradients grow: "
    f"static(2.0**9) leaves room. {GRADIENTS_DIFFER}0."
)
SCALERS = {  # the loss function, the scaler, the name of the present scale, and the sentences that follow
    "disabled": (product, jmpscale.disabled(), "2^0", f"{GRADIENTS_DIFFER}0."),
    "the smallest": (product, jmpscale.static(2.0**-4), "2^-4", f"{GRADIENTS_DIFFER}0."),
    "the largest": (product, jmpscale.static(2.0**15), "2^15", ROOM),
    "not a power of two": (product, jmpscale.static(60000.0), "60000", ROOM),
    "static, too small": (product, jmpscale.static(2.0**-20), "2^-20", f"{SMALL} Use static(2.0**9). {BEST}0."),
    "static, too large": (product, jmpscale.static(2.0**16), "2^16", f"{LARGE} Use static(2.0**9). {BEST}0."),
    "disabled, clipped": (clipped, jmpscale.disabled(), "2^0", f"{GRADIENTS_DIFFER}0.0214%, in w."),
    "dynamic, too small": (
        product,
        jmpscale.dynamic(2.0**-10, min_scale=2.0**-12, max_scale=2.0**10),
        "2^-10",
        f"{SMALL} Use dynamic(init_scale=2.0**10). {BEST}0.",
    ),
    "dynamic, too large": (
        product,
        jmpscale.dynamic(2.0**30),
        "2^30",
        f"{LARGE} Use dynamic(init_scale=2.0**9). {BEST}0.",
    ),
    "dynamic, max_scale is too small": (
        product,
        jmpscale.dynamic(2.0**-10, max_scale=2.0**-2, min_scale=2.0**-12),
        "2^-10",
        f"{SMALL} Use dynamic(init_scale=2.0**13, max_scale=2.0**15). {BEST}0.",
    ),
    "dynamic, min_scale is too large": (
        product,
        jmpscale.dynamic(2.0**30, min_scale=2.0**28),
        "2^30",
        f"{LARGE} Use dynamic(init_scale=2.0**9, min_scale=2.0**-4). {BEST}0.",
    ),
    "dynamic, too large but finite": (
        clipped_if_scaled,
        jmpscale.dynamic(2.0**10),
        "2^10",
        f"{TOO_LARGE}differ from float32 by 98.8%, in w. Use dynamic(init_scale=2.0**0, max_scale=2.0**3). "
        f"{BEST}0.0404%, in w.",
    ),
}


@pytest.mark.parametrize("row", rows(SCALERS))
def test_summary_names_the_scaler_that_fits(row):
    fun, scaler, present, sentences = row
    summary = diagnose(fun, W, scaler=scaler).summary
    fitting = {product: "2^-4 to 2^15", clipped: "2^0 to 2^0", clipped_if_scaled: "2^-8 to 2^3"}[fun]
    assert summary == f"Loss scales from {fitting} fit; yours is {present}. {sentences}"


# --- Other summaries. ---


def near_overflow(w, x):
    return squared(jnp.tanh((w.astype(H) * x.astype(H) * H(20000)).astype(jnp.float32) * 1e-4))


def two_overflows(w, x):
    h = w.astype(H) * x.astype(H) * H(300) * H(300)
    k = w.astype(H) * H(400) * H(400)
    return squared(jnp.tanh(h.astype(jnp.float32) * 1e-5)) + squared(jnp.tanh(k.astype(jnp.float32) * 1e-5))


def partial_sum(w, x):
    terms = [w.astype(H) * H(40000), w.astype(H) * H(40000), w.astype(H) * H(-40000)]
    return jnp.tanh(jnp.sum(jnp.concatenate(terms), dtype=H).astype(jnp.float32) * 1e-5)


def underflow(w, x):
    return squared(jnp.tanh((w.astype(H) * H(2.0**-14) * H(2.0**-14)).astype(jnp.float32) * 2.0**28))


def backward_overflow(w, x):
    return squared(normalized_backward(w.astype(H) * x.astype(H)))


def backward_underflow(w, x):
    return squared(tiny_backward(w.astype(H) * x.astype(H)))


def rounding(w, x):
    c = x[:1].astype(H) * H(4096)  # the compiler does not know this number
    return squared(w.astype(H) + c - c)


def phases(w, x):
    z = w.astype(H) * (x * 3.7).astype(H)
    return jnp.mean(jnp.sin(100 * z.astype(jnp.float32))) / 16


def rounded_loss(w, x):
    c = x[:1].astype(H) * H(4096)
    return squared(w) + squared(x.astype(H) + c - c)


def matmul(w, x):
    return jnp.mean(jnp.tanh((300 * x) @ (300 * w) * 1e-6))


def two_matmuls(w, x):
    h = jnp.tanh(x @ w)
    return jnp.mean(jnp.tanh((1e5 * h) @ w * 1e-5))


def multiply(x, y):
    y[...] = x[...] * H(60000)


def kernel(w, x):
    call = pallas.pallas_call(multiply, out_shape=jax.ShapeDtypeStruct((2,), H), interpret=True)
    return squared(jnp.tanh(call(x.astype(H)).astype(jnp.float32) * w))


def zero_constant(w):
    return squared(w.astype(H) * H(0))


def logarithm(w):
    return squared(jnp.log(w * 0))


def two_logarithms(w):
    first = jnp.log(-jnp.abs(w)).sum()
    second = jnp.log(-1 - jnp.abs(w)).sum()
    return first + second


EYE, MATRIX = np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8) / 16
SUMMARIES = {  # the loss function, its arguments, and the summary, with the lines of the function
    "large error": (
        phases,
        (W, X),
        f"{GRADIENTS_DIFFER}6.97%, in w: rounding, which may be harmless. {FORWARD_ALONE}{{0}} makes an error "
        f"of 7%; with {{0}} in float32, it is 0. {ONLY_A_RUN} Loss scales from 2^-22 to 2^11 fit; yours is 2^10. "
        "It is within 2 bits of the largest one, and gradients can grow in the first steps, which are then skipped: "
        f"dynamic(init_scale=2.0**5) leaves room. {LOSS_DIFFERS}8.81%.",
    ),
    "backward overflow": (
        backward_overflow,
        (W, X),
        f"{NO_SCALE_FITS}2^10, the backward pass overflows: add at {{0}} reaches 1.2e+05, {LARGEST_NUMBER} "
        f"Compute {{0}} in float32: {REMEDY_OF_ALL_LINES}.",
    ),
    "the only matmul": (
        jmpscale.autocast(matmul),
        (EYE, EYE + 1),
        f"{OVERFLOW}dot_general at {{0}} reaches 1.8e+05, {LARGEST_NUMBER} {NO_SCALE_HELPS} Compute {{0}} "
        f"{PRECISE_MATMUL}{REMEDY_OF_ALL_LINES}. "
        f"{NORMALIZE} Or call autocast with result_dtype=jnp.float32, and change no line: {REMEDY}0.00413%, in w, and "
        "loss scales from 2^7 to 2^41 fit.",
    ),
    "constant of zero": (
        zero_constant,
        (W,),
        f"{NO_GRADIENT}No loss scale changes that. Perhaps a constant, such as 1e-8 or 1e6, is zero or infinite in "
        "float16.",
    ),
    "float32": (
        squared,
        (W,),
        f"{NO_HALF_RESULT}, so it needs no loss scale. jmpscale.autocast converts its matmuls to half precision, "
        'except those with precision="highest" and contractions of at most 4 elements.',
    ),
}


@pytest.mark.parametrize("row", rows(SUMMARIES))
def test_summary(row):
    fun, args, summary = row
    lines = map(functools.partial(line, fun), range(2))
    pages.assert_same_output(diagnose(fun, *args).summary, summary.format(*lines))


class Finding(NamedTuple):
    """A loss function, its arguments, the beginning of the summary, and the lines that must compute in float32.

    The lines of the function are {0} and {1} in the beginning, and 0 and 1 in `lines`.
    """

    fun: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    begins: str
    lines: tuple[int, ...]


FINDINGS = {
    "overflows": Finding(two_overflows, (W, X), f"{OVERFLOW}mul at {{0}} reaches 9e+04,", (0, 1)),
    "partial sum": Finding(
        partial_sum, (W, X), f"{OVERFLOW}reduce_sum at {{1}} is not finite, although its results fit:", (1,)
    ),
    "underflow": Finding(underflow, (W, X), f"{UNDERFLOW}mul at {{0}} has 100% of its values below", (0,)),
    "backward underflow": Finding(
        backward_underflow, (W, X), f"{NO_SCALE_FITS}2^10, the backward pass underflows: mul at {{0}} has 100%", (0,)
    ),
    "rounding": Finding(rounding, (W, X), f"{GRADIENTS_DIFFER}100%, in w: {ROUNDING} The error begins at {{1}}.", (1,)),
    "rounding of the loss": Finding(
        rounded_loss, (W, X), f"{LOSS_DIFFERS}80%: {ROUNDING} The error begins at {{1}}.", (1,)
    ),
    "one of two matmuls": Finding(
        jmpscale.autocast(two_matmuls),
        (EYE, MATRIX),
        f"{OVERFLOW}convert_element_type at {{1}} reaches 9.99e+04,",
        (1,),
    ),
    "kernel": Finding(kernel, (W, X), "The comparison is not entirely float32: pallas_call at {1} ", ()),
    "not finite": Finding(logarithm, (W,), "The result of log at {0} is not finite in the float32 run either,", ()),
    "two lines that are not finite": Finding(
        two_logarithms, (W,), "The result of log at {0} is not finite in the float32 run either,", ()
    ),
}


@pytest.mark.parametrize("row", rows(FINDINGS))
def test_summary_begins_with_the_finding(row):
    diagnosis, names = diagnose(row.fun, *row.args), [line(row.fun, i) for i in range(2)]
    begins = row.begins.format(*names)
    words = diagnosis.summary.split()[: len(begins.split())]
    pages.assert_same_output(" ".join(words), begins)
    assert diagnosis.lines == tuple(names[i] for i in row.lines)


def two_leaves(params, x):
    return phases(params["bias"], x) + 30 * squared(params["kernel"].astype(H))


def two_errors(params, x):
    h = params["kernel"].astype(H) * H(300) * H(300)
    return squared(jnp.tanh(h.astype(jnp.float32) * 1e-5)) + phases(params["bias"], x)


def test_summary_names_the_gradient_with_a_large_error_and_its_share_of_the_norm():
    diagnosis = diagnose(two_leaves, {"kernel": W, "bias": W}, X)
    assert re.search(r" by 6\.97%, in params\['bias'\], which has [\d.]+% of their norm: rounding", diagnosis.summary)


def test_summary_names_what_a_remedy_leaves():
    diagnosis = diagnose(two_errors, {"kernel": W, "bias": W}, X)
    assert diagnosis.lines == (line(two_errors, 0),)
    assert f" {FORWARD_ALONE}{line(phases, 0)} makes an error of 7%." in diagnosis.summary


def large_in_float16_and_in_float8(w, x):
    overflowing = (x.astype(H) * w.astype(H) * H(60000)).astype(jnp.float32)
    large = (x.astype(H) * w.astype(H) * H(40000)).astype(jnp.float32)
    filled = (x * w * 400).astype(jnp.float8_e4m3fn).astype(jnp.float32)  # of 448
    return squared(jnp.tanh(w * overflowing * 1e-5 + large * 1e-5 + filled * 1e-3))


def test_summary_names_a_line_that_nearly_overflows_next_to_one_that_overflows():
    summary = diagnose(large_in_float16_and_in_float8, W, X + 0.5).summary
    overflowing, large = (line(large_in_float16_and_in_float8, i) for i in range(2))
    assert f"mul at {overflowing} reaches 9e+04," in summary
    # Numbers in float8 are scaled so that they fill its range.
    assert f" Compute {large} in float32, too: results are within 2 bits of an overflow." in summary


NEW = "It is within 2 bits of the largest one, and gradients can grow in the first steps, which are then skipped: "


def test_summary_names_a_smaller_scale_for_the_first_steps_of_a_new_scaler():
    new = jmpscale.dynamic(2.0**14)
    summary = diagnose(product, W, scaler=new).summary
    assert summary.startswith(
        f"Loss scales from 2^-4 to 2^15 fit; yours is 2^14. {NEW}dynamic(init_scale=2.0**9) leaves"
    )
    later = new._replace(finite_steps=jnp.int32(3))
    assert NEW not in diagnose(product, W, scaler=later).summary
    assert NEW not in diagnose(product, W, scaler=jmpscale.dynamic(2.0**13)).summary


def test_summary_names_a_smaller_static_scale_in_every_step():
    later = jmpscale.static(2.0**14)._replace(finite_steps=jnp.int32(3))
    assert f" yours is 2^14. {ROOM}" in diagnose(product, W, scaler=later).summary
    assert "leaves room" not in diagnose(product, W, scaler=jmpscale.static(2.0**13)).summary


def test_summary_names_the_default_if_it_fits():
    def small(w):
        return squared(w.astype(H)) * 2.0**-30

    low, high = map(math.log2, diagnose(small, W).fitting_scales)
    assert low <= 16 <= high - 2
    assert TOO_SMALL in (summary := diagnose(small, W, scaler=jmpscale.dynamic(1.0)).summary)
    assert " Use dynamic(). " in summary


def overflow_at_a_large_scale(w):
    h = w.astype(H) * H(300) * H(300)
    return squared(jnp.tanh(h.astype(jnp.float32) * 1e-5) + w.astype(H).astype(jnp.float32)) * 2.0**6


ADVICE = {  # the loss function, the present scaler, the advised one, and the words of the summary
    "fits": (product, jmpscale.dynamic(2.0**8), None, "yours is 2^8. The gradients"),
    "too large": (
        product,
        jmpscale.dynamic(2.0**30, growth_interval=100),
        jmpscale.dynamic(2.0**9, growth_interval=100),
        "Use dynamic(init_scale=2.0**9).",
    ),
    "static": (product, jmpscale.static(2.0**20), jmpscale.static(2.0**9), "Use static(2.0**9)."),
    "near the largest": (
        product,
        jmpscale.dynamic(2.0**14, hysteresis=2),
        jmpscale.dynamic(2.0**9, hysteresis=2),
        "dynamic(init_scale=2.0**9) leaves room",
    ),
    "a line, too large": (
        overflow_at_a_large_scale,
        jmpscale.dynamic(2.0**30),
        jmpscale.dynamic(2.0**3),
        "loss scales from 2^-25 to 2^9 fit; yours is 2^30, so also use dynamic(init_scale=2.0**3). Or normalize",
    ),
    "a line, near the largest": (
        overflow_at_a_large_scale,
        jmpscale.dynamic(2.0**9),
        jmpscale.dynamic(2.0**3),
        "fit; yours is 2^9, and dynamic(init_scale=2.0**3) leaves room. Or normalize",
    ),
    "a line, and a scale that has backed off": (
        overflow_at_a_large_scale,
        jmpscale.dynamic(2.0**4)._replace(total_skips=jnp.int32(12)),
        jmpscale.dynamic(2.0**3),
        "loss scales from 2^-25 to 2^9 fit; begin a new run with dynamic(init_scale=2.0**3). Or normalize",
    ),
    "a line": (two_overflows, jmpscale.dynamic(2.0**10), None, " in float32: then"),
    "noise": (zero_constant, jmpscale.dynamic(), None, NO_GRADIENT),
}


@pytest.mark.parametrize("row", rows(ADVICE))
def test_diagnosis_has_the_scaler_that_its_summary_names(row):
    fun, scaler, advised, words = row
    diagnosis = diagnose(fun, *((W, X) if fun is two_overflows else (W,)), scaler=scaler)
    assert words in diagnosis.summary
    # A scaler that helps only after an edit is part of its finding.
    found = next((x.scaler for x in diagnosis.findings if x.scaler), None) if diagnosis.lines else diagnosis.scaler
    assert diagnosis.scaler is (None if diagnosis.lines else found)
    assert (found is None) == (advised is None)
    if advised is not None:
        assert found.config == advised.config
        assert [x.tolist() for x in found[:-1]] == [x.tolist() for x in advised[:-1]]
        replaced = jmpscale.replace_scaler({"scaler": scaler}, found)
        assert jmpscale.get_scaler(replaced).loss_scale == advised.loss_scale


def test_copies_of_the_scaler_have_its_scale():
    def penalty(w, scaler, x):
        def scaled(x):
            return jmpscale.scale(scaler, jnp.sum(x.astype(H) * w.astype(H) * H(8)).astype(jnp.float32))

        return squared(jmpscale.unscale(scaler, jax.grad(scaled)(x)))

    scaler = jmpscale.dynamic()
    assert jnp.isinf(penalty(W, scaler, X))
    summary = diagnose(penalty, W, scaler, X, scaler=scaler).summary
    assert summary.startswith("Loss scales from 2^-")
    assert f"yours is 2^16. {TOO_LARGE}" in summary


def test_integers_are_not_changed_because_they_may_be_indices():
    table, indices = jnp.linspace(0.1, 0.9, 12).reshape(4, 3), jnp.float32([0, 1, 3])
    diagnosis = diagnose(lambda w, i: jnp.mean(w[i.astype(int)].astype(H).astype(jnp.float32) ** 2), table, indices)
    assert diagnosis.summary.startswith("Loss scales from ")


def test_large_result_of_the_forward_pass_does_not_add_runs():
    assert len(diagnose(near_overflow).scale_errors) == 8


@pytest.mark.usefixtures("x64")
def test_numbers_above_float32_are_finite_in_float64():
    large = diagnose(lambda w: jnp.sum(w * 1e30) * 1e30, W.astype(jnp.float64))  # above the numbers of float32
    assert large.summary.startswith(NO_HALF_RESULT)
    assert large.fitting_scales is not None


def test_warning_of_scaled_backward_is_silent():
    scaled = jmpscale.scaled_backward(product, 2.0**40, warn_if_not_finite=True)
    summary = diagnose(scaled, W).summary  # the tests fail on warnings
    assert summary.startswith("Loss scales from 2^-44 to 2^-25 fit; yours is 2^10.")


def test_program_of_many_lines():
    half = ["    y = y + jnp.sin(w.astype(H)).astype(jnp.float32)"] * 20
    half += ["    y = y + (w.astype(H) * H(3e4) * H(3)).astype(jnp.float32)"] * 14
    namespace = {"jnp": jnp, "H": H}
    source = "\n".join(["def loss(w, y):", *half, "    return y.mean()"])
    exec(compile(source, "many_lines.py", "exec"), namespace)
    diagnosis = diagnose(namespace["loss"])
    names = [f"many_lines.py:{i} (loss)" for i in range(22, 36)]
    assert diagnosis.lines == tuple(names)
    assert f"Compute {', '.join(names[:11])} and 3 others in float32: then" in diagnosis.summary
    assert ". After the first 12 lines, not each was tried without: some may need no change." in diagnosis.summary
    assert [row.line for row in diagnosis.rows if row.in_lines and row.pass_ != "backward"] == names
    assert {row.alone for row in diagnosis.rows} == {None}
    assert len(diagnosis.rows) > 64


# --- The table. ---


def row(number, **fields):
    default = {"pass_": "forward", "operation": "mul", "dtype": "float16", "max_abs": 2.0}
    default |= {"overflow": 0.0, "tiny": 0.0, "in_lines": False, "alone": 0.0}
    return jmpscale.DiagnosisRow(line=f"model.py:{number} (f)", **(default | fields))


ROWS = [
    row(1, alone=1e-6, max_abs=0.0),
    row(2, alone=0.00123, tiny=0.00101, dtype="bfloat16", pass_="backward"),
    row(3, alone=math.inf, overflow=0.5, max_abs=1e5),
    row(4, alone=10.5),
    row(5, alone=0.02, in_lines=True),
    row(6),
    row(7, max_abs=32752.0),
]


def report(rows=ROWS, summary="A sentence.", not_entered=()):
    return jmpscale.Diagnosis(
        loss=1.0,
        loss_float32=1.0,
        gradient_error=0.1,
        loss_scale=1.0,
        scaler=None,
        scale_errors=(),
        lines=(),
        rows=tuple(rows),
        not_entered=tuple(not_entered),
        summary=summary,
        fitting_scales=(1.0, 2.0),
    )


def test_table_has_the_lines_first_and_then_the_largest_errors():
    assert report().describe().splitlines() == [
        "A sentence.",
        "line                pass     dtype   max_abs  headroom  overflow    tiny    alone",
        "model.py:5 (f)   forward   float16         2      15.0         0       0       2%",
        "model.py:3 (f)   forward   float16     1e+05      -0.6       50%       0      inf",
        "model.py:4 (f)   forward   float16         2      15.0         0       0   >1000%",
        "model.py:2 (f)  backward  bfloat16         2     127.0         0  0.101%   0.123%",
        "model.py:1 (f)   forward   float16         0       inf         0       0  <0.001%",
        "model.py:7 (f)   forward   float16  3.28e+04       1.0         0       0        0",
        "model.py:6 (f)   forward   float16         2      15.0         0       0        0",
    ]
    assert [text.split()[0] for text in report().describe(2).splitlines()[2:]] == ["model.py:5", "model.py:3"]
    for limit, error in ((0, ValueError), ("all", TypeError)):
        with pytest.raises(error, match="limit must be"):
            report().describe(limit)


def test_table_has_no_errors_that_were_not_measured():
    *_, columns, cells = report([row(1, alone=None)]).describe().splitlines()
    assert (columns.split()[-1], cells.split()[-1]) == ("tiny", "0")


def test_table_has_twenty_rows_by_default():
    assert len(report([row(i) for i in range(30)]).describe().splitlines()) == 2 + 20
    assert report([]).describe() == "A sentence."


def test_description_has_100_columns():
    names = [f"model.py:{i} (f): {'pallas_call' * i}" for i in range(10)]
    shown = report([row("1" * 90), row(2)], summary="Words of it. " * 20, not_entered=names).describe().splitlines()
    assert max(map(len, shown)) == 100
    assert " ".join(shown[:3]) == ("Words of it. " * 20).strip()
    assert shown[4].startswith(f"model.py:{'1' * 20}")
    assert shown[4].split()[0].endswith("...")
    assert shown[6] == "These operations run as written, in the float32 run too:"
    assert shown[7:-1] == [f"  {x:.95}" for x in names[:8]]
    assert report(not_entered="abcdefgh").describe().splitlines()[-1] == "  h"
    assert shown[-1] == "  and 2 more"
    assert report([], not_entered=names[:1]).describe().splitlines()[2:] == [f"  {names[0]}"]


def test_repr_shows_the_documented_attributes():
    assert repr(report()).startswith("Diagnosis(loss=1.0, loss_float32=1.0, gradient_error=0.1, loss_scale=1.0, ")
