"""Examines a training step: its loss scales, its lines, why they fail, and its update."""

import math
from collections.abc import Callable

import numpy as np

from jmpscale._diagnosis.run.fitting_scales import Errors, Scales, at_one_scale, largest, search
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.not_finite import RepairTrials
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.advice import Advice, advise
from jmpscale._diagnosis.search.causes import find_casts, find_causes
from jmpscale._diagnosis.search.findings import Findings, SensitiveLoss
from jmpscale._diagnosis.search.lines import Lines, Suspects, find_lines, find_suspects
from jmpscale._diagnosis.search.update import examine_update
from jmpscale._diagnosis.tell.describe_not_finite import describe_not_finite
from jmpscale._diagnosis.tell.report import Diagnosis
from jmpscale._diagnosis.tell.write_report import write_report
from jmpscale._diagnosis.thresholds import DEFAULT, MARGIN, SAME_SIZE, AcceptedErrors
from jmpscale._diagnosis.trace.program import Program
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._state import ScalerState


def examine(
    step: TracedStep,
    scaler: ScalerState | None,
    with_float32_results: Callable[[], Program | None],
    accepted: AcceptedErrors,
) -> Diagnosis:
    """Examines a step at the loss scale of a scaler, or at the scale 1 without one.

    `with_float32_results` returns the program of the step with float32 results of `autocast`, if it has others.
    """
    scale = 1.0 if scaler is None else float(scaler.loss_scale)
    forms, names = Forms(step.program, 1 + len(step.gradients)), step.program.names
    parameters = frozenset(step.gradients).intersection(names) or frozenset(filter(None, names))
    has_scaler = scaler is not None
    may_be_scaled = has_scaler and step.state is not None
    trials = GradientTrials(
        forms,
        parameters,
        accepted,
        has_scaler=has_scaler,
        may_be_scaled=may_be_scaled,
        may_be_halved=scaler is not None and (scaler.config.mode == "dynamic" or scale != 1),
    )
    outputs = trials.run_as_written(scale)
    errors, loss_error = trials.compare(outputs, scale)
    findings = Findings(step, forms, trials, scaler, float(trials.unscaled(outputs, scale)[0]), loss_error, errors)
    if not trials.measured.are_finite:
        text = describe_not_finite(findings, RepairTrials(step.of_gradients))
        return write_report(findings._replace(not_finite=text))
    findings = _with_minimum(_with_scales(findings))
    findings = _with_lines(findings, with_float32_results)
    findings = findings._replace(sensitive_loss=_find_sensitive_loss(findings))
    if findings.lines or findings.error >= accepted.small:
        findings = findings._replace(alone=trials.errors_alone(round(math.log2(findings.scale_of_rows))))
    findings = findings._replace(suspects=_find_suspects(findings), advice=_find_advice(findings))
    best = findings.scales.best
    at = scale if findings.scale_fits or best is None else 2.0**best
    if step.update is not None and step.results:
        given = trials.run_all_as_written(at)[forms.measured :]
        findings = findings._replace(update=examine_update(step.update.with_given(given), step.results, at, accepted))
    return write_report(findings)


def _find_sensitive_loss(findings: Findings) -> SensitiveLoss | None:
    """Returns the error of a loss that is not wrong only because its arguments, if rounded, change it as much.

    If lines must compute in float32, the summary is about them; near a minimum, it has the error already.
    """
    trials = findings.trials
    if findings.lines or findings.is_near_minimum or not trials.loss:
        return None
    error = abs(findings.loss - trials.loss) / abs(trials.loss)
    return SensitiveLoss(error, trials.loss_error_of_rounded_arguments()) if trials.is_ill_conditioned(error) else None


def _with_scales(findings: Findings) -> Findings:
    """Adds the loss scales that fit."""
    trials, scale = findings.trials, findings.scale
    # A loss that contains a scaled gradient, such as a penalty, may be right at other scales.
    if depends_on_scale := bool(findings.loss_error) and not trials.errors_as_written(0)[1]:
        findings = findings._replace(loss_error=0.0, errors=findings.errors + math.inf)

    def errors_at(exponent: int) -> Errors:
        if 2.0**exponent == scale:
            return findings.errors
        found, error_of_loss = trials.errors_as_written(exponent)
        return found + math.inf if depends_on_scale and error_of_loss else found

    expected, largest_error = trials.largest_exponent(), trials.accepted.gradient
    if not findings.has_scaler:
        return findings._replace(scales=at_one_scale(findings.errors, findings.present, largest_error))
    scales = search(errors_at, trials.forward_errors, findings.present, expected, largest_error)
    return findings._replace(scales=scales)


def _with_minimum(findings: Findings) -> Findings:
    """Adds the error after a change of the parameters, if only a minimum of the loss nearby makes the errors large."""
    exponent, accepted = findings.exponent, findings.trials.accepted
    if accepted.is_chosen or exponent is None or findings.error_at_exponent < accepted.small:
        return findings
    error = findings.trials.error_away_from_minimum(exponent)
    if error is None:
        return findings
    scales = at_one_scale(findings.errors, findings.present, math.inf)
    if findings.has_scaler:
        scales = _find_scales_near_minimum(findings, exponent)
    return findings._replace(error_elsewhere=error, scales=scales)


def _find_scales_near_minimum(findings: Findings, exponent: int) -> Scales:
    """Finds the loss scales that fit by the errors of the backward pass alone.

    The forward pass may have an error of 100% at any scale, as a scale has at which all gradients are zero.
    """
    trials, errors = findings.trials, {}
    reference = trials.with_backward_in_float32(exponent)

    def backward_errors_at(exponent: int) -> Errors:
        outputs = trials.run_as_written(2.0**exponent)
        errors[exponent] = trials.compare(outputs, 2.0**exponent)[0]
        return trials.compare(outputs, 2.0**exponent, reference)[0]

    none, expected = np.zeros_like(findings.errors), trials.largest_exponent()
    found = search(backward_errors_at, lambda _: none, findings.present, expected, trials.accepted.gradient)
    at_best = None if found.best is None else errors[found.best]
    return found._replace(errors={k: largest(errors[k]) for k in found.errors}, errors_at_best=at_best, limits=none)


def _with_lines(findings: Findings, with_float32_results: Callable[[], Program | None]) -> Findings:
    """Adds the lines that must compute in float32, if no scale is the remedy, and why."""
    trials, scales = findings.trials, findings.scales
    if findings.is_near_minimum:
        return findings
    best = findings.present if scales.best is None else scales.best
    # Scales of which one probably fits if the lines that overflow, or underflow, compute in float32.
    exponents, limit = [findings.present, best, trials.largest_exponent() - 2, 0, 24, -12], trials.accepted.gradient
    if not findings.has_scaler:
        exponents = [findings.present]
    if findings.accurate:
        # An error of rounding may be harmless, but an overflow that changes gradients is a fault.
        error, exponent = findings.error_at_exponent, findings.exponent
        if error < trials.accepted.small or exponent is None or not trials.is_wrong_by_overflow(exponent):
            return findings
        exponents, limit = [exponent], error / SAME_SIZE
        findings = findings._replace(overflows=True)
    if not trials.program.sites:
        return findings
    lines = find_lines(trials, exponents, limit)
    if lines is None or not lines.paths:
        return findings._replace(lines=lines)
    form = with_float32_results()
    in_form = trials.of(form).find_scales(best) if form else None
    return _with_cause(findings._replace(lines=lines, scales_with_float32_results=in_form), lines)


def _with_cause(findings: Findings, lines: Lines) -> Findings:
    """Adds why lines must compute in float32."""
    trials = findings.trials
    finite = math.isfinite(findings.loss) and findings.scales.best is not None
    causes = find_causes(trials, lines, finite=finite)
    cause = causes[0]
    first = {x.site.part: x for x in reversed(causes)}  # the first cause of each part
    casts = {part: found for part, x in first.items() if (found := find_casts(trials, x, lines))}
    return findings._replace(cause=cause, casts=casts)


def _find_suspects(findings: Findings) -> Suspects | None:
    """Returns the lines that cause most of a moderate error, at the present scale, or at the best one."""
    best = findings.scales.best
    if not findings.accurate or findings.is_near_minimum or best is None:
        return None
    if findings.scale_fits:
        is_small = findings.error < findings.trials.accepted.small
        return None if is_small else find_suspects(findings.trials, findings.alone, findings.present)
    if findings.scales.smallest_error < findings.trials.accepted.small:
        return None
    return find_suspects(findings.trials, findings.trials.errors_alone(best), best)


def _find_advice(findings: Findings) -> Advice | None:
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
        may_grow = findings.is_small or not math.isfinite(findings.error)
        return advise(findings.config, low, high, may_grow=may_grow)
    if lines and not low <= math.log2(findings.scale) <= high:
        return advise(findings.config, low, high)
    with_room = advise(findings.config, low, high, is_first=True)
    if findings.config.mode == "static" or findings.is_new:
        is_near = findings.scale > max(2.0 ** (high - MARGIN), float(with_room.scaler.loss_scale))
        return with_room if is_near else None
    # A dynamic scale that has grown is near the largest one, and backs off. A new run may begin above it.
    return with_room if lines and high - MARGIN < DEFAULT else None
