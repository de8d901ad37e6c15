"""Finds what half precision does to the update of a step, and the lines that must compute in float32."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpscale._base.memory import on_device
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modes import Mode, Part, Site, Statistics
from jmpscale._diagnosis.run.scaler_group import LossScales
from jmpscale._diagnosis.run.update_trials import UpdateTrials
from jmpscale._diagnosis.search.counters import Counter, find_counters
from jmpscale._diagnosis.search.not_compared import NotCompared, find_not_compared
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.search.stalled import Stalled, Unchanged, find_stalled, find_unchanged
from jmpscale._diagnosis.thresholds import ALMOST_BAD, AcceptedErrors
from jmpscale._diagnosis.trace.cut import UpdateProgram
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.program import Program, Result
from jmpscale._programs.compile import compiled_when_called


class Update(NamedTuple):
    """What half precision does to the results of a step."""

    changes: tuple[Change, ...] = ()
    paths: tuple[Path, ...] = ()  # the smallest set of lines that must compute in float32
    is_repaired: bool = True  # whether all changes are right if these lines, or all lines, compute in float32
    error_then: float = 0.0  # the largest error of a decisive change that remains
    alone: Mapping[Part, float] = MappingProxyType({})
    statistics: Mapping[Site, Statistics] = MappingProxyType({})
    sites: tuple[Site, ...] = ()  # of the update
    stalled: tuple[Stalled, ...] = ()
    unchanged: Unchanged | None = None
    not_compared: NotCompared = NotCompared()
    counters: tuple[Counter, ...] = ()
    not_finite: tuple[str, ...] = ()  # the names of the leaves that become infinite or NaN in float32, too

    @property
    def all_paths(self) -> list[Path]:
        """The lines with results in half precision."""
        return list(dict.fromkeys(site.part.path for site in self.sites))

    @property
    def bad(self) -> list[Change]:
        return [change for change in self.changes if change.badness > 1]

    @property
    def worst(self) -> Change | None:
        """The change that is named: a leaf in half precision before one in float32, and a leaf before other results."""
        found = self.bad or [change for change in self.changes if change.is_decisive and change.error]
        return max(found, key=_importance) if found else None


def _importance(change: Change) -> tuple[bool, bool, float]:
    return change.is_narrow, change.result.is_leaf, change.error


def examine_update(
    program: UpdateProgram,
    given: Sequence[Any],
    results: Sequence[Result],
    scale: LossScales,
    accepted: AcceptedErrors,
    not_finite: Sequence[str],
) -> Update:
    """Compares the results of a step at its loss scales, and finds the lines that must compute in float32.

    `not_finite` are the names of the other leaves that become infinite or NaN.
    """
    if not results:
        return Update(not_finite=tuple(not_finite))
    trials = UpdateTrials(program, given, results, scale, accepted)
    trials.find_lossless([x.result for x in trials.changes({}) if x.is_narrow and x.badness > 1])
    trials.find_noise([x for x in trials.changes({}) if x.result.is_changed and 1 < x.badness < math.inf])
    changes = trials.changes({})
    paths, is_repaired = _find_lines(trials)
    then = trials.changes(trials.with_lines(paths))
    stalled = tuple(find_stalled(trials))
    known = {x.result.name for x in stalled}
    unchanged = find_unchanged(trials, changes, known)
    known.update(x.name for x in (unchanged.results if unchanged else ()))
    is_large = max((x.badness for x in changes), default=0.0) > ALMOST_BAD
    return Update(
        tuple(changes),
        tuple(paths),
        is_repaired,
        max((x.error for x in then if x.is_decisive), default=0.0),
        trials.errors_alone() if is_large else {},
        _find_statistics(trials.forms, scale),
        tuple(trials.program.sites),
        stalled,
        unchanged,
        find_not_compared(trials, known),
        tuple(find_counters(trials)),
        (*(x.result.name for x in changes if not x.is_finite), *not_finite),
    )


def find_not_finite(program: Program, leaves: Sequence[Result], scale: LossScales) -> list[str]:
    """Returns the names of the leaves, the outputs of a program, that become infinite or NaN, and were not before."""
    if not leaves:
        return []
    olds = [on_device(program.consts[x.input]) for x in leaves if x.input is not None]
    triples = zip(leaves, olds, Forms(program).run_as_written(scale), strict=True)
    return [x.name for x, old, new in triples if bool(_loses_finite(old, new))]


@compiled_when_called
def _loses_finite(old: jax.Array, new: jax.Array) -> jax.Array:
    return (jnp.isfinite(old) & ~jnp.isfinite(new)).any()


def _find_lines(trials: UpdateTrials) -> tuple[list[Path], bool]:
    """Returns a minimal set of lines, and whether all changes are right if these lines compute in float32."""

    def fits(chosen: Sequence[Path]) -> bool:
        return max((x.badness for x in trials.changes(trials.with_lines(chosen))), default=0.0) <= 1

    found = smallest_set(trials.program.paths, fits)
    return ([], False) if found is None else ([path for path in trials.program.paths if path in found], True)


def _find_statistics(forms: Forms, scale: LossScales) -> dict[Site, Statistics]:
    recording = forms.recording
    records = recording.run(scale, {}, Mode.FLOAT32)[1]
    return {site: Statistics(*records[site]) for site in recording.sites if site in records}
