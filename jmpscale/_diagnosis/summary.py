"""The first sentences of a diagnosis: the line, the reason and the remedy."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from jmpscale._base.text import format_scale
from jmpscale._diagnosis.causes import Kind, kind_of, lines_to_change
from jmpscale._diagnosis.evaluate import Result
from jmpscale._diagnosis.findings import Findings
from jmpscale._diagnosis.float32 import is_narrow
from jmpscale._diagnosis.inputs import Constant
from jmpscale._diagnosis.measure import is_zero
from jmpscale._diagnosis.remedy import Remedy
from jmpscale._diagnosis.report import format_percentage, name_of
from jmpscale._diagnosis.scales import LARGEST_ERROR, Reference, Scales

_NOT_FINITE = (
    "No loss scale helps: correct this line. Common causes are invalid data; a softmax over a row that is masked "
    "everywhere, which needs a finite mask or where=; and a derivative such as the derivative of a norm at zero."
)
_VERBS = {
    Kind.OVERFLOW: "overflows",
    Kind.UNDERFLOW: "underflows",
    Kind.POLE: "is not finite",
    Kind.ROUNDING: "loses precision",
}


def summarize_argument(name: str) -> str:
    """Describes an argument that makes the step useless."""
    return (
        f"{name} contains infinities or NaN, and with zeros in their place the loss and the gradients are finite. "
        "Correct this argument."
    )


def summarize_constant(constant: Constant) -> str:
    """Describes a constant that makes the step useless."""
    limits = jnp.finfo(constant.dtype)
    is_zero = constant.value == 0
    bound = f"below {float(limits.smallest_subnormal):.0e}" if is_zero else f"above {float(limits.max):g}"
    held = "zero" if is_zero else "infinite"
    return (
        f"A constant of {constant.operation} at {constant.line} is {held} in {constant.dtype}, and therefore the loss "
        "or the gradients are zero or not finite. If you have written another number, compute this line in float32, "
        f"because {constant.dtype} cannot hold a number {bound}."
    )


def summarize(findings: Findings, remedy: Remedy | None, scale: float) -> str:
    """Describes what was measured of a step.

    Args:
      findings: what was measured.
      remedy: a remedy that was tried, if there is one.
      scale: the present scale.
    """
    scales = findings.scales
    if scales is None:
        return _describe_float32(findings.origins)
    if not any(is_narrow(x.site) for x in findings.evaluation.results) and not findings.evaluation.not_entered:
        return (
            "The program computes in float32: it holds no result in half precision, and needs no loss scale. "
            "jmpscale.autocast runs its matmuls in half precision."
        )
    if not any(findings.reference.decisive) and not findings.loss_error:
        return _describe_useless_gradients(findings.reference)
    if scales.fitting is not None and findings.healthy:
        return _describe_scales(findings, scales, scales.fitting, scale)
    first = findings.origins[0] if findings.origins else None
    if first and first.site.operation == "shard_map":
        return (
            f"{_difference(findings, scales)}. The error begins inside jax.shard_map, which is evaluated as one "
            "operation. Diagnose the function inside it, without collectives and with the rows of one device."
        )
    kind = kind_of(first) if first else Kind.ROUNDING
    if first and kind in (Kind.OVERFLOW, Kind.POLE):
        text = _describe_overflow(findings.origins, kind)
    elif first and kind is Kind.UNDERFLOW:
        text = _describe_underflow(findings, first)
    else:
        text = _describe_rounding(findings, scales)
    return f"{text} {_describe_remedy(findings, remedy, kind)}"


def _describe_float32(origins: Sequence[Result]) -> str:
    where = _name(origins[0]) if origins else "an operation that was not entered"
    return f"The result of {where} is not finite in float32 either, and reaches the loss or a gradient. {_NOT_FINITE}"


def _describe_useless_gradients(reference: Reference) -> str:
    if all(map(is_zero, reference.grads)):
        return "All gradients are zero, in float32 too. No loss scale changes that."
    return (
        "The gradients cannot be compared with float32, because they are rounding noise in float32 too: a change of "
        f"the arguments in the last place changes them by more than {LARGEST_ERROR:.0%}. Diagnose a step that still "
        "makes progress."
    )


def _describe_overflow(origins: Sequence[Result], kind: Kind) -> str:
    first = origins[0]
    extreme, largest = first.measured.extreme, float(jnp.finfo(first.site.dtype).max)
    cause = f"reaches {extreme:.3g}, and the largest number of {first.site.dtype} is {largest:g}"
    if kind is Kind.POLE:
        cause = f"is not finite, because {first.site.dtype} rounds its operand to zero"
    elif abs(extreme) <= largest:
        cause = f"is not finite, although its exact results fit: a partial sum exceeds {largest:g}"
    text = f"The {_pass(first)} pass overflows: {_name(first)} {cause}. A loss scale cannot prevent that."
    lines = list(dict.fromkeys(x.site.line for x in origins))
    return f"{text} Overflows also begin at {_enumerate(lines[1:])}." if len(lines) > 1 else text


def _describe_underflow(findings: Findings, first: Result) -> str:
    fraction = format_percentage(first.measured.underflow + first.measured.subnormal)
    text = f"{_name(first)} underflows: {fraction} of its result is zero or subnormal in {first.site.dtype}"
    if first.site.backward:
        above = f" At larger scales, {_name(findings.overflows[0])} overflows." if findings.overflows else ""
        return f"No loss scale fits. At {format_scale(findings.scale)}, the best, {text}.{above}"
    return f"The forward pass underflows: {text}. A loss scale cannot prevent that."


def _describe_rounding(findings: Findings, scales: Scales) -> str:
    text = f"{_difference(findings, scales)}: rounding, not range."
    if not findings.origins:
        return text
    first = findings.origins[0]
    lines = lines_to_change(first)
    if lines == [first.site.line]:
        return f"{text} The error begins with {_name(first)}."
    return f"{text} {_name(first)} amplifies the rounding of {_enumerate(lines)}."


def _difference(findings: Findings, scales: Scales) -> str:
    """Returns the difference to float32 as the beginning of a sentence."""
    if not math.isfinite(scales.loss):
        return f"The loss is {float(scales.loss)}, but in float32 it is {float(findings.reference.loss):.4g}"
    if scales.best is None:
        return "The gradients are not finite at any loss scale, but are finite in float32"
    if scales.errors[scales.best] <= LARGEST_ERROR:
        return f"The loss differs from float32 by {format_percentage(findings.loss_error)}"
    return f"The gradients differ from float32 by {format_percentage(scales.errors[scales.best])}"


def _describe_remedy(findings: Findings, remedy: Remedy | None, kind: Kind) -> str:
    if remedy is None:
        lines = list(dict.fromkeys(line for x in findings.origins[:1] for line in lines_to_change(x)))
        normalize = ", or normalize its input" if kind is Kind.OVERFLOW else ""
        named = _enumerate(lines) if lines else "these operations"
        return f"Compute {named}, and the lines that read the result, in float32{normalize}."
    where = _enumerate(remedy.lines, limit=len(remedy.lines))
    scales = remedy.findings.scales
    if remedy.findings.healthy and scales is not None and scales.best is not None and scales.fitting is not None:
        low, high = (format_scale(2.0**k) for k in scales.fitting)
        error = format_percentage(scales.errors[scales.best])
        return (
            f'Pass precision="highest" to the matmul at {where}, or use jax.default_matmul_precision("highest") around '
            f"it: then the gradients differ by {error}, and loss scales from {low} to {high} fit. The autocast guide "
            'lists such programs under "Keep these in float32".'
        )
    return (
        f'precision="highest" at {where} does not remove the error. Also keep in float32 the operands that the '
        "function casts to half precision, or compute the function in float32, without autocast and without casts."
    )


def _describe_scales(findings: Findings, scales: Scales, fitting: tuple[int, int], scale: float) -> str:
    low, high = (2.0**k for k in fitting)
    text = f"Loss scales from {format_scale(low)} to {format_scale(high)} fit; yours is {format_scale(scale)}"
    if low <= scale <= high:
        return f"{text}. The gradients differ from float32 by {format_percentage(scales.error)}."
    # Without an origin, float32 has the same gradients at this scale, and others at a scale of 1.
    cause = "the backward pass depends on the scale, because it clips or compares scaled values"
    if findings.origins:
        first = findings.origins[0]
        cause = f"{_name(first)} {_VERBS[kind_of(first)]}"
    if scale < low:
        which, remedy = "small", "Choose init_scale of dynamic, or a static scale, in this range."
    else:
        which, remedy = "large", "A dynamic scale backs off; decrease a static scale."
    error = format_percentage(min(scales.errors.values()))
    return (
        f"{text}, which is too {which}: {cause}. {remedy} At the best scale the gradients differ from float32 by "
        f"{error}."
    )


def _pass(result: Result) -> str:
    return "backward" if result.site.backward else "forward"


def _name(result: Result) -> str:
    return name_of(result.site.operation, result.site.line, result.steps)


def _enumerate(names: Sequence[str], limit: int = 4) -> str:
    """Returns names as in `a, b and c`."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
