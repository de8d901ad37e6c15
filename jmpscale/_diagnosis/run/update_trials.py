"""Runs a step with other modes, and compares what it returns with float32, apart from its gradients.

A is the step as it is written, B the step whose update alone computes in float32, and C the step in float32. A and B
have the same gradients, so a result to which a gradient leads is compared in A and B, and any other one in A and C.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jmpscale._base.memory import on_device
from jmpscale._diagnosis.run.changes import Change, measure_changes
from jmpscale._diagnosis.run.lossless import ErrorsOfDraws, Values, compare_pair, redraws
from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import Mode, Modes, Part, Site
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import CANCELS, IS_RANDOM, TRIED_ALONE, AcceptedErrors
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.passes import Pass
from jmpscale._diagnosis.trace.program import Program, Result


def in_float32(sites: Iterable[Site], paths: Iterable[Path]) -> dict[Site, Mode]:
    """Returns the modes with which some lines compute in float32."""
    chosen = set(paths)
    return {site: Mode.FLOAT32 for site in sites if site.part.path in chosen}


class UpdateTrials:
    """Runs a step with other modes, and compares its results with their references."""

    def __init__(
        self, program: ModalProgram, results: Sequence[Result], scale: float, accepted: AcceptedErrors
    ) -> None:
        self._program, self._results, self._scale, self._accepted = program, results, scale, accepted
        self._update = {site: Mode.FLOAT32 for site in program.sites if site.part.pass_ is Pass.UPDATE}
        self._reference = self._run_reference()
        self._changes: dict[frozenset[tuple[Site, Any]], list[Change]] = {}
        self._lossless: dict[str, Change] = {}  # by the name of the leaf

    def _run(self, modes: Modes, default: Mode, consts: list[Any] | None = None) -> list[Any]:
        return self._program.run(self._scale, modes, default, consts)[0]

    def _run_reference(self, consts: list[Any] | None = None) -> list[Any]:
        """Returns the results to which a gradient leads from the float32 update, and others from the float32 step."""
        given = self._run(self._update, Mode.AS_WRITTEN, consts)
        all_led = all(x.is_gradient_led for x in self._results)
        whole = given if all_led else self._run({}, Mode.FLOAT32, consts)
        return [x if result.is_gradient_led else y for result, x, y in zip(self._results, given, whole, strict=True)]

    def changes(self, modes: Modes) -> list[Change]:
        """Returns the changes with some modes, and all other operations as written."""
        key = frozenset(modes.items())
        if key not in self._changes:
            changes = measure_changes(self._results, self._run(modes, Mode.AS_WRITTEN), self._reference)
            lossless = [self._lossless.get(x.result.name, x) for x in changes]
            self._changes[key] = [x._replace(accepted=self._accepted) for x in lossless]
        return self._changes[key]

    def find_lossless(self, program: Program) -> None:
        """Finds leaves in half precision whose changes are wrong, but that lose nothing, and accepts their changes."""
        bad = [x for x in self.changes({}) if x.is_narrow and x.badness > 1]
        self._find_pairs([x for x in bad if x.result.partners])
        self._find_random(program, [x for x in bad if x.result.is_random and x.result.name not in self._lossless])
        if self._lossless:
            self._changes.clear()

    def _find_pairs(self, bad: Sequence[Change]) -> None:
        if not bad:
            return
        named = self._values(self._run({}, Mode.AS_WRITTEN), self._reference)
        for change in bad:
            for partner in change.result.partners:
                pair = compare_pair(named[change.result.name], named[partner])
                if pair.cancels < CANCELS and pair.error < self._accepted.narrow_change:
                    self._lossless[change.result.name] = Change(change.result, pair.error)

    def _find_random(self, program: Program, bad: Sequence[Change]) -> None:
        found = {x.result.name: ErrorsOfDraws() for x in bad}
        for consts in redraws(program, self._program.consts) if found else ():
            written, reference = self._run({}, Mode.AS_WRITTEN, consts), self._run_reference(consts)
            named = self._values(written, reference)
            for name, errors in found.items():
                errors.add(named[name])
        for change in bad:
            errors = found[change.result.name]
            if 0 < errors.remains < IS_RANDOM:
                self._lossless[change.result.name] = Change(change.result, errors.error, is_decisive=False)

    def _values(self, written: Sequence[Any], reference: Sequence[Any]) -> dict[str, Values]:
        """Returns the new values of the leaves of the state, by name."""
        found = zip(self._results, written, reference, strict=True)
        return {x.name: Values(y, z, on_device(x.old)) for x, y, z in found if x.old is not None}

    def find_lines(self, sites: Sequence[Site], is_gradient_led: bool) -> list[Path] | None:
        """Finds a minimal set of lines with which no change of the results of one kind is bad."""
        paths = [path for path in self._program.paths if any(site.part.path == path for site in sites)]

        def fits(chosen: Sequence[Path]) -> bool:
            modes = in_float32(sites, chosen)
            found = [x for x in self.changes(modes) if x.result.is_gradient_led == is_gradient_led]
            return max((x.badness for x in found), default=0.0) <= 1

        return smallest_set(paths, fits)

    def errors_alone(self) -> dict[Part, float]:
        """Returns the largest error of a change if one part of the update alone computes as it is written.

        Returns nothing if there are too many parts.
        """

        def error(part: Part) -> float:
            modes = {site: mode for site, mode in self._update.items() if site.part != part}
            led = [x.error for x in self.changes(modes) if x.is_decisive and x.result.is_gradient_led]
            return max(led, default=0.0)

        parts = list(dict.fromkeys(site.part for site in self._update))
        return {part: error(part) for part in parts} if len(parts) <= TRIED_ALONE else {}
