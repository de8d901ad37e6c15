"""The sentences about lines that must compute in float32: the line, the reason and the remedy."""

import math

from jmpscale._base.text import enumerate_names, format_percentage, format_scale
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.fitting_scales import Scales
from jmpscale._diagnosis.run.modes import Site
from jmpscale._diagnosis.search.advice import advise
from jmpscale._diagnosis.search.causes import Cause, Reason
from jmpscale._diagnosis.search.lines import Lines
from jmpscale._diagnosis.search.repair import Repair
from jmpscale._diagnosis.tell.phrases import (
    by,
    by_gradient,
    describe_alone,
    describe_edit,
    describe_layers,
    name_of_worst,
)
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told
from jmpscale._diagnosis.thresholds import LARGEST_SET, MARGIN
from jmpscale._programs.jaxpr import MATMULS
from jmpscale._programs.source import is_installed

_NOT_MINIMAL = f"After the first {LARGEST_SET} lines, not each was tried without: some may need no change"


def describe_lines(examined: Examined, repair: Repair) -> Told:
    """Describes gradients that are wrong at each loss scale, or overflow."""
    if repair.lines is None:
        text = f"{_difference(examined)}, even if all lines compute in float32."
        return Told(text, DiagnosisFinding(FindingKind.ROUNDING, _wrong_names(examined), error=_error(examined)))
    if repair.cause is None:
        return _describe_combined_operations(examined)
    cause = _describe_cause(examined, repair, repair.cause, repair.lines)
    remedy = _remedy(examined, repair, repair.cause, repair.lines)
    finding = DiagnosisFinding(
        _kind(repair.cause),
        (*(filter(None, [examined.present.name]) if examined.advice_then else ()), *_wrong_names(examined)),
        examined.each_name(repair.lines.paths),
        repair.cause.site.dtype.name,
        _error(examined),
        repair.lines.scales.smallest_error,
        examined.advice_then.scaler if examined.advice_then else None,
        examined.names_of_layers(repair.cause.site.part),
    )
    return Told(f"{cause} {remedy}", finding)


def _kind(cause: Cause) -> FindingKind:
    if cause.reason.is_overflow:
        return FindingKind.BACKWARD_OVERFLOW if cause.site.part.backward else FindingKind.FORWARD_OVERFLOW
    return FindingKind.UNDERFLOW if cause.reason is Reason.UNDERFLOW else FindingKind.ROUNDING


def _wrong_names(examined: Examined) -> tuple[str, ...]:
    """Returns the names of the gradients that are wrong at the best scale; all of them if they are not finite."""
    errors = examined.fit.scales.errors_at_best
    if errors is None:
        return examined.gradients
    limit = examined.trials.accepted.gradient
    wrong = examined.names_of_gradients(errors > limit)
    return wrong or (("loss",) if examined.fit.loss_error else (name_of_worst(examined, errors),))


def _error(examined: Examined) -> float:
    fit = examined.fit
    return max(fit.error_at_exponent, fit.loss_error) if fit.scales.best is not None else math.inf


def _describe_combined_operations(examined: Examined) -> Told:
    overflowing = [site.part.path for site, x in examined.statistics.items() if x.overflow and not site.part.backward]
    remedy = "Compute the function in float32."
    if overflowing:
        remedy = f"Compute {examined.names(overflowing)} in float32, whose results overflow, or the whole function."
    text = (
        f"{_difference(examined)}, although the operations are right one at a time: the compiler combines operations, "
        f"such as the products with two constants. {remedy}"
    )
    lines = examined.each_name(overflowing)
    kind = FindingKind.FORWARD_OVERFLOW
    return Told(text, DiagnosisFinding(kind, _wrong_names(examined), lines, error=_error(examined)))


def _describe_cause(examined: Examined, repair: Repair, cause: Cause, lines: Lines) -> str:
    site, statistics = cause.site, examined.statistics[cause.site]
    if cause.reason is Reason.ROUNDING:
        place = examined.names([site.part.path]) + _which(examined, repair, site)
        return f"{_describe_rounded(examined)} The error begins at {place}."
    which = _which(examined, repair, site)
    name, limit = f"{site.operation} at {examined.name(site.part.path)}{which}", site.limit
    if which:
        name += ","  # after an insertion
    if cause.reason is Reason.UNDERFLOW:
        fraction = format_percentage(statistics.tiny)
        what = f"underflows: {name} has {fraction} of its values below the smallest normal number of {site.dtype}"
    elif statistics.max_abs > limit:
        what = (
            f"{cause.reason.value}: {name} reaches {statistics.max_abs:.3g}, and the largest number of {site.dtype} is "
            f"{limit:g}"
        )
    else:
        what = f"{cause.reason.value}: {name} is not finite, although its results fit: a partial sum exceeds {limit:g}"
    if not examined.present.has_scaler:
        return f"The {site.part.pass_.value} pass {what}."
    if examined.trials.program.is_recomputed(site):
        return f"The forward pass, which is computed again, {what}. A loss scale cannot prevent that."
    if site.part.backward:
        name = f" of {examined.present.name}" if examined.present.name else ""
        return f"No loss scale{name} fits. At {format_scale(2.0**lines.exponent)}, the backward pass {what}."
    return f"The forward pass {what}. A loss scale cannot prevent that."


def _describe_rounded(examined: Examined) -> str:
    """Describes an error that neither the range of float32 nor a scale prevents."""
    return f"{_difference(examined)}: rounding, not range."


def _which(examined: Examined, repair: Repair, site: Site) -> str:
    """Returns which of the arguments that a line casts, or of the layers that run it, are wrong, if not all are."""
    casts = repair.casts.get(site.part)
    if casts and casts.site == site:
        return f", in the cast of {enumerate_names(casts.names)}"
    return f", {layers}" if (layers := describe_layers(examined, site.part)) else ""


def _remedy(examined: Examined, repair: Repair, cause: Cause, lines: Lines) -> str:
    """Says what to change: the lines, the scaler, what to do instead, and which other lines to look at."""
    scales = lines.scales
    edit = f"{examined.names(lines.paths)} in float32{describe_edit(examined, lines.paths)}"
    first = f"Compute {edit}: {_promise_of_lines(examined, lines)}"
    if examined.advice_then:
        first = f"{first}{_describe_advice(examined, scales)}"
    minimal = "" if lines.is_minimal else _NOT_MINIMAL
    text = ". ".join(filter(None, [first, _describe_alternative(examined, cause, lines), minimal]))
    near = _describe_near_overflows(examined, lines) if cause.reason.is_overflow else ""
    others = f"{_in_packages(examined, lines)}{_describe_remaining(examined, lines)}"
    return f"{text}.{near}{others}{_describe_float32_results(examined, repair)}"


def _describe_alternative(examined: Examined, cause: Cause, lines: Lines) -> str:
    """Names what removes the cause and leaves the lines in half precision."""
    if cause.reason is Reason.UNDERFLOW and cause.site in examined.trials.program.in_inner_gradients:
        return "Or scale the gradient that the loss contains: value_and_grad(inner_fn)(scaler, ...)"
    if cause.reason.is_overflow and not cause.site.part.backward:
        return f"Or normalize {'its input' if len(lines.paths) == 1 else 'their inputs'}"
    return ""


def _describe_remaining(examined: Examined, lines: Lines) -> str:
    """Names the worst of the other lines if the error is not small after the edit."""
    remaining = {part: error for part, error in examined.alone.items() if part.path not in lines.paths}
    if not remaining or not examined.trials.accepted.small <= lines.scales.smallest_error < math.inf:
        return ""
    return f"{describe_alone(examined, *max(remaining.items(), key=lambda item: item[1]))}."


def _promise_of_lines(examined: Examined, lines: Lines) -> str:
    """Describes the errors and the scales with lines in float32."""
    is_all = not examined.not_entered and set(lines.paths).issuperset(examined.trials.program.paths)
    if is_all and examined.advice_then is None:
        return f"then no part of the gradients is computed in {examined.step.precision}"
    return _promise(examined, lines.scales)


def _promise(examined: Examined, scales: Scales) -> str:
    """Describes the errors and the scales after an edit."""
    text = f"then the gradients differ from float32 {by_gradient(examined, scales.errors_at_best)}"
    if scales.fitting is None or not examined.present.has_scaler:
        return text
    low, high = scales.fitting
    return f"{text}, and loss scales from {format_scale(2.0**low)} to {format_scale(2.0**high)} fit"


def _describe_advice(examined: Examined, scales: Scales) -> str:
    """Names the scaler that the remedy needs, too."""
    low, high = scales.fitting or (0, 0)
    call = examined.advice_then.call if examined.advice_then else ""
    if not examined.present.is_between((low, high)):
        return f"; yours is {format_scale(examined.present.scale)}, so also use {call}"
    if examined.present.is_new or examined.present.config.mode == "static":
        return f"; yours is {format_scale(examined.present.scale)}, and {call} leaves room"
    return f"; begin a new run with {call}"


def _describe_near_overflows(examined: Examined, lines: Lines) -> str:
    """Names other lines of the forward pass whose results nearly overflow: no scale helps if they do so later."""
    near = [
        site.part.path
        for site, x in examined.statistics.items()
        if not site.part.backward and site.part.path not in lines.paths
        if site.dtype.itemsize == 2  # numbers of 8 bits are scaled so that they fill their range
        if not x.overflow and site.limit / 2.0**MARGIN < x.max_abs <= site.limit
    ]
    if not near:
        return ""
    return f" Compute {examined.names(near)} in float32, too: results are within {MARGIN} bits of an overflow."


def _describe_float32_results(examined: Examined, repair: Repair) -> str:
    """Offers float32 results of `autocast` if a scale fits then."""
    scales = repair.scales_with_float32_results
    if scales is None or scales.fitting is None or scales.smallest_error >= examined.trials.accepted.small:
        return ""
    text = f" Or call autocast with result_dtype=jnp.float32, and change no line: {_promise(examined, scales)}"
    low, high = scales.fitting
    if not examined.present.is_between((low, high)):
        yours, call = format_scale(examined.present.scale), advise(examined.present.config, low, high).call
        text = f"{text}; yours is {yours}, so also use {call}"
    return f"{text}."


def _in_packages(examined: Examined, lines: Lines) -> str:
    """Says what to do with lines that the user cannot edit."""
    installed = [path for path in lines.paths if is_installed(path[-1])]
    if not installed:
        return ""
    own = [next((line for line in reversed(path) if not is_installed(line)), "the call") for path in installed]
    calls = enumerate_names(list(dict.fromkeys(own)))
    program = examined.trials.program
    operations = {site.operation for site in program.sites if site.part.path in installed}
    package = "pass the package float32 as its dtype, or copy the function"
    if operations <= MATMULS | {"convert_element_type"} and program.autocast_paths.issuperset(installed):
        package = (
            f'if autocast converts the matmuls, put jax.default_matmul_precision("highest") around {calls}, which '
            f"keeps all matmuls of the call in float32; otherwise {package}"
        )
    return f" In an installed package: {package}."


def _difference(examined: Examined) -> str:
    """Returns the difference from float32 as the beginning of a sentence."""
    if not math.isfinite(examined.fit.loss):
        return f"The loss is {examined.fit.loss}, but in float32 it is {examined.trials.loss:.4g}"
    if examined.fit.scales.best is None:
        where = " at any loss scale" if examined.present.has_scaler else ""
        return f"The gradients are not finite{where}, but are finite in float32"
    if examined.fit.scales.fitting is None:
        return f"The gradients differ from float32 {by_gradient(examined, examined.fit.scales.errors_at_best)}"
    return f"The loss differs from float32 {by(examined.fit.loss_error)}"
