"""diagnose finds the lines and the reason of each planted fault."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmpscale

import diagnosis_programs as programs
from arrays import normal
from diagnosis_programs import LARGE, W, X
from messages import (
    FORWARD_ALONE,
    GRADIENTS_DIFFER,
    LARGEST_NUMBER,
    LOSS_DIFFERS,
    NO_GRADIENT,
    NO_SCALE_FITS,
    NO_SCALE_HELPS,
    NORMALIZE,
    OVERFLOW,
    PRECISE_MATMUL,
    REMEDY,
    REMEDY_OF_ALL_LINES,
    ROUNDING,
    TOO_LARGE,
    TOO_SMALL,
    UNDERFLOW,
)
from tables import names

pytestmark = pytest.mark.full

NEVER_FINITE = f"The gradients are not finite at any loss scale, but are finite in float32: {ROUNDING} "
NOT_FINITE = "The result of "
CHAIN, LONG_CHAIN = (0, 1), (0, 1, 2)  # each line holds the result that does not fit


class Fault(NamedTuple):
    """A program with a fault.

    Attributes:
      fun: the loss function.
      args: its arguments.
      begins: the first words of the summary.
      transform: the `value_and_grad` of the framework.
      autocast: whether `autocast` is applied to `fun`.
      lines: the lines that must compute in float32, relative to the line with the fault.
      line_of: the function with the fault.
      scaler: the scaler, with the present loss scale.
      contains: other words of the summary.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = (W, X)
    begins: str = OVERFLOW
    transform: Callable[..., Any] = jax.value_and_grad
    autocast: bool = False
    lines: tuple[int, ...] = (0,)
    line_of: Callable[..., Any] | None = None
    scaler: jmpscale.ScalerState = jmpscale.static(1024.0)
    contains: str = ""


POINTS = jnp.tile(normal(3, 64, 3), 2) * 0.35
MANY = normal(4, 256, 8)
SEQUENCE = normal(7, 250, 4, 8)
# test_diagnose_report.py has the faults of a loss scale that does not fit, and the faults of the backward pass.
FAULTS = {
    "overflow": Fault(
        programs.negative_overflow,
        (W, LARGE / 10),
        lines=LONG_CHAIN,
        contains=f"reaches 1.22e+05, {LARGEST_NUMBER} {NO_SCALE_HELPS}",
    ),
    "overflow before gelu": Fault(programs.overflow_before_gelu, (W, LARGE), lines=LONG_CHAIN),
    "sentinel": Fault(
        programs.sentinel_of_missing_values,
        (W, jnp.where(np.arange(16)[:, None] % 7 == 3, -99999.0, X)),
        lines=CHAIN,
    ),
    "overflow and rounding": Fault(
        programs.overflow_and_rounding,
        contains=f". {NORMALIZE} {FORWARD_ALONE}",
    ),
    "squares": Fault(programs.squares_overflow, lines=CHAIN),
    "loss": Fault(programs.loss_overflows),
    "gram": Fault(programs.gram_overflows, (W, 30 * normal(5, 2048, 8)), autocast=True),
    "linear attention": Fault(programs.linear_attention, (W, normal(4, 4096, 8)), autocast=True),
    "second derivative": Fault(
        programs.second_derivative, autocast=True, contains=f"{REMEDY_OF_ALL_LINES}. {NORMALIZE}"
    ),
    "scan": Fault(programs.overflow_in_a_scan),
    "while": Fault(programs.overflow_in_a_while_loop),
    "cond": Fault(programs.overflow_in_a_branch),
    "remat": Fault(programs.overflow_in_a_checkpointed_function, line_of=programs._large_block),
    "no scale fits": Fault(
        programs.gradients_of_two_sizes,
        ({"large": W, "small": W}, X),
        begins=f"{NO_SCALE_FITS}2^5, the backward pass underflows: convert_element_type at ",
    ),
    "wrong at one scale": Fault(
        programs.wrong_at_one_scale,
        begins="Loss scales from 2^11 to ",
        autocast=True,
        lines=(),
        scaler=jmpscale.dynamic(2.0**10),
        contains=f"; yours is 2^10. {TOO_SMALL}differ from float32 by 200%, in w.",
    ),
    "equal scores": Fault(
        programs.min_max_of_equal_scores,
        begins="The gradients cannot be compared with float32, because they are rounding noise in float32 too",
        autocast=True,
        lines=(),
        scaler=jmpscale.dynamic(),
        contains=f" fit; yours is 2^16. {TOO_LARGE}are not finite.",
    ),
    "reciprocal saved in half": Fault(
        programs.reciprocal_saved_in_half,
        ({"w": W, "gain": jnp.ones((1, 8))}, X),
        line_of=programs._normalize_forward,
    ),
    "variance": Fault(programs.variance_underflows, begins=UNDERFLOW, lines=CHAIN),
    "exp without maximum": Fault(programs.exp_without_maximum, (W, 3 * X), lines=CHAIN),
    "clipped cross-entropy": Fault(programs.clipped_cross_entropy, begins=UNDERFLOW, lines=(-2, -1, 0)),
    "transducer": Fault(programs.transducer_normalizer, (3 * W, X), begins=UNDERFLOW, autocast=True),
    "log-mel": Fault(programs.log_mel, begins=UNDERFLOW + "dot_general at ", autocast=True),
    "large constant": Fault(programs.quotient_by_a_large_constant, begins=NO_GRADIENT, lines=()),
    "small constant": Fault(programs.product_with_a_small_constant, begins=NO_GRADIENT, lines=()),
    "epsilon": Fault(programs.epsilon_of_zero, begins=NOT_FINITE, lines=()),
    "gaussian process": Fault(
        programs.gaussian_process,
        (jnp.zeros(()), POINTS, jnp.sin(POINTS.sum(-1))),
        begins=f"The loss is nan, but in float32 it is -144.4: {ROUNDING}",
        autocast=True,
        contains=f" {PRECISE_MATMUL}",
    ),
    "ridge head": Fault(
        programs.ridge_head,
        (normal(6, 8, 64, scale=0.1), MANY, jnp.sin(MANY.sum(-1, keepdims=True))),
        begins=GRADIENTS_DIFFER,
        autocast=True,
    ),
    "variance by difference": Fault(programs.variance_by_difference, begins=GRADIENTS_DIFFER),
    "running sum": Fault(programs.running_sum, (W, SEQUENCE), begins=LOSS_DIFFERS),
    "cumulative sum": Fault(
        programs.cumulative_sum,
        (W, normal(4, 512, 8)),
        begins=LOSS_DIFFERS,
        lines=CHAIN,
    ),
    "large positions": Fault(programs.large_positions, begins=LOSS_DIFFERS, lines=CHAIN),
    "image positions": Fault(programs.image_positions, begins=GRADIENTS_DIFFER, autocast=True),
    "embedding counts": Fault(programs.embedding_counts, (W, jnp.zeros(20000, jnp.int32)), begins=GRADIENTS_DIFFER),
    "masked row": Fault(programs.masked_row, begins=NOT_FINITE, lines=()),
    "NaN after an infinity": Fault(programs.nan_after_an_infinity, begins=NOT_FINITE, lines=()),
    "masked NaN and an infinity": Fault(programs.masked_nan_and_infinity, begins=NOT_FINITE, lines=()),
    "infinity in the line above": Fault(programs.infinity_in_the_line_above, begins=NOT_FINITE, lines=()),
    "norm at zero": Fault(programs.norm_at_zero, begins=NOT_FINITE, lines=()),
    "infinite derivative": Fault(programs.infinite_derivative, begins=NOT_FINITE, lines=()),
    "root of a rounded difference": Fault(programs.root_of_a_rounded_difference, begins=NEVER_FINITE, lines=CHAIN),
}
FRAMEWORKS = {  # the arguments are created in the test, because these libraries rely on implicit promotion
    "linen": lambda: Fault(
        programs.linen_loss, (programs.Linen().init(jax.random.key(0), X), LARGE), line_of=programs.Linen.__call__
    ),
    "nnx": lambda: Fault(
        programs.nnx_loss,
        (programs.Nnx(nnx.Rngs(0)), LARGE),
        transform=nnx.value_and_grad,
        line_of=programs.Nnx.__call__,
    ),
    "equinox": lambda: Fault(
        programs.equinox_loss,
        (programs.Equinox(), LARGE / 10),
        transform=equinox.filter_value_and_grad,
        line_of=programs.Equinox.__call__,
    ),
    "haiku": lambda: Fault(
        programs.haiku_loss,
        (programs.HAIKU.init(jax.random.key(0), X), LARGE / 10),
        line_of=programs.haiku_network,
    ),
}


def offset(name, line):
    """Returns the number of a line of `diagnosis_programs`, relative to another one."""
    return int(re.fullmatch(r"diagnosis_programs\.py:(\d+) \(.*\)", name)[1]) - line


def check_advice(diagnosis):
    """Checks that the scaler is the one in the summary, and that its scale and its limits fit."""
    of_lines = diagnosis.summary.partition(" Or call autocast")[0]
    call = re.search(r"((?:static|dynamic)\([\w=., *-]*\))", of_lines)
    advised = diagnosis.scaler or next((x.scaler for x in diagnosis.findings if x.scaler), None)
    assert (advised is None) == (call is None)
    if advised is None:
        return
    promised = re.search(r"oss scales from 2\^(-?\d+) to 2\^(-?\d+) fit", diagnosis.summary)
    assert 2.0 ** int(promised[1]) <= advised.loss_scale <= 2.0 ** int(promised[2])
    numbers = [float(x) for x in re.findall(r"2\.0\*\*(-?\d+)", call[1])]
    config = advised.config
    assert {2.0**x for x in numbers} <= {float(advised.loss_scale), config.min_scale, config.max_scale}
    assert config.mode == "static" or config.min_scale <= advised.loss_scale <= config.max_scale


def diagnose(fault, fun):
    """Returns the diagnosis of a fault, or of its function after an edit."""
    fun = jmpscale.autocast(fun) if fault.autocast else fun
    return jmpscale.diagnose(fun, transform=fault.transform)(fault.scaler, *fault.args)


@functools.cache
def diagnosis_of(name):
    """Returns the diagnosis of a row of the faults; a process computes it once for the tests of it and its remedy."""
    return diagnose(FAULTS[name], FAULTS[name].fun)


def check_fault(fault, diagnosis):
    summary = diagnosis.summary
    assert summary.startswith(fault.begins)
    assert fault.contains in summary
    named = re.findall(r"diagnosis_programs\.py:\d+ \([\w.]+\)", summary)
    line = programs.fault_line(fault.line_of or fault.fun)
    assert tuple(offset(name, line) for name in diagnosis.lines) == fault.lines
    assert [offset(name, line) for name in named[:1]] == ([] if line is None else [0])
    assert set(diagnosis.lines) <= set(named)
    assert {row.line for row in diagnosis.rows if row.in_lines} == set(diagnosis.lines)
    assert (REMEDY in summary or REMEDY_OF_ALL_LINES in summary) == bool(fault.lines)
    assert 'with precision="highest" where autocast' in summary or not (fault.autocast and fault.lines)
    check_advice(diagnosis)


@pytest.mark.parametrize("name", names(FAULTS))
def test_diagnose_finds_the_lines_of_a_fault(name):
    check_fault(FAULTS[name], diagnosis_of(name))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("create", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_diagnose_finds_the_lines_of_a_fault_in_a_layer(create):
    fault = create()
    check_fault(fault, diagnose(fault, fault.fun))


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="other versions of XLA do not combine the constants")
def test_operations_that_the_compiler_combines_are_not_named():
    diagnosis = jmpscale.diagnose(programs.combined_constants)(jmpscale.static(2.0**12), W, X)
    begin, _, end = diagnosis.summary.partition(f"{diagnosis.loss_float32:.4g}")
    assert begin == "The loss is nan, but in float32 it is "
    assert end == (
        ", although the operations are right one at a time: the compiler combines operations, such as the products "
        "with two constants. Compute the function in float32."
    )
    assert diagnosis.lines == ()
