"""The first sentences of a diagnosis: the line, the reason and the remedy."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jmpscale._base.jaxpr import MATMULS
from jmpscale._base.source import is_installed
from jmpscale._base.text import format_percentage, format_scale
from jmpscale._diagnosis.advice import Advice, advise
from jmpscale._diagnosis.fitting_scales import Errors, Scales, largest
from jmpscale._diagnosis.lines import Cause, Lines, Reason, Suspects, Trials, WrongCalls
from jmpscale._diagnosis.modes import Part, Site, Statistics
from jmpscale._diagnosis.program import Path
from jmpscale._diagnosis.thresholds import (
    CHANGE,
    DEFAULT,
    LARGEST_LOSS_ERROR,
    LARGEST_SET,
    MARGIN,
    NOISE,
    SHRINKS,
    SMALL_ERROR,
)
from jmpscale._state import ScalerConfig


class Findings(NamedTuple):
    """What was measured of a step."""

    trials: Trials
    loss: float  # as written
    loss_error: float  # relative, if it is more than rounding, otherwise 0
    errors: Errors  # of the gradients at the present scale
    scale: float  # the present scale
    config: ScalerConfig
    has_scaler: bool  # otherwise the scale is 1, and cannot change
    gradients: tuple[str, ...]  # their names, as Python code
    paths: tuple[Path, ...]  # all lines with results in half precision
    not_finite: str = ""  # what makes the step infinite or NaN, in float32 too
    is_new: bool = False  # whether the scaler has seen no step
    scales: Scales = Scales({}, None, None)
    overflows: bool = False  # whether results overflow, and an error is in between for this reason
    lines: Lines | None = None  # that must compute in float32, if they were looked for and found
    cause: Cause | None = None  # where the error begins, if it is known
    calls: Mapping[Part, WrongCalls] = MappingProxyType({})  # the calls of the lines that are wrong alone
    scales_with_float32_results: Scales | None = None  # of autocast, if it has others and lines were found
    error_elsewhere: float = math.inf  # with other arguments, if rounding is the reason
    alone: Mapping[Part, float] = MappingProxyType({})  # the errors of the parts that were tried alone
    suspects: Suspects | None = None  # of an error that is in between
    advice: Advice | None = None  # the scaler that is advised, if the present one should change

    @property
    def scale_of_rows(self) -> float:
        """The scale at which rows are measured: the present one; if there are lines and it does not fit, another."""
        exponent = self.lines.exponent if self.lines and self.lines.paths else self.present
        return self.scale if exponent == self.present else 2.0**exponent

    @property
    def present(self) -> int:
        """The exponent of the power of two that is nearest to the present scale."""
        return round(math.log2(self.scale))

    @property
    def statistics(self) -> dict[Site, Statistics]:
        return self.trials.statistics(self.scale_of_rows)

    @property
    def not_entered(self) -> list[str]:
        """The operations on whose results in half precision the comparison depends."""
        return list(dict.fromkeys(x.name for x in self.trials.not_entered if x.reaches_outputs))

    @property
    def accurate(self) -> bool:
        """Whether a scale fits, the loss is right, and no overflow makes the gradients worse."""
        return self.scales.fitting is not None and not self.loss_error and not self.overflows

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
        others = [other for other in self.paths if other[-1] == path[-1] and other not in (path, *named)]
        calls = (n for n in range(2, len(path) + 1) if all(other[-n:] != path[-n:] for other in others))
        first = next(calls, 1) if others else 1
        return path[-1] if first == 1 else f"{path[-1]}, called at {path[-first]}"

    def names(self, paths: Collection[Path]) -> str:
        """Returns the names of lines, as in `a, b and c`."""
        return enumerate_names(list(dict.fromkeys(self.name(path, paths) for path in paths)), limit=12)


def describe_arguments(names: Sequence[str]) -> str:
    """Describes arguments that make the step useless."""
    return (
        f"Infinities or NaN in {enumerate_names(names)} reach the loss or a gradient: with zeros in their place, the "
        "loss and the gradients are finite. Correct the data, or gate the state that a skipped step has changed."
    )


def describe_origin(site: Site | None, not_entered: Collection[str]) -> str:
    """Describes a step that is not finite in float32, given the names of the operations that were not entered."""
    where = f"{site.operation} at {site.part.path[-1]}" if site else "an operation that was not entered"
    if site is None or where in not_entered:
        return (
            f"The result of {where} is not finite, and reaches the loss or a gradient. Whether it is finite in float32 "
            "was not measured: give this operation operands in float32, and diagnose again."
        )
    return (
        f"The result of {where} is not finite in the float32 run either, and reaches the loss or a gradient. No loss "
        "scale helps: correct this line. Common causes are invalid data; a softmax over a row that is masked "
        "everywhere, which needs a finite mask or where=; a derivative such as the derivative of a norm at zero; and a "
        "constant, such as 1e-8 or -1e9, that is zero or infinite in float16."
    )


def describe_comparison(not_entered: Sequence[str]) -> str:
    """Describes a comparison in which operations run in half precision; nothing if there are none."""
    if not not_entered:
        return ""
    verb = "runs" if len(not_entered) == 1 else "run"
    return (
        f"The comparison is not entirely float32: {enumerate_names(not_entered)} {verb} in half precision in it, too. "
    )


def summarize(findings: Findings) -> str:
    """Describes a step that is finite in float32."""
    if not findings.gradients:
        return "The step computes no gradient."
    if not findings.trials.step.sites and not findings.trials.not_entered:
        if not findings.has_scaler:
            return "The gradients have no result in half precision."
        return (
            "The program has no result in half precision, and needs no loss scale. jmpscale.autocast converts its "
            'matmuls to half precision, except those with precision="highest" and contractions of at most 4 elements.'
        )
    if not findings.accurate:
        return _describe_lines(findings)
    if not findings.trials.decisive.any():
        if findings.scale_fits:
            return _describe_useless_gradients(findings)
        # A call would be built on gradients that are noise.
        return f"{_describe_useless_gradients(findings)} {_describe_range(findings)} {_describe_scale(findings)}"
    if not findings.scale_fits:
        rounding = _describe_rounding(findings, "At the best scale the gradients", findings.scales.errors_at_best)
        use = f"Use {findings.advice.call}. " if findings.advice else ""
        return f"{_describe_range(findings)} {_describe_scale(findings)} {use}{rounding}"
    rounding = _describe_rounding(findings, "The gradients", findings.errors)
    if not findings.has_scaler:
        return rounding
    scales = f"{_describe_range(findings)}{_describe_margin(findings)}"
    return f"{scales} {rounding}" if findings.error < SMALL_ERROR else f"{rounding} {scales}"


def _describe_rounding(findings: Findings, begin: str, errors: Errors | None) -> str:
    """Describes the error of gradients that may be right: small, or in between."""
    text = f"{begin} differ from float32 {_by_gradient(findings, errors)}"
    if errors is None or largest(errors) < SMALL_ERROR:
        return f"{text}."
    text = f"{text}: rounding, which may be harmless."
    if findings.suspects is None:
        return f"{text} Compare a short run with one in float32."
    part, alone, paths, remaining = findings.suspects
    names = findings.names(paths)
    return (
        f"{text}{_alone(findings, part, alone)}; with {names} in float32, {by(remaining)}. Compare a short run with "
        f"{'this line' if len(paths) == 1 else 'these lines'} in float32{_how(findings, paths)}, and keep the change "
        "if its loss is lower."
    )


def _describe_useless_gradients(findings: Findings) -> str:
    if not findings.trials.measured.norms[1:].any():
        where = "the comparison" if findings.not_entered else "float32"
        return (
            f"All gradients are zero, in {where} too. No loss scale changes that. Perhaps a constant, such as 1e-8 or "
            "1e6, is zero or infinite in float16."
        )
    return (
        "The gradients cannot be compared with float32, because they are rounding noise in float32 too: a change of "
        f"the arguments in the last place changes them by more than {NOISE:.0%}. Diagnose a step that still makes "
        "progress."
    )


# --- A loss scale is enough. ---


def _describe_range(findings: Findings) -> str:
    fitting = " to ".join(format_scale(2.0**k) for k in findings.scales.fitting or ())
    return f"Loss scales from {fitting} fit; yours is {format_scale(findings.scale)}."


def _describe_scale(findings: Findings) -> str:
    """Describes what happens at the present scale, which does not fit."""
    what = f"It is too {'small' if _is_small(findings) else 'large'}: the gradients"
    if not math.isfinite(findings.error):
        return f"{what} are not finite."
    return f"{what} differ from float32 {_by_gradient(findings, findings.errors)}."


def _is_small(findings: Findings) -> bool:
    low, _ = findings.scales.fitting or (0, 0)
    return findings.scale < 2.0**low


def find_advice(findings: Findings) -> Advice | None:
    """Finds a scaler that fits in place of the present one, or has room for larger gradients; None if none is needed.

    If lines must compute in float32, the scaler fits if they do.
    """
    if not findings.has_scaler:
        return None
    lines = findings.lines
    scales = lines.scales if lines and lines.paths else findings.scales
    if scales.fitting is None or not (lines or (findings.accurate and findings.trials.decisive.any())):
        return None
    low, high = scales.fitting
    if not findings.scale_fits and lines is None:
        # A dynamic scale does not back off from finite gradients.
        may_grow = _is_small(findings) or not math.isfinite(findings.error)
        return advise(findings.config, low, high, may_grow=may_grow)
    if lines and not low <= math.log2(findings.scale) <= high:
        return advise(findings.config, low, high)
    with_room = advise(findings.config, low, high, is_first=True)
    if findings.config.mode == "static" or findings.is_new:
        is_near = findings.scale > max(2.0 ** (high - MARGIN), float(with_room.scaler.loss_scale))
        return with_room if is_near else None
    # A dynamic scale that has grown is near the largest one, and backs off. A new run may begin above it.
    return with_room if lines and high - MARGIN < DEFAULT else None


def _describe_margin(findings: Findings) -> str:
    """Names a smaller scale if the present one fits, but could overflow in the next steps."""
    if findings.advice is None:
        return ""
    risk = "gradients can grow in the first steps, which are then skipped"
    if findings.config.mode == "static":
        risk = "a static scale does not back off if the gradients grow"
    return f" It is within {MARGIN} bits of the largest one, and {risk}: {findings.advice.call} leaves room."


def _alone(findings: Findings, part: Part, error: float) -> str:
    """Names a line with its error alone."""
    which = "backward" if part.backward else "forward"
    return f" With only the {which} pass of {findings.name(part.path)} in half precision, they differ {by(error)}"


def _by_gradient(findings: Findings, errors: Errors | None) -> str:
    """Returns the largest error, with the gradient that has it, and its part of the norm if the error is not small."""
    if errors is None or not len(errors):
        return by(math.inf if errors is None else 0.0)
    worst, norms = int(np.argmax(errors)), findings.trials.measured.norms[1:]
    name, text = findings.gradients[worst], by(largest(errors))
    if not 0 < largest(errors) < math.inf or not name:
        return text
    if largest(errors) < SMALL_ERROR or len(errors) == 1:
        return f"{text}, in {name}"
    share = float(norms[worst] / np.linalg.norm(norms))
    return f"{text}, in {name}, which has {format_percentage(share)} of their norm"


# --- Lines must compute in float32. ---


def _describe_lines(findings: Findings) -> str:
    if findings.lines is None:
        return f"{_difference(findings)}, even if all lines compute in float32."
    if findings.cause is None:
        return _describe_combined_operations(findings)
    cause = _describe_cause(findings, findings.cause, findings.lines)
    return f"{cause} {_remedy(findings, findings.cause, findings.lines)}"


def _describe_combined_operations(findings: Findings) -> str:
    overflowing = [site.part.path for site, x in findings.statistics.items() if x.overflow and not site.part.backward]
    remedy = "Compute the function in float32."
    if overflowing:
        remedy = f"Compute {findings.names(overflowing)} in float32, whose results overflow, or the whole function."
    return (
        f"{_difference(findings)}, although the operations are right one at a time: the compiler combines operations, "
        f"such as the products with two constants. {remedy}"
    )


def _describe_cause(findings: Findings, cause: Cause, lines: Lines) -> str:
    site, statistics = cause.site, findings.statistics[cause.site]
    if cause.reason is Reason.ROUNDING:
        place = findings.names([site.part.path]) + _calls(findings, site)
        return f"{_describe_rounded(findings)} The error begins at {place}."
    calls = _calls(findings, site)
    name, limit = f"{site.operation} at {findings.name(site.part.path)}{calls}", site.limit
    if calls:
        name += ","  # after an insertion
    if cause.reason is Reason.UNDERFLOW:
        fraction = format_percentage(statistics.underflow)
        what = f"underflows: {name} has {fraction} of its values below the smallest normal number of {site.dtype}"
    elif statistics.max_abs > limit:
        what = (
            f"{cause.reason.value}: {name} reaches {statistics.max_abs:.3g}, and the largest number of {site.dtype} is "
            f"{limit:g}"
        )
    else:
        what = f"{cause.reason.value}: {name} is not finite, although its results fit: a partial sum exceeds {limit:g}"
    if not findings.has_scaler:
        return f"The {site.part.pass_.value} pass {what}."
    if findings.trials.step.is_recomputed(site):
        return f"The forward pass, which is computed again, {what}. A loss scale cannot prevent that."
    if site.part.backward:
        return f"No loss scale fits. At {format_scale(2.0**lines.exponent)}, the backward pass {what}."
    return f"The forward pass {what}. A loss scale cannot prevent that."


def _describe_rounded(findings: Findings) -> str:
    """Describes an error that neither the range of float32 nor a scale prevents."""
    present = max(findings.loss_error, findings.scales.smallest_error)
    if SHRINKS * findings.error_elsewhere > present or findings.error_elsewhere > SMALL_ERROR:
        return f"{_difference(findings)}: rounding, not range."
    advice = "Change nothing if training ends at the same loss as in float32."
    if abs(findings.loss - findings.trials.loss) > LARGEST_LOSS_ERROR * abs(findings.trials.loss):
        advice = (
            f"The loss is {findings.loss:.4g}, and {findings.trials.loss:.4g} in float32: make the change, and "
            "keep it if training ends at a lower loss."
        )
    return (
        f"{_difference(findings)}: rounding of numbers that nearly cancel. If all arguments change by {CHANGE:.0%}, "
        f"the error is {format_percentage(findings.error_elsewhere)}. {advice}"
    )


def _calls(findings: Findings, site: Site) -> str:
    """Returns which calls of the line are wrong, or which arguments that it casts, if not all of them are."""
    calls = findings.calls.get(site.part)
    if not calls or calls.site != site:
        return ""
    if calls.inputs:
        return f", in the cast of {enumerate_names(calls.inputs)}"
    return f", {'call' if len(calls.numbers) == 1 else 'calls'} {calls.text}"


def _remedy(findings: Findings, cause: Cause, lines: Lines) -> str:
    scales, paths = lines.scales, set(lines.paths)
    text = (
        f"Compute {findings.names(lines.paths)} in float32{_how(findings, lines.paths)}: {_promise(findings, scales)}"
    )
    if not findings.has_scaler and cause.reason is Reason.UNDERFLOW and cause.site.part.backward:
        how = "with jmpscale.value_and_grad and a scaler, or by a larger number if it is scaled already"
        text = f"Scale the loss, {how}. Or c{text[1:]}"
    if findings.advice:
        text = f"{text}{_describe_advice(findings, scales)}"
    if cause.reason is Reason.UNDERFLOW and cause.site in findings.trials.step.in_inner_gradients:
        text = f"{text}. Or scale the gradient that the loss contains: value_and_grad(inner_fn)(scaler, ...)"
    elif cause.reason.is_overflow and not cause.site.part.backward:
        text = f"{text}. Or normalize {'its input' if len(paths) == 1 else 'their inputs'}"
    if not lines.is_minimal:
        text = f"{text}. After the first {LARGEST_SET} lines, not each was tried without: some may need no change"
    remaining = {part: error for part, error in findings.alone.items() if part.path not in paths}
    left = ""
    if remaining and SMALL_ERROR <= scales.smallest_error < math.inf:
        left = f"{_alone(findings, *max(remaining.items(), key=lambda item: item[1]))}."
    near = _describe_near_overflows(findings, lines) if cause.reason.is_overflow else ""
    return f"{text}.{near}{_in_packages(findings, lines)}{left}{_describe_float32_results(findings)}"


def _how(findings: Findings, paths: Collection[Path]) -> str:
    """Says how a user computes a line in float32, if autocast converts a matmul there."""
    own = [path for path in paths if not is_installed(path[-1])]
    is_converted = own and not findings.trials.step.autocast_paths.isdisjoint(paths)
    return ', with precision="highest" where autocast converts a matmul' if is_converted else ""


def _promise(findings: Findings, scales: Scales) -> str:
    """Describes the errors and the scales after an edit."""
    text = f"then the gradients differ from float32 {_by_gradient(findings, scales.errors_at_best)}"
    if scales.fitting is None or not findings.has_scaler:
        return text
    low, high = scales.fitting
    return f"{text}, and loss scales from {format_scale(2.0**low)} to {format_scale(2.0**high)} fit"


def _describe_advice(findings: Findings, scales: Scales) -> str:
    """Names the scaler that the remedy needs, too."""
    low, high = scales.fitting or (0, 0)
    call = findings.advice.call if findings.advice else ""
    if not low <= math.log2(findings.scale) <= high:
        return f"; yours is {format_scale(findings.scale)}, so also use {call}"
    if findings.is_new or findings.config.mode == "static":
        return f"; yours is {format_scale(findings.scale)}, and {call} leaves room"
    return f"; begin a new run with {call}"


def _describe_near_overflows(findings: Findings, lines: Lines) -> str:
    """Names other lines of the forward pass whose results nearly overflow: no scale helps if they do so later."""
    near = [
        site.part.path
        for site, x in findings.statistics.items()
        if not site.part.backward and site.part.path not in lines.paths
        if not x.overflow and site.limit / 2.0**MARGIN < x.max_abs <= site.limit
    ]
    if not near:
        return ""
    return f" Compute {findings.names(near)} in float32, too: results are within {MARGIN} bits of an overflow."


def _describe_float32_results(findings: Findings) -> str:
    """Offers float32 results of `autocast` if a scale fits then."""
    scales = findings.scales_with_float32_results
    if scales is None or scales.fitting is None or scales.smallest_error >= SMALL_ERROR:
        return ""
    text = f" Or call autocast with result_dtype=jnp.float32, and change no line: {_promise(findings, scales)}"
    low, high = scales.fitting
    if not low <= math.log2(findings.scale) <= high:
        text = f"{text}; yours is {format_scale(findings.scale)}, so also use {advise(findings.config, low, high).call}"
    return f"{text}."


def _in_packages(findings: Findings, lines: Lines) -> str:
    """Says what to do with lines that the user cannot edit."""
    installed = [path for path in lines.paths if is_installed(path[-1])]
    if not installed:
        return ""
    own = [next((line for line in reversed(path) if not is_installed(line)), "the call") for path in installed]
    calls = enumerate_names(list(dict.fromkeys(own)))
    step = findings.trials.step
    operations = {site.operation for site in step.sites if site.part.path in installed}
    package = "pass the package float32 as its dtype, or copy the function"
    if operations <= MATMULS | {"convert_element_type"} and step.autocast_paths.issuperset(installed):
        package = (
            f'if autocast converts the matmuls, put jax.default_matmul_precision("highest") around {calls}, which '
            f"keeps all matmuls of the call in float32; otherwise {package}"
        )
    return f" In an installed package: {package}."


def _difference(findings: Findings) -> str:
    """Returns the difference from float32 as the beginning of a sentence."""
    if not math.isfinite(findings.loss):
        return f"The loss is {findings.loss}, but in float32 it is {findings.trials.loss:.4g}"
    if findings.scales.best is None:
        where = " at any loss scale" if findings.has_scaler else ""
        return f"The gradients are not finite{where}, but are finite in float32"
    if findings.scales.fitting is None:
        return f"The gradients differ from float32 {_by_gradient(findings, findings.scales.errors_at_best)}"
    return f"The loss differs from float32 {by(findings.loss_error)}"


def by(fraction: float) -> str:
    return f"by {format_percentage(fraction).replace('>', 'more than ')}"


def enumerate_names(names: Sequence[str], limit: int = 4) -> str:
    """Returns names as in `a, b and c`."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
