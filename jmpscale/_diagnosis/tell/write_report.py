"""Writes the findings of a diagnosis as a `Diagnosis`, with a row for each line and pass."""

import math
from collections.abc import Collection, Iterator, Mapping

from jmpscale._diagnosis.run.modes import Part, Site, Statistics
from jmpscale._diagnosis.search.findings import Findings
from jmpscale._diagnosis.tell.report import Diagnosis, DiagnosisChange, DiagnosisRow
from jmpscale._diagnosis.tell.summary import summarize
from jmpscale._diagnosis.trace.operations import Path


def write_report(findings: Findings) -> Diagnosis:
    """Returns the findings as a diagnosis."""
    step, update, scales, program = findings.step, findings.update, findings.scales, findings.forms.precision
    chosen = {*(findings.lines.paths if findings.lines else ()), *update.paths}
    every = dict.fromkeys([*program.paths, *update.all_paths])
    lines = [path for path in every if path in chosen]
    fitting = scales.fitting if findings.has_scaler and findings.trials.decisive.any() else None
    return Diagnosis(
        loss=findings.loss if step.has_loss else None,
        loss_float32=findings.trials.loss if step.has_loss else None,
        gradient_error=findings.error,
        loss_scale=findings.scale,
        fitting_scales=(2.0 ** fitting[0], 2.0 ** fitting[1]) if fitting else None,
        scaler=findings.advice.scaler if findings.advice else None,
        scale_errors=tuple((2.0**k, error) for k, error in scales.errors.items()),
        lines=tuple(findings.name(path, lines) for path in lines),
        rows=(*_rows_of_gradients(findings, lines), *_rows_of_update(findings, lines)),
        changes=tuple(
            DiagnosisChange(x.result.name, x.result.dtype.name, x.result.is_leaf, x.error) for x in update.changes
        ),
        state=step.state or (),
        not_entered=tuple(dict.fromkeys(f"{x.line}: {x.eqn.primitive.name}" for x in findings.trials.not_entered)),
        kept=step.kept,
        summary=summarize(findings),
    )


def _rows_of_gradients(findings: Findings, lines: Collection[Path]) -> Iterator[DiagnosisRow]:
    for part in findings.trials.program.parts:
        if found := {site: x for site, x in findings.statistics.items() if site.part == part}:
            yield _row(findings, part, part.path in lines, found, findings.alone.get(part))


def _rows_of_update(findings: Findings, lines: Collection[Path]) -> Iterator[DiagnosisRow]:
    """Yields rows for the lines of the update; what also belongs to the forward pass has a row if it must change."""
    update = findings.update
    others = set(findings.trials.program.paths).difference(update.paths)
    for part in dict.fromkeys(site.part for site in update.sites if site.part.path not in others):
        if found := {site: x for site, x in update.statistics.items() if site.part == part}:
            yield _row(findings, part, part.path in lines, found, update.alone.get(part))
        else:
            yield _row_without_range(findings, part, part.path in lines)


def _row(
    findings: Findings, part: Part, in_lines: bool, found: Mapping[Site, Statistics], alone: float | None
) -> DiagnosisRow:
    overflowing = [site for site in found if found[site].overflow > 0]
    first = overflowing[0] if overflowing else max(found, key=lambda site: found[site].max_abs)
    return DiagnosisRow(
        line=findings.name(part.path),
        pass_=part.pass_.value,
        operation=first.operation,
        dtype=first.dtype.name,
        max_abs=found[first].max_abs,
        overflow=max(x.overflow for x in found.values()),
        tiny=max(x.tiny for x in found.values()),
        in_lines=in_lines,
        casts=findings.casts[part].names if part in findings.casts else (),
        alone=alone,
    )


def _row_without_range(findings: Findings, part: Part, in_lines: bool) -> DiagnosisRow:
    update = findings.update
    site, nan = next(site for site in update.sites if site.part == part), math.nan
    names = findings.name(part.path), part.pass_.value, site.operation, site.dtype.name
    return DiagnosisRow(*names, nan, nan, nan, in_lines, update.alone.get(part))
