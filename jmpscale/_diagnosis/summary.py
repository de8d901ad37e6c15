"""The first sentences of a diagnosis: the line, the reason and the remedy."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from jmpscale._base.text import format_percentage, format_scale
from jmpscale._diagnosis.errors import Measured
from jmpscale._diagnosis.lines import CHANGE, Cause, Lines, Reason, Trials
from jmpscale._diagnosis.modes import Part, Path, Site, Statistics
from jmpscale._diagnosis.scales import LARGE_ERROR, Errors, Scales, largest
from jmpscale._state import ScalerConfig, ScalerState


class Findings(NamedTuple):
    """What was measured of a step."""

    trials: Trials
    loss: float  # as written
    loss_error: float  # relative, if it is more than rounding, otherwise 0
    errors: Errors  # of the gradients at the present scale
    scaler: ScalerState
    scale: float  # 1 if the scaler is disabled
    scales: Scales = Scales({}, None, None)
    lines: Lines | None = None  # that must compute in float32, if they were looked for and found
    cause: Cause | None = None  # where the error begins, if it is known
    error_elsewhere: float = math.inf  # with other arguments, if rounding is the reason
    alone: Mapping[Part, float] = MappingProxyType({})  # the errors of the parts that were tried alone

    @property
    def scale_of_rows(self) -> float:
        """The scale at which rows are measured: the present one; if there are lines, one that then fits."""
        return 2.0**self.lines.exponent if self.lines and self.lines.paths else self.scale

    @property
    def statistics(self) -> dict[Site, Statistics]:
        return self.trials.statistics(self.scale_of_rows)

    @property
    def accurate(self) -> bool:
        """Whether a scale fits, and the loss is right."""
        return self.scales.fitting is not None and not self.loss_error

    @property
    def error(self) -> float:
        """The largest error of a gradient at the present scale."""
        return largest(self.errors)

    @property
    def scale_fits(self) -> bool:
        """Whether the present scale is in the range that fits, or less than a factor of two outside it and fits."""
        fitting, exponent = self.scales.fitting, math.log2(self.scale)
        if fitting is None or not fitting[0] - 1 < exponent < fitting[1] + 1:
            return False
        is_inside = fitting[0] <= exponent <= fitting[1]
        return is_inside or bool((self.errors <= self.scales.limits).all())

    def name(self, path: Path, named: Collection[Path] = ()) -> str:
        """Returns the name of a line, with a line that calls it if another call of it is not named."""
        others = [other for other in self.trials.step.paths if other[-1] == path[-1] and other not in (path, *named)]
        calls = (n for n in range(2, len(path) + 1) if all(other[-n:] != path[-n:] for other in others))
        first = next(calls, 1) if others else 1
        return path[-1] if first == 1 else f"{path[-1]}, called at {path[-first]}"

    def names(self, paths: Collection[Path]) -> str:
        """Returns the names of lines, as in `a, b and c`."""
        return _enumerate(list(dict.fromkeys(self.name(path, paths) for path in paths)), limit=12)

    def operation(self, site: Site) -> str:
        return f"{site.operation} at {self.name(site.part.path)}"


def describe_argument(name: str) -> str:
    """Describes an argument that makes the step useless."""
    return (
        f"{name} contains infinities or NaN, and with zeros in their place the loss and the gradients are finite. "
        "Correct this argument."
    )


def describe_constant(site: Site, value: float) -> str:
    """Describes a constant that makes the step useless."""
    limits = jnp.finfo(site.dtype)
    bound = f"above {site.limit:g}" if value else f"below {float(limits.smallest_subnormal):.0e}"
    held = "infinite" if value else "zero"
    return (
        f"A constant of {site.operation} at {site.part.path[-1]} is {held} in {site.dtype}, and therefore the loss or "
        "the gradients are zero or not finite. If your code has a different number, compute this line in float32, "
        f"because {site.dtype} cannot hold a number {bound}."
    )


def describe_origin(site: Site | None, not_entered: Sequence[str]) -> str:
    """Describes a step that is not finite in float32."""
    where = f"{site.operation} at {site.part.path[-1]}" if site else "an operation that was not entered"
    what = "is not finite in float32 either"
    if site and f"{site.part.path[-1]}: {site.operation}" in not_entered:
        where, what = f"{where}, which runs as written,", "is not finite"
    elif site and jnp.finfo(site.dtype).bits > 32:
        what = "is not finite"
    return (
        f"The result of {where} {what}, and reaches the loss or a gradient. No loss scale helps: correct this line. "
        "Common causes are invalid data; a softmax over a row that is masked everywhere, which needs a finite mask or "
        "where=; and a derivative such as the derivative of a norm at zero."
    )


def summarize(findings: Findings) -> str:
    """Describes a step that is finite in float32."""
    if not findings.trials.step.sites and not findings.trials.step.not_entered:
        return (
            "The program has no result in half precision, and needs no loss scale. jmpscale.autocast converts its "
            'matmuls to half precision, except those with precision="highest".'
        )
    if not findings.accurate:
        return f"{_describe_lines(findings)}{_epsilon(findings.trials)}"
    if not findings.trials.decisive.any():
        text = _describe_useless_gradients(findings.trials.measured)
        return text if findings.scale_fits else f"{text} {_describe_range(findings)} {_describe_scale(findings)}"
    if not findings.scale_fits:
        return f"{_describe_range(findings)} {_describe_scale(findings)}{_epsilon(findings.trials)}"
    error = f"The gradients differ from float32 {_by(findings.error)}."
    more = f"{_largest_part(findings)}{_epsilon(findings.trials)}"
    return f"{_describe_range(findings)} {error}{more}"


def _describe_useless_gradients(reference: Measured) -> str:
    if not reference.norms[1:].any():
        return "All gradients are zero, in float32 too. No loss scale changes that."
    return (
        "The gradients cannot be compared with float32, because they are rounding noise in float32 too: a change of "
        "the arguments in the last place changes them by more than 25%. Diagnose a step that still makes progress."
    )


def _epsilon(trials: Trials) -> str:
    """Describes gradients that are smaller than Adam's default epsilon: Adam hardly moves, in float32 too."""
    trios = zip(trials.measured.norms[1:], trials.reference[1:], trials.decisive, strict=True)
    sizes = [norm / math.sqrt(x.size) for norm, x, decides in trios if decides]
    small = [size for size in sizes if size < 1e-8]
    if 2 * len(small) <= len(sizes):
        return ""
    epsilon = max(1e-17, 10.0 ** math.floor(math.log10(min(small)) - 3))  # its square is a float32 number
    return (
        f" The root mean square of {len(small)} of {len(sizes)} gradients is below Adam's default epsilon, 1e-8: "
        f"unless gradients are summed later, give Adam a smaller one, such as {epsilon:.0e}."
    )


# --- A loss scale is enough. ---


def _describe_range(findings: Findings) -> str:
    fitting = " to ".join(format_scale(2.0**k) for k in findings.scales.fitting or ())
    return f"Loss scales from {fitting} fit; yours is {format_scale(findings.scale)}."


def _describe_scale(findings: Findings) -> str:
    """Describes why the present scale does not fit, and names the call that creates a scaler that does."""
    low, high = findings.scales.fitting or (0, 0)
    which = "small" if findings.scale < 2.0**low else "large"
    if findings.cause is None:
        why = (
            "At this scale the gradients are wrong even if the backward pass computes in float32, as in one that clips "
            "or compares scaled values."
        )
    else:
        why = f"It is too {which}: {findings.operation(findings.cause.site)} {findings.cause.reason.value}."
    text = f"{why} {_scale_remedy(findings, low, high)}"
    if not findings.trials.decisive.any():
        return text
    return f"{text} At the best scale the gradients differ from float32 {_by(findings.scales.smallest_error)}."


def _scale_remedy(findings: Findings, low: int, high: int) -> str:
    """Describes what the scaler does at scales that do not fit, and returns the call that creates one that fits."""
    config = findings.scaler.config
    is_frozen = findings.scale > 2.0**high and math.isfinite(findings.error)
    call = _scaler_call(config, low, high, may_grow=not is_frozen)
    if config.mode != "dynamic":
        return f"Use {call}."
    if is_frozen:
        return f"Its gradients are finite, so no step is skipped, and a dynamic scale does not back off. Use {call}."
    if 2.0**high < config.min_scale:
        limit = format_scale(config.min_scale)
        return f"A dynamic scale stops at min_scale, {limit}, and skips every step. Use {call}."
    if findings.scale > 2.0**high:
        return f"A dynamic scale backs off, and each of these steps is skipped. {call} avoids the skips."
    return f"Use {call}."


def _scaler_call(config: ScalerConfig, low: int, high: int, *, may_grow: bool) -> str:
    """Returns the call that creates a scaler that fits, 2 bits below the largest scale unless max_scale is smaller."""
    if config.mode == "static":
        return f"static(2.0**{max(low, high - 2)})"
    largest, smallest = math.floor(math.log2(config.max_scale)), math.ceil(math.log2(config.min_scale))
    exponent = max(low, high - 2)
    if largest >= low + 4:  # otherwise the scale could hardly back off
        exponent = min(exponent, largest)
    arguments = {"init_scale": exponent}
    if exponent > largest or not may_grow:
        arguments["max_scale"] = high
    if exponent < smallest:
        arguments["min_scale"] = low
    return f"dynamic({', '.join(f'{name}=2.0**{k}' for name, k in arguments.items())})"


def _largest_part(findings: Findings) -> str:
    """Names the line with the largest error alone, if lines were tried alone."""
    if not findings.alone:
        return ""
    part, error = max(findings.alone.items(), key=lambda item: item[1])
    which = "backward" if part.backward else "forward"
    name = findings.name(part.path)
    return f" With only the {which} pass of {name} in half precision, they differ {_by(error)}."


# --- Lines must compute in float32. ---


def _describe_lines(findings: Findings) -> str:
    if findings.lines is None:
        kernels = findings.trials.step.not_entered
        where = f" These operations run as written: {_enumerate(kernels)}." if kernels else ""
        return f"{_difference(findings)}, even if all lines compute in float32.{where}"
    if findings.cause is None:
        return (
            f"{_difference(findings)}, although the operations are right one at a time: the compiler combines "
            "operations, such as the products with two constants. Compute the function in float32."
        )
    cause = _describe_cause(findings, findings.cause, findings.lines)
    return f"{cause} {_remedy(findings, findings.cause, findings.lines)}"


def _describe_cause(findings: Findings, cause: Cause, lines: Lines) -> str:
    site, statistics = cause.site, findings.statistics[cause.site]
    if cause.reason is Reason.ROUNDING:
        place = findings.names([site.part.path])
        if findings.error_elsewhere > LARGE_ERROR:
            return f"{_difference(findings)}: rounding, not range. The error begins at {place}."
        return (
            f"{_difference(findings)}: rounding near zero, as at the end of training. If all arguments change by "
            f"{CHANGE:.0%}, the error is {format_percentage(findings.error_elsewhere)}. Change nothing if training "
            f"ends at the same loss as in float32. The error begins at {place}."
        )
    name, limit = findings.operation(site), site.limit
    if cause.reason is Reason.UNDERFLOW:
        fraction = format_percentage(statistics.underflow)
        what = f"underflows: {name} has {fraction} of its values below the smallest normal number of {site.dtype}"
    elif statistics.max_abs > limit:
        what = (
            f"overflows: {name} reaches {statistics.max_abs:.3g}, and the largest number of {site.dtype} is {limit:g}"
        )
    else:
        what = f"overflows: {name} is not finite, although its results fit: a partial sum exceeds {limit:g}"
    if site.part.backward:
        return f"No loss scale fits. At {format_scale(2.0**lines.exponent)}, the backward pass {what}."
    return f"The forward pass {what}. A loss scale cannot prevent that."


def _remedy(findings: Findings, cause: Cause, lines: Lines) -> str:
    paths, scales, step = lines.paths, lines.scales, findings.trials.step
    matmuls = [path for path in paths if step.is_by_autocast(path)]
    by_hand = [path for path in paths if path not in matmuls]
    parts = [f"Compute {findings.names(by_hand)} in float32"] if by_hand else []
    if matmuls:
        operations = {site.operation for site in step.sites if site.part.path in matmuls}
        noun = "matmul" if "dot_general" in operations else "convolution"
        highest = f'ass precision="highest" to each {noun} at {findings.names(matmuls)}'
        context = 'or use jax.default_matmul_precision("highest") around it'
        parts.append(f"{'p' if by_hand else 'P'}{highest}, {context}")
    text = f"{' and '.join(parts)}: then the gradients differ from float32 {_by(scales.smallest_error)}"
    if scales.fitting:
        low, high = scales.fitting
        text = f"{text}, and loss scales from {format_scale(2.0**low)} to {format_scale(2.0**high)} fit"
        if not low <= math.log2(findings.scale) <= high:
            call = _scaler_call(findings.scaler.config, low, high, may_grow=True)
            text = f"{text}; yours is {format_scale(findings.scale)}, so also use {call}"
    is_large = cause.reason is Reason.OVERFLOW and not cause.site.part.backward
    if not matmuls:
        inputs = "its input" if len(by_hand) == 1 else "their inputs"
        return f"{text}. Or normalize {inputs}." if is_large else f"{text}."
    if any(step.is_by_autocast(path) and path not in matmuls for path in step.paths):
        return f'{text}. The autocast guide lists such programs under "Keep these in float32".'
    scaling = " To keep matmuls there, normalize the input, or multiply it by a power of two and divide the result."
    return f"{text}. Then no matmul remains in half precision.{scaling if cause.reason is Reason.OVERFLOW else ''}"


def _difference(findings: Findings) -> str:
    """Returns the difference from float32 as the beginning of a sentence."""
    if not math.isfinite(findings.loss):
        return f"The loss is {findings.loss}, but in float32 it is {findings.trials.loss:.4g}"
    if findings.scales.best is None:
        return "The gradients are not finite at any loss scale, but are finite in float32"
    if findings.scales.fitting is None:
        return f"The gradients differ from float32 {_by(findings.scales.smallest_error)}"
    return f"The loss differs from float32 {_by(findings.loss_error)}"


def _by(fraction: float) -> str:
    return f"by {format_percentage(fraction).replace('>', 'more than ')}"


def _enumerate(names: Sequence[str], limit: int = 4) -> str:
    """Returns names as in `a, b and c`."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
