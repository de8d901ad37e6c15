"""Finds indices that rounding makes wrong, by comparing integers of the step as it is written with float32."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmpscale._diagnosis.run.modes import Mode, Site
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import DIFFERENT_INDICES
from jmpscale._diagnosis.trace.indices import Conversion, find_conversions
from jmpscale._diagnosis.trace.operations import Path


class WrongIndices(NamedTuple):
    """Integers that are indices, and differ from float32."""

    lines: tuple[str, ...]  # that convert numbers to these integers
    fraction: float  # of the integers that differ
    paths: list[Path]  # the lines that must compute in float32
    error: float  # of the gradients, if these lines do


def find_wrong_indices(trials: GradientTrials, fit: Fit) -> WrongIndices | None:
    """Returns the indices that rounding makes wrong; None if there are none, or gradients are wrong in any case.

    Only the lines that compute the numbers compute as written. If a choice before them differed, such as that of an
    expert by nearly equal scores, all later positions of this expert would differ, too.
    """
    if not fit.is_right or fit.exponent is None or trials.accepted.is_chosen:
        return None
    conversions = find_conversions(trials.whole_program.jaxpr)
    if not conversions:
        return None
    runs = _IntegerRuns(trials, conversions)
    differing = runs.fractions(runs.paths)
    if max(differing.values(), default=0.0) < DIFFERENT_INDICES:
        return None

    def fits(chosen: Sequence[Path]) -> bool:
        fractions = runs.fractions([path for path in runs.paths if path not in chosen])
        return max(fractions.values()) < DIFFERENT_INDICES

    chosen = smallest_set(runs.paths, fits) or []
    paths = [path for path in runs.paths if path in chosen]
    lines = tuple(dict.fromkeys(x.part.path[-1] for x, fraction in differing.items() if fraction >= DIFFERENT_INDICES))
    error = trials.error(trials.kept(paths), Mode.AS_WRITTEN, fit.exponent)
    return WrongIndices(lines, max(differing.values()), paths, error)


class _IntegerRuns:
    """Runs a step in float32 but for some lines, and compares samples of its indices with those in float32."""

    def __init__(self, trials: GradientTrials, conversions: Sequence[Conversion]) -> None:
        self._form = trials.sampling({x.key for x in conversions})
        sources = frozenset().union(*(x.sources for x in conversions))
        self.paths = [path for path in self._form.paths if path[-1] in sources]  # that compute the numbers
        self._reference = self._form.run(1.0, {}, Mode.FLOAT32)[1]

    def fractions(self, paths: Sequence[Path]) -> dict[Site, float]:
        """Returns the fractions of indices that differ if some lines compute as written."""
        modes = {site: Mode.AS_WRITTEN for site in self._form.sites if site.part.path in paths}
        records = self._form.run(1.0, modes, Mode.FLOAT32)[1]
        return {site: float(np.mean(np.not_equal(x, self._reference[site]))) for site, x in records.items()}
