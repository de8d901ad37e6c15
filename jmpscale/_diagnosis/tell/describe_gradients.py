"""The sentences about the gradients and the loss scales of a step that is finite in float32."""

import math

from jmpscale._base.text import enumerate_names, format_percentage, format_scale
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.fitting_scales import Errors, largest
from jmpscale._diagnosis.tell.describe_factors import describe_factors
from jmpscale._diagnosis.tell.describe_lines import describe_lines
from jmpscale._diagnosis.tell.phrases import (
    by,
    by_gradient,
    describe_alone,
    describe_edit,
    describe_layers,
    name_of_worst,
    size,
)
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told
from jmpscale._diagnosis.thresholds import CHANGE, MARGIN, NOISE, OTHER_SCALES, TOLERANCE

_COMPARE_A_RUN = "jmpscale.diagnose_run shows whether this error matters."


def describe_gradients(examined: Examined) -> list[Told]:
    """Describes the gradients at the present scale and at others, and the lines that make them wrong."""
    gradients = examined.gradients
    if not gradients:
        return [Told("The step computes no gradient: for the gradients of a loss function, call jmpscale.diagnose.")]
    trials, count = examined.trials, len(examined.step.gradients)
    halved = trials.halved[:count]
    if not halved.any():
        return _describe_others(examined)
    told = [_describe_halved(examined.names_of_gradients(halved))]
    others = trials.is_compared[:count] & ~halved & (trials.measured.norms[1 : 1 + count] > 0)
    return [*told, *_describe_others(examined)] if others.any() else told


def _describe_halved(names: tuple[str, ...]) -> Told:
    """Describes gradients that are unscaled, although the loss scale does not multiply them."""
    text = (
        f"In {enumerate_names(names)}, all values halve if the loss scale doubles: they are unscaled, but not scaled. "
        "If a backward pass returns new values there, such as an amax, name their paths: value_and_grad(..., "
        "overwrite_with_gradient=...). If they are gradients, scale their loss, and multiply the constants of a custom "
        "backward pass by the loss scale."
    )
    return Told(text, DiagnosisFinding(FindingKind.NOT_SCALED, names))


def _describe_others(examined: Examined) -> list[Told]:
    if examined.changes_of_reference is not None:
        lines = [describe_lines(examined, examined.repair)] if examined.repair else []
        return [_describe_reference(examined, examined.changes_of_reference), *lines]
    fit, trials = examined.fit, examined.trials
    if not trials.program.sites and not trials.not_entered:
        return [Told(_describe_no_half(examined))]
    if examined.factors is not None:
        return [describe_factors(examined, examined.factors)]
    if examined.repair is not None:
        told = describe_lines(examined, examined.repair)
        return [_describe_scale(examined, f" Use {examined.advice.call}."), told] if examined.advice else [told]
    if not trials.decisive.any():
        useless = Told(_describe_useless_gradients(examined), DiagnosisFinding(FindingKind.NOT_COMPARED))
        # Another scaler would be based on gradients that are noise.
        return [useless] if fit.scale_fits else [useless, _describe_scale(examined, "")]
    if not fit.scale_fits:
        rounding = _describe_rounding(examined, "At the best scale the gradients", fit.scales.errors_at_best)
        use = f" Use {examined.advice.call}." if examined.advice else ""
        return [_describe_scale(examined, use), Told(rounding)]
    rounding = _describe_rounding(examined, "The gradients", fit.errors)
    if not examined.present.has_scaler:
        return [Told(rounding)]
    scales = f"{_describe_range(examined)}{_describe_margin(examined)}"
    return [Told(f"{scales} {rounding}" if _is_small(examined) else f"{rounding} {scales}")]


def _describe_reference(examined: Examined, changes: Errors) -> Told:
    """Describes gradients that change with the loss scale in float32, too."""
    low, high = (format_scale(2.0**k) for k in OTHER_SCALES)
    text = (
        f"In float32, too, the gradients depend on the loss scale: at {low} and at {high}, they differ "
        f"{by_gradient(examined, changes)}, or more. So no comparison shows which scale is right. The backward pass "
        "may exceed the range of float32, or it may clip or compare scaled values."
    )
    names = examined.names_of_gradients((changes > TOLERANCE)[: len(examined.step.gradients)])
    return Told(text, DiagnosisFinding(FindingKind.NOT_COMPARED, names, error=largest(changes)))


def _describe_no_half(examined: Examined) -> str:
    if not examined.present.has_scaler:
        return f"No part of the gradients is computed in {examined.step.precision}."
    return (
        "No part of the program is computed in half precision, so it needs no loss scale. jmpscale.autocast converts "
        'its matmuls to half precision, except those with precision="highest" and contractions of at most 4 elements.'
    )


def ends_with_small_error(examined: Examined) -> bool:
    """Tests whether the description of the gradients ends with a small error, at the present scale."""
    trials = examined.trials
    has_half = bool(trials.program.sites or trials.not_entered)
    fits = examined.is_accurate and examined.fit.scale_fits and bool(trials.decisive.any())
    is_small = examined.fit.error < trials.accepted.small and not examined.fit.is_near_minimum
    return bool(examined.step.gradients) and has_half and fits and is_small


def _is_small(examined: Examined) -> bool:
    """Tests whether the error is small, or large only because the loss is near a minimum."""
    return examined.fit.is_near_minimum or examined.fit.error < examined.trials.accepted.small


def _describe_rounding(examined: Examined, begin: str, errors: Errors | None) -> str:
    """Describes the error of gradients that may be right: small or moderate."""
    if errors is not None and examined.fit.error_elsewhere is not None:
        minimum = _describe_minimum(examined, examined.fit.error_elsewhere, errors)
        return f"{begin} differ from float32 {minimum}. {_COMPARE_A_RUN}"
    text = f"{begin} differ from float32 {by_gradient(examined, errors)}"
    if errors is None or largest(errors) < examined.trials.accepted.small:
        return f"{text}."
    if examined.wrong_indices:
        return f"{text}."
    text = f"{text}: rounding, which may be harmless."
    if examined.suspects is not None:
        part, alone, paths, remaining = examined.suspects
        layers = describe_layers(examined, part)
        mostly = f", mostly by its operations {layers}" if layers else ""
        edit = f"with {examined.names(paths)} in float32{describe_edit(examined, paths)}, it is {size(remaining)}"
        text = f"{text}{describe_alone(examined, part, alone)}{mostly}; {edit}."
    return f"{text} {_COMPARE_A_RUN}"


def _describe_minimum(examined: Examined, error_elsewhere: float, errors: Errors) -> str:
    """Describes the error of gradients that are small because the loss is near a minimum."""
    trials = examined.trials
    name, loss_error = name_of_worst(examined, errors), abs(examined.fit.loss - trials.loss) / abs(trials.loss or 1.0)
    text = f"{by(largest(errors))}{f', in {name}' if name else ''}"
    loss = f", which differs {by(loss_error)}" if loss_error > trials.accepted.loss else ""
    change = f"{format_percentage(error_elsewhere)} if the parameters change by {CHANGE:.0%}"
    return f"{text} ({change}), near a minimum of the loss{loss}"


def _describe_useless_gradients(examined: Examined) -> str:
    if not examined.trials.measured.norms[1:][examined.trials.is_compared].any():
        where = "the comparison" if examined.not_entered else "float32"
        return (
            f"All gradients are zero, in {where} too. No loss scale changes that. Perhaps a constant, such as 1e-8 or "
            "1e6, is zero or infinite in float16."
        )
    return (
        "The gradients cannot be compared with float32, because they are rounding noise in float32 too: a change of "
        f"the arguments in the last place changes them by more than {NOISE:.0%}. Diagnose a step that still makes "
        "progress."
    )


def _describe_range(examined: Examined) -> str:
    fitting = " to ".join(format_scale(2.0**k) for k in examined.fit.scales.fitting or ())
    name = f" of {examined.present.name}" if examined.present.name else ""
    return f"Loss scales{name} from {fitting} fit; yours is {format_scale(examined.present.scale)}."


def _describe_scale(examined: Examined, remedy: str) -> Told:
    """Describes what happens at the present scale, which does not fit."""
    fit = examined.fit
    what = f"It is too {'small' if fit.is_small else 'large'}: the gradients"
    differ = (
        f"differ from float32 {by_gradient(examined, fit.errors)}" if math.isfinite(fit.error) else "are not finite"
    )
    kind = FindingKind.SMALL_SCALE if fit.is_small else FindingKind.LARGE_SCALE
    wrong = examined.names_of_gradients((fit.errors > fit.scales.limits) & examined.trials.is_compared)
    names = (*filter(None, [examined.present.name]), *wrong)
    scaler = examined.advice.scaler if examined.advice else None
    finding = DiagnosisFinding(kind, names, error=fit.error, error_then=fit.scales.smallest_error, scaler=scaler)
    return Told(f"{_describe_range(examined)} {what} {differ}.{remedy}", finding)


def _describe_margin(examined: Examined) -> str:
    """Names a smaller scale if the present one fits, but could overflow in the next steps."""
    if examined.advice is None:
        return ""
    risk = "gradients can grow in the first steps, which are then skipped"
    if examined.present.config.mode == "static":
        risk = "a static scale does not back off if the gradients grow"
    return f" It is within {MARGIN} bits of the largest one, and {risk}: {examined.advice.call} leaves room."
