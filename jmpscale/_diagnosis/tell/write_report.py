"""Writes the findings of a diagnosis as a `Diagnosis`, with a row for each line and pass."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.fitting_scales import largest
from jmpscale._diagnosis.run.modes import Part, Site, Statistics
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Present
from jmpscale._diagnosis.tell.phrases import named_errors
from jmpscale._diagnosis.tell.report import Diagnosis, DiagnosisChange, DiagnosisRow
from jmpscale._diagnosis.tell.summary import describe_comparison, tell
from jmpscale._diagnosis.tell.told import Told, join
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._state import ScalerState


def write_report(examined: Examined) -> Diagnosis:
    """Returns what was measured as a diagnosis."""
    step, trials, fit, update = examined.step, examined.trials, examined.fit, examined.update
    present, scales = fit.present, fit.scales
    is_compared = trials.decisive.any() and examined.changes_of_reference is None
    fitting = scales.fitting if present.has_scaler and is_compared else None
    told, lines = tell(examined), examined.chosen
    return Diagnosis(
        loss=fit.loss if step.has_loss else None,
        loss_float32=trials.loss if step.has_loss else None,
        gradient_error=max(largest(named_errors(x, x.fit.errors)) for x in (examined, *examined.others)),
        loss_scale=present.scale,
        fitting_scales=(2.0 ** fitting[0], 2.0 ** fitting[1]) if fitting else None,
        scaler=_scaler(examined, told),
        scale_errors=tuple((2.0**k, error) for k, error in scales.errors.items()),
        lines=examined.each_name(lines),
        rows=(*_rows_of_gradients(examined, lines), *_rows_of_update(examined, lines)),
        changes=tuple(DiagnosisChange(x.name, x.result.dtype.name, x.result.is_leaf, x.error) for x in update.changes),
        state=step.state or (),
        not_entered=_not_entered(trials),
        kept=step.kept,
        summary=join(told),
        findings=tuple(x.finding for x in told if x.finding),
    )


def _scaler(examined: Examined, told: Sequence[Told]) -> ScalerState | None:
    """Returns the scaler that helps; of several, one that a finding names, because nothing else says whose it is."""
    found = examined.advice.scaler if examined.advice else None
    return found if not examined.others or any(x.finding and x.finding.scaler is found for x in told) else None


def report_not_finite(step: TracedStep, trials: GradientTrials, present: Present, told: Told) -> Diagnosis:
    """Returns the diagnosis of a step that is infinite or NaN in float32, too."""
    loss, errors = trials.loss_as_written(present.scale), trials.compare(trials.run_as_written(present.scale))[0]
    every = [*describe_comparison(trials.names_not_entered, step.precision), told]
    return Diagnosis(
        loss=loss if step.has_loss else None,
        loss_float32=trials.loss if step.has_loss else None,
        gradient_error=largest(errors),
        loss_scale=present.scale,
        fitting_scales=None,
        scaler=None,
        scale_errors=(),
        lines=(),
        rows=(),
        state=step.state or (),
        not_entered=_not_entered(trials),
        kept=step.kept,
        summary=join(every),
        findings=tuple(x.finding for x in every if x.finding),
    )


def _not_entered(trials: GradientTrials) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{x.line}: {x.eqn.primitive.name}" for x in trials.not_entered))


def _rows_of_gradients(examined: Examined, lines: Collection[Path]) -> Iterator[DiagnosisRow]:
    for part in examined.trials.program.parts:
        if found := {site: x for site, x in examined.statistics.items() if site.part == part}:
            errors = [x.alone[part] for x in (examined, *examined.others) if part in x.alone]
            yield _row(examined, part, part.path in lines, found, max(errors, default=None))


def _rows_of_update(examined: Examined, lines: Collection[Path]) -> Iterator[DiagnosisRow]:
    """Yields rows for the lines of the update; what also belongs to the forward pass has a row if it must change."""
    update = examined.update
    others = set(examined.trials.program.paths).difference(update.paths)
    for part in dict.fromkeys(site.part for site in update.sites if site.part.path not in others):
        if found := {site: x for site, x in update.statistics.items() if site.part == part}:
            yield _row(examined, part, part.path in lines, found, update.alone.get(part))
        else:
            yield _row_without_range(examined, part, part.path in lines)


def _row(
    examined: Examined, part: Part, in_lines: bool, found: Mapping[Site, Statistics], alone: float | None
) -> DiagnosisRow:
    casts = examined.repair.casts if examined.repair else {}
    overflowing = [site for site in found if found[site].overflow > 0]
    first = overflowing[0] if overflowing else max(found, key=lambda site: found[site].max_abs)
    return DiagnosisRow(
        line=examined.name(part.path),
        pass_=part.pass_.value,
        operation=first.operation,
        dtype=first.dtype.name,
        max_abs=found[first].max_abs,
        overflow=max(x.overflow for x in found.values()),
        tiny=max(x.tiny for x in found.values()),
        in_lines=in_lines,
        casts=casts[part].names if part in casts else (),
        alone=alone,
        layers=examined.names_of_layers(part),
    )


def _row_without_range(examined: Examined, part: Part, in_lines: bool) -> DiagnosisRow:
    update = examined.update
    site, nan = next(site for site in update.sites if site.part == part), math.nan
    names = examined.name(part.path), part.pass_.value, site.operation, site.dtype.name
    return DiagnosisRow(*names, nan, nan, nan, in_lines, update.alone.get(part))
