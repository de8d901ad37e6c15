"""The sentences about the gradients and the loss scales of a step that is finite in float32."""

import itertools
import math
from collections.abc import Sequence

from jmpscale._base.text import enumerate_names, format_percentage, format_scale
from jmpscale._diagnosis.run.fitting_scales import Errors, largest
from jmpscale._diagnosis.search.findings import Findings
from jmpscale._diagnosis.tell.describe_lines import describe_lines
from jmpscale._diagnosis.tell.phrases import by, by_gradient, describe_alone, describe_edit, name_of_worst
from jmpscale._diagnosis.thresholds import CHANGE, MARGIN, NOISE


def describe_gradients(findings: Findings) -> str:
    """Describes the gradients at the present scale and at others, and the lines that make them wrong."""
    if not findings.step.gradients:
        return "The step computes no gradient: for the gradients of a loss function, call jmpscale.diagnose."
    names = list(itertools.compress(findings.step.gradients, findings.trials.halved))
    others = _describe_others(findings) if len(names) < len(findings.step.gradients) else ""
    return " ".join(filter(None, [_describe_halved(names), others]))


def _describe_halved(names: Sequence[str]) -> str:
    """Describes gradients that are unscaled, although the loss scale does not multiply them; nothing without names."""
    if not names:
        return ""
    return (
        f"In {enumerate_names(names)}, all values halve if the loss scale doubles: they are unscaled, but not scaled. "
        "If a backward pass returns new values there, such as an amax, name their paths: value_and_grad(..., "
        "overwrite_with_gradient=...). If they are gradients, scale their loss, and multiply the constants of a custom "
        "backward pass by the loss scale."
    )


def _describe_others(findings: Findings) -> str:
    if not findings.trials.program.sites and not findings.trials.not_entered:
        if not findings.has_scaler:
            return "The gradients have no result in half precision."
        return (
            "The program has no result in half precision, and needs no loss scale. jmpscale.autocast converts its "
            'matmuls to half precision, except those with precision="highest" and contractions of at most 4 elements.'
        )
    if not findings.accurate:
        return describe_lines(findings)
    if not findings.trials.decisive.any():
        if findings.scale_fits:
            return _describe_useless_gradients(findings)
        # The call would be based on gradients that are noise.
        return f"{_describe_useless_gradients(findings)} {_describe_range(findings)} {_describe_scale(findings)}"
    if not findings.scale_fits:
        rounding = _describe_rounding(findings, "At the best scale the gradients", findings.scales.errors_at_best)
        use = f"Use {findings.advice.call}. " if findings.advice else ""
        return f"{_describe_range(findings)} {_describe_scale(findings)} {use}{rounding}"
    rounding = _describe_rounding(findings, "The gradients", findings.errors)
    if not findings.has_scaler:
        return rounding
    scales = f"{_describe_range(findings)}{_describe_margin(findings)}"
    return f"{scales} {rounding}" if _is_small(findings) else f"{rounding} {scales}"


def ends_with_small_error(findings: Findings) -> bool:
    """Tests whether the description of the gradients ends with a small error, at the present scale."""
    has_half = bool(findings.trials.program.sites or findings.trials.not_entered)
    fits = findings.accurate and findings.scale_fits and bool(findings.trials.decisive.any())
    return bool(findings.step.gradients) and has_half and fits and _is_small(findings)


def _is_small(findings: Findings) -> bool:
    """Tests whether the error is small, or large only because the loss is near a minimum."""
    return findings.is_near_minimum or findings.error < findings.trials.accepted.small


def _describe_rounding(findings: Findings, begin: str, errors: Errors | None) -> str:
    """Describes the error of gradients that may be right: small or moderate."""
    if errors is not None and findings.error_elsewhere is not None:
        return f"{begin} differ from float32 {_describe_minimum(findings, findings.error_elsewhere, errors)}."
    text = f"{begin} differ from float32 {by_gradient(findings, errors)}"
    if errors is None or largest(errors) < findings.trials.accepted.small:
        return f"{text}."
    text = f"{text}: rounding, which may be harmless."
    if findings.suspects is None:
        return f"{text} Compare a short run with one in float32."
    part, alone, paths, remaining = findings.suspects
    names = findings.names(paths)
    these = "this line" if len(paths) == 1 else "these lines"
    return (
        f"{text}{describe_alone(findings, part, alone)}; with {names} in float32, {by(remaining)}. Compare a short run "
        f"with {these} in float32{describe_edit(findings, paths)}, and keep the change if its loss is lower."
    )


def _describe_minimum(findings: Findings, error_elsewhere: float, errors: Errors) -> str:
    """Describes the error of gradients that are small because the loss is near a minimum."""
    trials = findings.trials
    name, loss_error = name_of_worst(findings, errors), abs(findings.loss - trials.loss) / abs(trials.loss or 1.0)
    text = f"{by(largest(errors))}{f', in {name}' if name else ''}"
    loss = f", which differs {by(loss_error)}" if loss_error > trials.accepted.loss else ""
    change = f"{format_percentage(error_elsewhere)} if the parameters change by {CHANGE:.0%}"
    return f"{text} ({change}), near a minimum of the loss{loss}"


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


def _describe_range(findings: Findings) -> str:
    fitting = " to ".join(format_scale(2.0**k) for k in findings.scales.fitting or ())
    return f"Loss scales from {fitting} fit; yours is {format_scale(findings.scale)}."


def _describe_scale(findings: Findings) -> str:
    """Describes what happens at the present scale, which does not fit."""
    what = f"It is too {'small' if findings.is_small else 'large'}: the gradients"
    if not math.isfinite(findings.error):
        return f"{what} are not finite."
    return f"{what} differ from float32 {by_gradient(findings, findings.errors)}."


def _describe_margin(findings: Findings) -> str:
    """Names a smaller scale if the present one fits, but could overflow in the next steps."""
    if findings.advice is None:
        return ""
    risk = "gradients can grow in the first steps, which are then skipped"
    if findings.config.mode == "static":
        risk = "a static scale does not back off if the gradients grow"
    return f" It is within {MARGIN} bits of the largest one, and {risk}: {findings.advice.call} leaves room."
