"""Examines a training step: its loss scales, its lines, and why they fail."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jmpscale._diagnosis.fitting_scales import Errors, search
from jmpscale._diagnosis.lines import Reason, Suspects, Trials
from jmpscale._diagnosis.modes import Part
from jmpscale._diagnosis.not_finite import RepairedStep, non_finite
from jmpscale._diagnosis.report import Diagnosis, DiagnosisRow
from jmpscale._diagnosis.step import Step, compile_step
from jmpscale._diagnosis.summary import (
    Findings,
    describe_arguments,
    describe_comparison,
    describe_origin,
    find_advice,
    summarize,
)
from jmpscale._diagnosis.thresholds import SAME_SIZE, SMALL_ERROR, WRONG_ERROR
from jmpscale._state import ScalerState


def examine(
    step: Step,
    scaler: ScalerState,
    gradients: Sequence[str],
    arguments: Sequence[tuple[str, Any]],
    with_float32_results: Callable[[], Step | None],
) -> Diagnosis:
    """Examines a step at the loss scale of a scaler.

    `gradients` are their names, and `arguments` are arrays of the step with their names. `with_float32_results` returns
    the step with float32 results of `autocast`, if it has others.
    """
    scale, run_as_written = float(scaler.loss_scale), compile_step(step)
    outputs = run_as_written(scale)
    names = {id(x): name for name, x in arguments}
    trials = Trials(step, [names.get(id(x), "") for x in step.consts])
    errors, loss_error = trials.compare(outputs)
    findings = Findings(trials, float(outputs[0]), loss_error, errors, scale, scaler.config, tuple(gradients))
    findings = findings._replace(is_new=not (int(scaler.total_skips) or int(scaler.finite_steps)))
    if not trials.measured.are_finite:
        return _diagnosis(findings, _describe_not_finite(findings, RepairedStep(step), arguments))
    present = round(math.log2(scale))

    # A loss that contains a scaled gradient, such as a penalty, may be right at other scales.
    if depends_on_scale := bool(loss_error) and not trials.compare(run_as_written(1.0))[1]:
        findings = findings._replace(loss_error=0.0, errors=errors + math.inf)

    def errors_at(exponent: int) -> Errors:
        if 2.0**exponent == scale:
            return findings.errors
        found, error_of_loss = trials.compare(run_as_written(2.0**exponent))
        return found + math.inf if depends_on_scale and error_of_loss else found

    scales = search(errors_at, trials.forward_errors, present, trials.largest_exponent())
    findings = _explain(findings._replace(scales=scales), present, with_float32_results)
    if findings.lines or findings.error >= SMALL_ERROR:
        findings = findings._replace(alone=trials.errors_alone(round(math.log2(findings.scale_of_rows))))
    findings = findings._replace(suspects=_find_suspects(findings, present), advice=find_advice(findings))
    return _diagnosis(findings, summarize(findings))


def _explain(findings: Findings, present: int, with_float32_results: Callable[[], Step | None]) -> Findings:
    """Adds what explains an error for which no scale is the remedy."""
    trials, scales = findings.trials, findings.scales
    best = present if scales.best is None else scales.best
    # Scales of which one probably fits if the lines that overflow, or underflow, compute in float32.
    exponents, limit = [present, best, trials.largest_exponent() - 2, 0, 24, -12], WRONG_ERROR
    if findings.accurate:
        # An error of rounding may be harmless, but an overflow that changes gradients is a fault.
        exponent = present if findings.scale_fits else best
        error = findings.error if findings.scale_fits else scales.smallest_error
        if error < SMALL_ERROR or not trials.is_wrong_by_overflow(exponent):
            return findings
        exponents, limit = [exponent], error / SAME_SIZE
        findings = findings._replace(overflows=True)
    if not trials.step.sites:
        return findings
    lines = trials.find_lines(exponents, limit)
    finite = math.isfinite(findings.loss) and scales.best is not None
    causes = trials.find_causes(lines, finite=finite) if lines and lines.paths else []
    cause = next(iter(causes), None)
    first = {x.site.part: x for x in reversed(causes)}  # the first cause of each part
    calls = {part: found for part, x in first.items() if lines and (found := trials.find_calls(x, lines))}
    is_rounded = cause and cause.reason is Reason.ROUNDING and finite and not cause.site.part.backward
    elsewhere = trials.forward_error_elsewhere() if is_rounded else math.inf
    form = with_float32_results() if lines and lines.paths else None
    in_form = trials.of(form).find_scales(best) if form else None
    findings = findings._replace(lines=lines, cause=cause, calls=calls, error_elsewhere=elsewhere)
    return findings._replace(scales_with_float32_results=in_form)


def _find_suspects(findings: Findings, present: int) -> Suspects | None:
    """Returns the lines that make most of an error that is in between; at the present scale, or at the best one."""
    best = findings.scales.best
    if not findings.accurate or best is None:
        return None
    if findings.scale_fits:
        is_small = findings.error < SMALL_ERROR
        return None if is_small else findings.trials.find_suspects(findings.alone, present)
    if findings.scales.smallest_error < SMALL_ERROR:
        return None
    return findings.trials.find_suspects(findings.trials.errors_alone(best), best)


def _describe_not_finite(findings: Findings, step: RepairedStep, arguments: Sequence[tuple[str, Any]]) -> str:
    """Describes what makes a step infinite or NaN, in float32 too."""
    if step.is_finite_with_finite_arguments() and (names := non_finite(arguments)):
        return describe_arguments(names)
    return describe_origin(step.origin(), findings.not_entered)


def _diagnosis(findings: Findings, summary: str) -> Diagnosis:
    scales, step = findings.scales, findings.trials.step
    lines = findings.lines.paths if findings.lines else []
    fitting = scales.fitting if findings.trials.decisive.any() else None
    return Diagnosis(
        loss=findings.loss,
        loss_float32=findings.trials.loss,
        gradient_error=findings.error,
        loss_scale=findings.scale,
        fitting_scales=(2.0 ** fitting[0], 2.0 ** fitting[1]) if fitting else None,
        scaler=findings.advice.scaler if findings.advice else None,
        scale_errors=tuple((2.0**k, error) for k, error in scales.errors.items()),
        lines=tuple(findings.name(path, lines) for path in lines),
        rows=tuple(_row(findings, part, part.path in lines) for part in step.parts),
        not_entered=tuple(dict.fromkeys(f"{x.line}: {x.eqn.primitive.name}" for x in findings.trials.not_entered)),
        summary=describe_comparison(findings.not_entered) + summary,
    )


def _row(findings: Findings, part: Part, in_lines: bool) -> DiagnosisRow:
    found = {site: x for site, x in findings.statistics.items() if site.part == part}
    overflowing = [site for site in found if found[site].overflow > 0]
    first = overflowing[0] if overflowing else max(found, key=lambda site: found[site].max_abs)
    return DiagnosisRow(
        line=findings.name(part.path),
        backward=part.backward,
        operation=first.operation,
        dtype=first.dtype.name,
        max_abs=found[first].max_abs,
        overflow=max(x.overflow for x in found.values()),
        underflow=max(x.underflow for x in found.values()),
        in_lines=in_lines,
        calls=findings.calls[part].text if part in findings.calls else "",
        alone=findings.alone.get(part),
    )
