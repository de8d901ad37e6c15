"""Examines a training step: its loss scales, its lines, and why they fail."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jmpscale._diagnosis.fitting_scales import Errors, at_one_scale, search
from jmpscale._diagnosis.lines import Reason, Suspects, Trials
from jmpscale._diagnosis.modal_step import ModalPrograms
from jmpscale._diagnosis.modes import Part
from jmpscale._diagnosis.not_finite import RepairedStep, non_finite
from jmpscale._diagnosis.passes import Pass
from jmpscale._diagnosis.report import Diagnosis, DiagnosisChange, DiagnosisRow
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
from jmpscale._diagnosis.update import Update, examine_update
from jmpscale._diagnosis.update_summary import join
from jmpscale._diagnosis.whole_step import WholeStep
from jmpscale._state import ScalerState, static


def examine(
    whole: WholeStep,
    scaler: ScalerState | None,
    arguments: Sequence[tuple[str, Any]],
    with_float32_results: Callable[[], Step | None],
) -> Diagnosis:
    """Examines a step at the loss scale of a scaler, or at the scale 1 without one.

    `arguments` are arrays of the step with their names. `with_float32_results` returns the step with float32 results of
    `autocast`, if it has others.
    """
    programs = ModalPrograms(whole.step)
    findings = _examine_gradients(whole, programs, scaler, arguments, with_float32_results)
    if not findings.trials.measured.are_finite:
        return _diagnosis(whole, programs, findings, Update(), findings.not_finite)
    best = findings.scales.best
    scale = findings.scale if findings.scale_fits or best is None else 2.0**best
    update = examine_update(programs, whole.results, scale)
    return _diagnosis(whole, programs, findings, update, join(summarize(findings), findings, update, whole))


def _examine_gradients(
    whole: WholeStep,
    programs: ModalPrograms,
    scaler: ScalerState | None,
    arguments: Sequence[tuple[str, Any]],
    with_float32_results: Callable[[], Step | None],
) -> Findings:
    step = whole.step.of_gradients()
    scale, run_as_written = 1.0 if scaler is None else float(scaler.loss_scale), compile_step(step)
    outputs = run_as_written(scale)
    names = {id(x): name for name, x in arguments}
    trials = Trials(programs, [names.get(id(x), "") for x in step.consts], has_scaler=scaler is not None)
    errors, loss_error = trials.compare(outputs)
    findings = Findings(
        trials,
        float(outputs[0]),
        loss_error,
        errors,
        scale,
        (scaler or static(1.0)).config,
        scaler is not None,
        whole.gradients,
        tuple(programs.precision.paths),
    )
    if scaler is not None:
        findings = findings._replace(is_new=not (int(scaler.total_skips) or int(scaler.finite_steps)))
    if not trials.measured.are_finite:
        return findings._replace(not_finite=_describe_not_finite(findings, RepairedStep(step), arguments))
    present = round(math.log2(scale))

    # A loss that contains a scaled gradient, such as a penalty, may be right at other scales.
    if depends_on_scale := bool(loss_error) and not trials.compare(run_as_written(1.0))[1]:
        findings = findings._replace(loss_error=0.0, errors=errors + math.inf)

    def errors_at(exponent: int) -> Errors:
        if 2.0**exponent == scale:
            return findings.errors
        found, error_of_loss = trials.compare(run_as_written(2.0**exponent))
        return found + math.inf if depends_on_scale and error_of_loss else found

    if scaler is None:
        scales = at_one_scale(errors, present)
    else:
        scales = search(errors_at, trials.forward_errors, present, trials.largest_exponent())
    findings = _explain(findings._replace(scales=scales), present, with_float32_results)
    if findings.lines or findings.error >= SMALL_ERROR:
        findings = findings._replace(alone=trials.errors_alone(round(math.log2(findings.scale_of_rows))))
    return findings._replace(suspects=_find_suspects(findings, present), advice=find_advice(findings))


def _explain(findings: Findings, present: int, with_float32_results: Callable[[], Step | None]) -> Findings:
    """Adds what explains an error for which no scale is the remedy."""
    trials, scales = findings.trials, findings.scales
    best = present if scales.best is None else scales.best
    # Scales of which one probably fits if the lines that overflow, or underflow, compute in float32.
    exponents, limit = [present, best, trials.largest_exponent() - 2, 0, 24, -12], WRONG_ERROR
    if not findings.has_scaler:
        exponents = [present]
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


def _diagnosis(
    whole: WholeStep, programs: ModalPrograms, findings: Findings, update: Update, summary: str
) -> Diagnosis:
    scales, step = findings.scales, programs.precision
    chosen = {*(findings.lines.paths if findings.lines else ()), *update.paths}
    lines = [path for path in step.paths if path in chosen]
    fitting = scales.fitting if findings.has_scaler and findings.trials.decisive.any() else None
    return Diagnosis(
        loss=findings.loss if whole.has_loss else None,
        loss_float32=findings.trials.loss if whole.has_loss else None,
        gradient_error=findings.error,
        loss_scale=findings.scale,
        fitting_scales=(2.0 ** fitting[0], 2.0 ** fitting[1]) if fitting else None,
        scaler=findings.advice.scaler if findings.advice else None,
        scale_errors=tuple((2.0**k, error) for k, error in scales.errors.items()),
        lines=tuple(findings.name(path, lines) for path in lines),
        rows=tuple(row for part in step.parts if (row := _row(findings, update, part, part.path in lines))),
        changes=tuple(
            DiagnosisChange(x.result.name, x.result.dtype.name, x.result.old is not None, x.error)
            for x in update.changes
        ),
        state=whole.state,
        not_entered=tuple(dict.fromkeys(f"{x.line}: {x.eqn.primitive.name}" for x in findings.trials.not_entered)),
        kept=whole.kept,
        summary=describe_comparison(findings.not_entered) + summary,
    )


def _row(findings: Findings, update: Update, part: Part, in_lines: bool) -> DiagnosisRow | None:
    """Returns the row of a part; None if it was not measured, because the step is not finite."""
    is_update = part.pass_ is Pass.UPDATE
    statistics, alone = (update.statistics, update.alone) if is_update else (findings.statistics, findings.alone)
    found = {site: x for site, x in statistics.items() if site.part == part}
    if not found and not (is_update and update.changes):
        return None
    if not found:
        return _row_without_range(findings, update, part, in_lines)
    overflowing = [site for site in found if found[site].overflow > 0]
    first = overflowing[0] if overflowing else max(found, key=lambda site: found[site].max_abs)
    return DiagnosisRow(
        line=findings.name(part.path),
        pass_=part.pass_.value,
        operation=first.operation,
        dtype=first.dtype.name,
        max_abs=found[first].max_abs,
        overflow=max(x.overflow for x in found.values()),
        underflow=max(x.underflow for x in found.values()),
        in_lines=in_lines,
        calls=findings.calls[part].text if part in findings.calls else "",
        alone=alone.get(part),
    )


def _row_without_range(findings: Findings, update: Update, part: Part, in_lines: bool) -> DiagnosisRow:
    site, nan = next(site for site in update.sites if site.part == part), math.nan
    names = findings.name(part.path), part.pass_.value, site.operation, site.dtype.name
    return DiagnosisRow(*names, nan, nan, nan, in_lines, update.alone.get(part))
