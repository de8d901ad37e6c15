"""diagnose names the line of each planted fault and the right reason, and gives no alarm for healthy programs."""

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
from diagnosis_programs import LARGE, MASKS, W, X, normal
from tables import rows

FORWARD_OVERFLOW = "The forward pass overflows: "
FORWARD_UNDERFLOW = "The forward pass underflows: "
CONSTANT = "A constant of "
GRADIENTS_ROUNDED = "The gradients differ from float32 by "
LOSS_ROUNDED = "The loss differs from float32 by "
NOT_FINITE = "The result of "
FITS = "Loss scales from "


class Fault(NamedTuple):
    """A program with a fault.

    Attributes:
      fun: the loss function.
      args: its arguments.
      begins: the first words of the summary.
      transform: the `value_and_grad` of the framework.
      autocast: whether `autocast` is applied to `fun`.
      lines: the lines that must compute in float32, relative to the line with the fault, if float32 is the remedy.
      line_of: the function with the fault.
      scale: the present loss scale.
      contains: other words of the summary.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = (W, X)
    begins: str = FORWARD_OVERFLOW
    transform: Callable[..., Any] = jax.value_and_grad
    autocast: bool = False
    lines: tuple[int, ...] = (0,)
    line_of: Callable[..., Any] | None = None
    scale: float = 1024.0
    contains: str = ""


POINTS = normal(3, 64, 3)
MANY = normal(4, 256, 8)
SEQUENCE = normal(7, 250, 4, 8)
FAULTS = {
    "overflow, positive": Fault(programs.positive_overflow, (W, LARGE / 10)),
    "overflow, negative": Fault(programs.negative_overflow, (W, LARGE / 10), contains="reaches -1.22e+05, and the"),
    "overflow before gelu": Fault(programs.overflow_before_gelu, (W, LARGE)),
    "overflow before layer norm": Fault(programs.overflow_before_layer_norm, (W, LARGE)),
    "sentinel": Fault(
        programs.sentinel_of_missing_values, (W, jnp.where(np.arange(16)[:, None] % 7 == 3, -99999.0, X))
    ),
    "squares": Fault(programs.squares_overflow),
    "loss": Fault(programs.loss_overflows),
    "gram": Fault(programs.gram_overflows, (W, 30 * normal(5, 2048, 8)), autocast=True),
    "scan": Fault(programs.overflow_in_a_scan, contains=" in step 2 reaches"),
    "while": Fault(programs.overflow_in_a_while_loop, contains=" in step 2 reaches"),
    "cond": Fault(programs.overflow_in_a_branch),
    "remat": Fault(programs.overflow_in_a_checkpointed_function, line_of=programs._large_block),
    "backward overflow": Fault(programs.backward_pass_overflows, begins="The backward pass overflows: "),
    "backward underflow": Fault(programs.backward_pass_underflows, begins="No loss scale fits. At "),
    "no scale fits": Fault(
        programs.gradients_of_two_sizes,
        ({"large": W, "small": W}, X),
        begins="No loss scale fits. At 2^",
        contains=". At larger scales, mul at ",
        named=1,
    ),
    "scale too small": Fault(programs.small_gradients, begins=FITS, scale=1.0, contains=", which is too small: "),
    "scale too large": Fault(programs.large_gradients, begins=FITS, scale=2.0**20, contains=", which is too large: "),
    "variance": Fault(programs.variance_underflows, begins=FORWARD_UNDERFLOW),
    "log of softmax": Fault(programs.log_of_softmax, named=1, contains="is not finite, because float16 rounds its"),
    "exp without maximum": Fault(programs.exp_without_maximum, (W, 3 * X)),
    "large constant": Fault(
        programs.quotient_by_a_large_constant, begins=CONSTANT, contains=" is infinite in float16, and"
    ),
    "small constant": Fault(
        programs.product_with_a_small_constant, begins=CONSTANT, contains=" is zero in float16, and"
    ),
    "epsilon": Fault(programs.epsilon_of_zero, begins=CONSTANT),
    "decay": Fault(programs.decay_of_an_average, begins=CONSTANT),
    "gaussian process": Fault(
        programs.gaussian_process,
        (jnp.zeros(()), POINTS, jnp.sin(POINTS.sum(-1))),
        begins="The loss is nan, but in float32 it is -59.18: rounding, not range.",
        autocast=True,
        named=1,
    ),
    "ridge head": Fault(
        programs.ridge_head,
        (normal(6, 8, 64, scale=0.1), MANY, jnp.sin(MANY.sum(-1, keepdims=True))),
        begins=GRADIENTS_ROUNDED,
        autocast=True,
        named=1,
    ),
    "variance by difference": Fault(programs.variance_by_difference, begins=GRADIENTS_ROUNDED),
    "running sum": Fault(programs.running_sum, (W, SEQUENCE), begins=LOSS_ROUNDED, named=1),
    "running average": Fault(programs.running_average, (W, SEQUENCE), begins=LOSS_ROUNDED, named=1),
    "large positions": Fault(programs.large_positions, begins=LOSS_ROUNDED, named=1),
    "image positions": Fault(programs.image_positions, begins=GRADIENTS_ROUNDED, autocast=True, named=1),
    "embedding counts": Fault(programs.embedding_counts, (W, jnp.zeros(20000, jnp.int32)), begins=GRADIENTS_ROUNDED),
    "masked row": Fault(programs.masked_row, begins=NOT_FINITE),
    "NaN after an infinity": Fault(programs.nan_after_an_infinity, begins=NOT_FINITE),
    "masked NaN and an infinity": Fault(programs.masked_nan_and_infinity, begins=NOT_FINITE),
    "infinity in the line above": Fault(programs.infinity_in_the_line_above, begins=NOT_FINITE),
    "norm at zero": Fault(programs.norm_at_zero, begins=NOT_FINITE),
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
DEFAULT_FAULTS = {
    "backward underflow",
    "scale too small",
    "small constant",
    "masked NaN and an infinity",
    "infinity in the line above",
}


def check_fault(fault):
    fun = jmpscale.autocast(fault.fun) if fault.autocast else fault.fun
    diagnosis = jmpscale.diagnose(fun, transform=fault.transform)(jmpscale.static(fault.scale), *fault.args)
    summary = diagnosis.summary
    assert summary.startswith(fault.begins)
    assert fault.contains in summary
    named = [int(number) for number in re.findall(r"diagnosis_programs\.py:(\d+) \(", summary)]
    assert named[fault.named] == programs.fault_line(fault.line_of or fault.fun), named
    assert ("then the gradients differ by" in summary) == fault.autocast


@pytest.mark.parametrize("fault", rows(FAULTS, default=DEFAULT_FAULTS))
def test_diagnose_names_the_line_of_a_fault(fault):
    check_fault(fault)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("create", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_diagnose_names_the_line_of_a_fault_in_a_layer(create):
    check_fault(create())


ATTENTION = normal(8, 2, 16, 8)
HEALTHY = {  # the loss function and its arguments
    "mlp": (programs.mlp_by_hand, (W, X)),
    "autocast": (jmpscale.autocast(programs.mlp), (W, X)),
    "bias before normalization": (programs.bias_before_normalization, ({"w": W, "b": jnp.zeros(8)}, X)),
    "saturated activation": (programs.saturated_activation, (W, X)),
    "recurrent": (jmpscale.autocast(programs.recurrent), (W, normal(9, 5, 4, 8))),
    "while": (programs.while_loop, (W, X)),
    "zero derivative": (jmpscale.autocast(programs.zero_derivative), ({"w": W, "unused": X}, X)),
    "critic": (jmpscale.autocast(programs.critic), (W, X)),
    "ctc": (jmpscale.autocast(programs.ctc), (W, X)),
    "remat": (jmpscale.autocast(programs.checkpointed), (W, X)),
    "custom rules": (jmpscale.autocast(programs.custom_rules), (W, X)),
}
HEALTHY |= {f"mask {name}": (programs.attention(mask), (W, ATTENTION)) for name, mask in MASKS.items()}
DEFAULT_HEALTHY = {
    "mlp",
    "critic",
}


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")  # of optax.ctc_loss
@pytest.mark.parametrize("program", rows(HEALTHY, default=DEFAULT_HEALTHY))
def test_diagnose_gives_no_alarm_for_a_healthy_program(program):
    fun, args = program
    diagnosis = jmpscale.diagnose(fun)(jmpscale.static(2.0**12), *args)
    assert re.fullmatch(
        r"Loss scales from 2\^[-\d]+ to 2\^[-\d]+ fit; yours is 2\^12\. The gradients differ from float32 by .*%\.",
        diagnosis.summary,
    )
    assert diagnosis.causes == ()
    assert diagnosis.gradient_error < 0.05
    assert diagnosis.loss == pytest.approx(diagnosis.loss_float32, rel=0.02)


@pytest.mark.full
def test_diagnose_says_that_a_clipped_backward_pass_depends_on_the_scale():
    fun = jmpscale.autocast(programs.clipped_backward_pass)
    diagnosis = jmpscale.diagnose(fun)(jmpscale.static(2.0**12), W, X)
    assert diagnosis.summary.startswith(FITS)
    assert "is too large: the backward pass depends on the scale, because it clips or compares" in diagnosis.summary
    assert diagnosis.causes == ()
