"""Finds what half precision does to the update of a step, and the lines that must compute in float32."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import Mode, Part, Site, Statistics
from jmpscale._diagnosis.run.update_trials import UpdateTrials, in_float32
from jmpscale._diagnosis.thresholds import ALMOST_BAD, AcceptedErrors
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.passes import Pass
from jmpscale._diagnosis.trace.program import Result


class Unchanged(NamedTuple):
    """Leaves with a gradient that do not change, because constants are rounded."""

    results: tuple[Result, ...] = ()
    paths: tuple[Path, ...] = ()  # the lines with these constants
    dtype: np.dtype | None = None  # of the constants


class Update(NamedTuple):
    """What half precision does to the results of a step."""

    changes: tuple[Change, ...] = ()
    paths: tuple[Path, ...] = ()  # the smallest set of lines that must compute in float32
    is_repaired: bool = True  # whether all changes are right if these lines, or all lines, compute in float32
    error_then: float = 0.0  # the largest error of a decisive change that remains
    alone: Mapping[Part, float] = MappingProxyType({})
    statistics: Mapping[Site, Statistics] = MappingProxyType({})
    sites: tuple[Site, ...] = ()  # of the update
    unchanged: Unchanged = Unchanged()

    @property
    def bad(self) -> list[Change]:
        return [change for change in self.changes if change.badness > 1]

    @property
    def worst(self) -> Change | None:
        """The change that is named: a leaf in half precision before one in float32, and a leaf before other results."""
        found = self.bad or [change for change in self.changes if change.is_decisive and change.error]
        return max(found, key=_importance) if found else None


def _importance(change: Change) -> tuple[bool, bool, float]:
    return change.is_narrow, change.result.old is not None, change.error


def examine_update(forms: Forms, results: Sequence[Result], scale: float, accepted: AcceptedErrors) -> Update:
    """Compares the results of a step at a loss scale, and finds the lines that must compute in float32."""
    if not results:
        return Update()
    program = forms.precision.of_results()
    trials = UpdateTrials(program, results, scale, accepted)
    trials.find_lossless(forms.program)
    changes = trials.changes({})
    paths, is_repaired = _find_lines(trials, program)
    then = trials.changes(in_float32(program.sites, paths))
    is_large = max((x.badness for x in changes), default=0.0) > ALMOST_BAD
    return Update(
        tuple(changes),
        tuple(paths),
        is_repaired,
        max((x.error for x in then if x.is_decisive), default=0.0),
        trials.errors_alone() if is_large else {},
        _find_statistics(forms, scale),
        tuple(_of_update(program)),
        _find_unchanged(forms, changes, scale),
    )


def _of_update(program: ModalProgram) -> list[Site]:
    return [site for site in program.sites if site.part.pass_ is Pass.UPDATE]


def _find_lines(trials: UpdateTrials, program: ModalProgram) -> tuple[list[Path], bool]:
    """Returns a minimal set of lines, and whether all changes are right if these lines compute in float32.

    First come the lines of the update, for results to which a gradient leads, and then any lines, for all others.
    """
    chosen: list[Path] = []
    is_repaired = True
    for is_led, sites in ((True, _of_update(program)), (False, program.sites)):
        then = trials.changes(in_float32(program.sites, chosen))
        if any(x.badness > 1 and x.result.is_gradient_led == is_led for x in then):
            found = trials.find_lines(sites, is_led)
            is_repaired &= found is not None
            chosen += [path for path in found or () if path not in chosen]
    return [path for path in program.paths if path in chosen], is_repaired


def _find_statistics(forms: Forms, scale: float) -> dict[Site, Statistics]:
    recording = forms.recording.of_results()
    sites = _of_update(recording)
    records = recording.run(scale, {}, Mode.FLOAT32)[1] if sites else {}
    return {site: Statistics(*records[site]) for site in sites if site in records}


def _find_unchanged(forms: Forms, changes: Sequence[Change], scale: float) -> Unchanged:
    """Finds leaves that do not change, but do if constants in half precision have other last digits.

    The reference has the constants of the program, so no comparison shows that one of them is rounded, as 0.999 is to 1
    in the bias correction of an average.
    """
    leaves = [i for i, x in enumerate(changes) if x.is_zero and x.result.old is not None and x.result.is_gradient_led]
    if not leaves:
        return Unchanged()
    program = forms.constants.of_results()

    def changed_by(sites: Iterable[Site]) -> list[int]:
        outputs = program.run(scale, dict.fromkeys(sites, Mode.PERTURBED), Mode.FLOAT32)[0]
        return [i for i in leaves if not bool((outputs[i] == on_device(changes[i].result.old)).all())]

    found = [site for site in program.sites if changed_by([site])] if changed_by(program.sites) else []
    which = changed_by(found) if found else []
    results = tuple(changes[i].result for i in which)
    return Unchanged(results, tuple(dict.fromkeys(x.part.path for x in found)), found[0].dtype if which else None)
