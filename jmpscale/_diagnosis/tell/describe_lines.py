"""The sentences about lines that must compute in float32: the line, the reason and the remedy."""

import math

from jmpscale._base.text import enumerate_names, format_percentage, format_scale
from jmpscale._diagnosis.run.fitting_scales import Scales
from jmpscale._diagnosis.run.modes import Site
from jmpscale._diagnosis.search.advice import advise
from jmpscale._diagnosis.search.causes import Cause, Reason
from jmpscale._diagnosis.search.findings import Findings
from jmpscale._diagnosis.search.lines import Lines
from jmpscale._diagnosis.tell.phrases import by, by_gradient, describe_alone, describe_edit
from jmpscale._diagnosis.thresholds import LARGEST_SET, MARGIN
from jmpscale._programs.jaxpr import MATMULS
from jmpscale._programs.source import is_installed

_NOT_MINIMAL = f"After the first {LARGEST_SET} lines, not each was tried without: some may need no change"


def describe_lines(findings: Findings) -> str:
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
        place = findings.names([site.part.path]) + _casts(findings, site)
        return f"{_describe_rounded(findings)} The error begins at {place}."
    casts = _casts(findings, site)
    name, limit = f"{site.operation} at {findings.name(site.part.path)}{casts}", site.limit
    if casts:
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
    if not findings.has_scaler:
        return f"The {site.part.pass_.value} pass {what}."
    if findings.trials.program.is_recomputed(site):
        return f"The forward pass, which is computed again, {what}. A loss scale cannot prevent that."
    if site.part.backward:
        return f"No loss scale fits. At {format_scale(2.0**lines.exponent)}, the backward pass {what}."
    return f"The forward pass {what}. A loss scale cannot prevent that."


def _describe_rounded(findings: Findings) -> str:
    """Describes an error that neither the range of float32 nor a scale prevents."""
    return f"{_difference(findings)}: rounding, not range."


def _casts(findings: Findings, site: Site) -> str:
    """Returns which of the arguments that a line casts are wrong, if not all of them are."""
    casts = findings.casts.get(site.part)
    return f", in the cast of {enumerate_names(casts.names)}" if casts and casts.site == site else ""


def _remedy(findings: Findings, cause: Cause, lines: Lines) -> str:
    """Says what to change: the lines, the scaler, what to do instead, and which other lines to look at."""
    scales = lines.scales
    edit = f"{findings.names(lines.paths)} in float32{describe_edit(findings, lines.paths)}"
    first = f"Compute {edit}: {_promise_of_lines(findings, lines)}"
    if not findings.has_scaler and cause.reason is Reason.UNDERFLOW and cause.site.part.backward:
        how = "with jmpscale.value_and_grad and a scaler, or by a larger number if it is scaled already"
        first = f"Scale the loss, {how}. Or c{first[1:]}"
    if findings.advice:
        first = f"{first}{_describe_advice(findings, scales)}"
    minimal = "" if lines.is_minimal else _NOT_MINIMAL
    text = ". ".join(filter(None, [first, _describe_alternative(findings, cause, lines), minimal]))
    near = _describe_near_overflows(findings, lines) if cause.reason.is_overflow else ""
    others = f"{_in_packages(findings, lines)}{_describe_remaining(findings, lines)}"
    return f"{text}.{near}{others}{_describe_float32_results(findings)}"


def _describe_alternative(findings: Findings, cause: Cause, lines: Lines) -> str:
    """Names what removes the cause and leaves the lines in half precision."""
    if cause.reason is Reason.UNDERFLOW and cause.site in findings.trials.program.in_inner_gradients:
        return "Or scale the gradient that the loss contains: value_and_grad(inner_fn)(scaler, ...)"
    if cause.reason.is_overflow and not cause.site.part.backward:
        return f"Or normalize {'its input' if len(lines.paths) == 1 else 'their inputs'}"
    return ""


def _describe_remaining(findings: Findings, lines: Lines) -> str:
    """Names the worst of the other lines if the error is not small after the edit."""
    remaining = {part: error for part, error in findings.alone.items() if part.path not in lines.paths}
    if not remaining or not findings.trials.accepted.small <= lines.scales.smallest_error < math.inf:
        return ""
    return f"{describe_alone(findings, *max(remaining.items(), key=lambda item: item[1]))}."


def _promise_of_lines(findings: Findings, lines: Lines) -> str:
    """Describes the errors and the scales with lines in float32."""
    is_all = not findings.not_entered and set(lines.paths).issuperset(findings.trials.program.paths)
    if is_all and findings.advice is None:
        return "then the gradients have no result in half precision"
    return _promise(findings, lines.scales)


def _promise(findings: Findings, scales: Scales) -> str:
    """Describes the errors and the scales after an edit."""
    text = f"then the gradients differ from float32 {by_gradient(findings, scales.errors_at_best)}"
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
        if site.dtype.itemsize == 2  # numbers of 8 bits are scaled so that they fill their range
        if not x.overflow and site.limit / 2.0**MARGIN < x.max_abs <= site.limit
    ]
    if not near:
        return ""
    return f" Compute {findings.names(near)} in float32, too: results are within {MARGIN} bits of an overflow."


def _describe_float32_results(findings: Findings) -> str:
    """Offers float32 results of `autocast` if a scale fits then."""
    scales = findings.scales_with_float32_results
    if scales is None or scales.fitting is None or scales.smallest_error >= findings.trials.accepted.small:
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
    program = findings.trials.program
    operations = {site.operation for site in program.sites if site.part.path in installed}
    package = "pass the package float32 as its dtype, or copy the function"
    if operations <= MATMULS | {"convert_element_type"} and program.autocast_paths.issuperset(installed):
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
        return f"The gradients differ from float32 {by_gradient(findings, findings.scales.errors_at_best)}"
    return f"The loss differs from float32 {by(findings.loss_error)}"
