"""The first sentences of a diagnosis: the line, the reason and the remedy."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jmpscale._base.jaxpr import MATMULS
from jmpscale._base.source import is_installed
from jmpscale._base.text import format_percentage, format_scale
from jmpscale._diagnosis.fitting_scales import Errors, Scales, largest
from jmpscale._diagnosis.lines import Calls, Cause, Lines, Reason, Trials
from jmpscale._diagnosis.modes import Part, Site, Statistics
from jmpscale._diagnosis.program import Path
from jmpscale._diagnosis.thresholds import CHANGE, DEFAULT, LARGE_ERROR, LARGEST_LOSS_ERROR, MARGIN, NOISE, ROOM
from jmpscale._state import ScalerConfig


class Findings(NamedTuple):
    """What was measured of a step."""

    trials: Trials
    loss: float  # as written
    loss_error: float  # relative, if it is more than rounding, otherwise 0
    errors: Errors  # of the gradients at the present scale
    scale: float  # the present scale
    config: ScalerConfig
    gradients: tuple[str, ...]  # their names, as Python code
    is_new: bool = False  # whether the scaler has seen no step
    scales: Scales = Scales({}, None, None)
    lines: Lines | None = None  # that must compute in float32, if they were looked for and found
    cause: Cause | None = None  # where the error begins, if it is known
    calls: Mapping[Part, Calls] = MappingProxyType({})  # the calls of the lines that are wrong alone
    scales_with_float32_results: Scales | None = None  # of autocast, if it has others and lines were found
    error_elsewhere: float = math.inf  # with other arguments, if rounding is the reason
    alone: Mapping[Part, float] = MappingProxyType({})  # the errors of the parts that were tried alone
    alone_at_best: Mapping[Part, float] = MappingProxyType({})  # at the best scale, if the present one does not fit

    @property
    def scale_of_rows(self) -> float:
        """The scale at which rows are measured: the present one; if there are lines, one that then fits."""
        return 2.0**self.lines.exponent if self.lines and self.lines.paths else self.scale

    @property
    def statistics(self) -> dict[Site, Statistics]:
        return self.trials.statistics(self.scale_of_rows)

    @property
    def not_entered(self) -> list[str]:
        """The operations on whose results in half precision the comparison depends."""
        return list(dict.fromkeys(x.name for x in self.trials.not_entered if x.reaches_outputs))

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


def describe_arguments(names: Sequence[str]) -> str:
    """Describes arguments that make the step useless."""
    return (
        f"Infinities or NaN in {_enumerate(names)} reach the loss or a gradient: with zeros in their place, the loss "
        "and the gradients are finite. Correct the data, or gate the state that a skipped step has changed."
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
    return f"The comparison is not entirely float32: {_enumerate(not_entered)} {verb} in half precision in it, too. "


def summarize(findings: Findings) -> str:
    """Describes a step that is finite in float32."""
    if not findings.trials.step.sites and not findings.trials.not_entered:
        return (
            "The program has no result in half precision, and needs no loss scale. jmpscale.autocast converts its "
            'matmuls to half precision, except those with precision="highest" and contractions of at most 4 elements.'
        )
    if not findings.accurate:
        return _describe_lines(findings)
    is_measured = findings.trials.decisive.any()
    if not findings.scale_fits:
        text = f"{_describe_range(findings)} {_describe_scale(findings)}"
        if not is_measured:  # a call would be built on gradients that are noise
            return f"{_describe_useless_gradients(findings)} {text}"
        error = f"the gradients differ from float32 {_by_gradient(findings, findings.scales.errors_at_best)}."
        part = _largest_part(findings, findings.alone_at_best)
        return f"{text} Use {_call_that_fits(findings)}. At the best scale {error}{part}"
    if not is_measured:
        return _describe_useless_gradients(findings)
    error = f"The gradients differ from float32 {_by_gradient(findings, findings.errors)}."
    return f"{_describe_range(findings)}{_describe_margin(findings)} {error}{_largest_part(findings, findings.alone)}"


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
    return f"{what} differ from float32 {_by(findings.error)}."


def _is_small(findings: Findings) -> bool:
    low, _ = findings.scales.fitting or (0, 0)
    return findings.scale < 2.0**low


def _call_that_fits(findings: Findings) -> str:
    """Returns the call that creates a scaler that fits in place of the present one."""
    low, high = findings.scales.fitting or (0, 0)
    # A dynamic scale does not back off from finite gradients.
    may_grow = _is_small(findings) or not math.isfinite(findings.error)
    if findings.config.mode == "dynamic" and may_grow and low <= DEFAULT <= high - MARGIN:
        return "dynamic()"
    return _scaler_call(findings.config, low, high, may_grow=may_grow)


def _describe_margin(findings: Findings) -> str:
    """Names a smaller scale if the present one fits, but could overflow in the next steps.

    A dynamic scale that has grown is near the largest one, and backs off; a static scale stays.
    """
    low, high = findings.scales.fitting or (0, 0)
    is_static = findings.config.mode == "static"
    if findings.scale <= 2.0 ** (high - MARGIN) or not (is_static or findings.is_new):
        return ""
    exponent = max(low, high - ROOM)
    if is_static:
        risk, call = "a static scale does not back off if the gradients grow", f"static(2.0**{exponent})"
    else:
        exponent = max(exponent, math.ceil(math.log2(findings.config.min_scale)))
        risk = "gradients can grow in the first steps, which are then skipped"
        call = f"dynamic(init_scale=2.0**{exponent})"
    if 2.0**exponent >= findings.scale:
        return ""
    return f" It is within {MARGIN} bits of the largest one, and {risk}: {call} leaves room."


def _scaler_call(config: ScalerConfig, low: int, high: int, *, may_grow: bool) -> str:
    """Returns the call that creates a scaler that fits, below the largest scale unless max_scale is smaller."""
    if config.mode == "static":
        return f"static(2.0**{max(low, high - MARGIN)})"
    largest, smallest = math.floor(math.log2(config.max_scale)), math.ceil(math.log2(config.min_scale))
    exponent = max(low, high - MARGIN)
    if largest >= low + 4:  # otherwise the scale could hardly back off
        exponent = min(exponent, largest)
    arguments = {"init_scale": exponent}
    if exponent > largest or not may_grow:
        arguments["max_scale"] = high
    if exponent < smallest:
        arguments["min_scale"] = low
    return f"dynamic({', '.join(f'{name}=2.0**{k}' for name, k in arguments.items())})"


def _largest_part(findings: Findings, alone: Mapping[Part, float]) -> str:
    """Names the line with the largest error alone, if lines were tried alone."""
    if not alone:
        return ""
    part, error = max(alone.items(), key=lambda item: item[1])
    which = "backward" if part.backward else "forward"
    name = findings.name(part.path)
    return f" With only the {which} pass of {name} in half precision, they differ {_by(error)}."


def _by_gradient(findings: Findings, errors: Errors | None) -> str:
    """Returns the largest error, with the gradient that has it if it is large and one of several."""
    if errors is None or not len(errors) or not LARGE_ERROR <= largest(errors) < math.inf or len(errors) == 1:
        return _by(math.inf if errors is None else largest(errors))
    worst, norms = int(np.argmax(errors)), findings.trials.measured.norms[1:]
    share = float(norms[worst] / np.linalg.norm(norms))
    return f"{_by(largest(errors))}, in {findings.gradients[worst]}, which has {format_percentage(share)} of their norm"


# --- Lines must compute in float32. ---


def _describe_lines(findings: Findings) -> str:
    if findings.lines is None:
        return f"{_difference(findings)}, even if all lines compute in float32."
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
        place = findings.names([site.part.path]) + _calls(findings, site)
        if findings.error_elsewhere > LARGE_ERROR:
            return f"{_difference(findings)}: rounding, not range. The error begins at {place}."
        advice = "Change nothing if training ends at the same loss as in float32."
        if abs(findings.loss - findings.trials.loss) > LARGEST_LOSS_ERROR * abs(findings.trials.loss):
            advice = (
                f"The loss is {findings.loss:.4g}, and {findings.trials.loss:.4g} in float32: make the change, and "
                "keep it if training ends at a lower loss."
            )
        return (
            f"{_difference(findings)}: rounding near zero, as at the end of training. If all arguments change by "
            f"{CHANGE:.0%}, the error is {format_percentage(findings.error_elsewhere)}. {advice} The error begins at "
            f"{place}."
        )
    calls = _calls(findings, site)
    name, limit = f"{site.operation} at {findings.name(site.part.path)}{calls}", site.limit
    if calls:
        name += ","  # after an insertion
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


def _calls(findings: Findings, site: Site) -> str:
    """Returns which calls of the line are wrong, if not all of them are."""
    calls = findings.calls.get(site.part)
    if not calls or calls.site != site:
        return ""
    return f", {'call' if len(calls.numbers) == 1 else 'calls'} {calls.text}"


def _remedy(findings: Findings, cause: Cause, lines: Lines) -> str:
    scales, paths = lines.scales, set(lines.paths)
    operations = {site.operation for site in findings.trials.step.sites if site.part.path in paths}
    is_own = not all(is_installed(path[-1]) for path in paths)
    how = (
        ""
        if not is_own or operations.isdisjoint(MATMULS)
        else ', with precision="highest" where autocast converts a matmul'
    )
    text = f"Compute {findings.names(lines.paths)} in float32{how}: {_promise(findings, scales)}"
    remaining = {part: error for part, error in findings.alone.items() if part.path not in paths}
    is_left = remaining and LARGE_ERROR <= scales.smallest_error < math.inf
    left = _in_packages(findings, lines) + (_largest_part(findings, remaining) if is_left else "")
    if cause.reason is Reason.UNDERFLOW and cause.site in findings.trials.step.in_inner_gradients:
        text = f"{text}. Or scale the gradient that the loss contains: value_and_grad(inner_fn)(scaler, ...)"
    elif cause.reason is Reason.OVERFLOW and not cause.site.part.backward:
        text = f"{text}. Or normalize {'its input' if len(paths) == 1 else 'their inputs'}"
    return f"{text}.{left}{_describe_float32_results(findings)}"


def _promise(findings: Findings, scales: Scales) -> str:
    """Describes the errors and the scales after an edit, with a call if the present scale does not fit then."""
    text = f"then the gradients differ from float32 {_by_gradient(findings, scales.errors_at_best)}"
    if scales.fitting is None:
        return text
    low, high = scales.fitting
    text = f"{text}, and loss scales from {format_scale(2.0**low)} to {format_scale(2.0**high)} fit"
    if low <= math.log2(findings.scale) <= high:
        return text
    call = _scaler_call(findings.config, low, high, may_grow=True)
    return f"{text}; yours is {format_scale(findings.scale)}, so also use {call}"


def _describe_float32_results(findings: Findings) -> str:
    """Offers float32 results of `autocast` if a scale fits then."""
    scales = findings.scales_with_float32_results
    if scales is None or scales.fitting is None:
        return ""
    return f" Or call autocast with result_dtype=jnp.float32, and change no line: {_promise(findings, scales)}."


def _in_packages(findings: Findings, lines: Lines) -> str:
    """Says what to do with lines that the user cannot edit."""
    installed = [path for path in lines.paths if is_installed(path[-1])]
    if not installed:
        return ""
    own = [next((line for line in reversed(path) if not is_installed(line)), "the call") for path in installed]
    calls = _enumerate(list(dict.fromkeys(own)))
    operations = {site.operation for site in findings.trials.step.sites if site.part.path in installed}
    package = "pass the package float32 as its dtype, or copy the function"
    if operations <= MATMULS | {"convert_element_type"}:
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
