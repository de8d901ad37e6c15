"""Finds the lines that must compute in float32, and those that make most of an error."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jmpscale._diagnosis.run.fitting_scales import Scales
from jmpscale._diagnosis.run.modes import Mode, Modes, Part
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import LARGEST_SET, MOST_SUSPECTS
from jmpscale._diagnosis.trace.operations import Path


class Lines(NamedTuple):
    """A minimal set of lines that must compute in float32, in program order, and what remains if they do."""

    paths: list[Path]
    exponent: int  # of a loss scale that fits then
    scales: Scales
    limit: float  # the largest error that is right

    @property
    def is_minimal(self) -> bool:
        """Whether each line was tried without; the lines of a larger set are not."""
        return len(self.paths) <= LARGEST_SET


class Suspects(NamedTuple):
    """Lines that make most of an error that need not be harmful, the worst one first."""

    part: Part  # with the largest error alone
    alone: float  # this error
    paths: list[Path]
    error: float  # with these lines in float32


def find_lines(trials: GradientTrials, exponents: Sequence[int], limit: float) -> Lines | None:
    """Finds a minimal set of lines that must compute in float32, so that no error exceeds `limit` at a loss scale.

    Returns None if the step is wrong with all lines in float32, too. Of several scales, it is the first one.
    """
    scales = list(dict.fromkeys(exponents))

    def is_right(modes: Modes, exponent: int) -> bool:
        return trials.error(modes, Mode.AS_WRITTEN, exponent) <= limit

    def fits(chosen: Sequence[Path]) -> bool:
        modes = trials.kept(chosen)
        for exponent in scales:
            if is_right(modes, exponent):
                scales.remove(exponent)
                scales.insert(0, exponent)  # it probably fits the next set, too
                return True
        return False

    kept = smallest_set(trials.program.paths, fits)
    if kept is None:
        return None
    exponent = next(k for k in exponents if is_right(trials.kept(kept), k))
    return Lines(kept, exponent, trials.find_scales(exponent, kept), limit)


def find_suspects(trials: GradientTrials, fit: Fit, alone: Mapping[Part, float]) -> Suspects | None:
    """Returns the lines that cause most of a moderate error, at the present scale, or at the best one."""
    best = fit.scales.best
    if not fit.is_right or fit.is_near_minimum or best is None:
        return None
    if fit.scale_fits:
        is_small = fit.error < trials.accepted.small
        return None if is_small else _worst_lines(trials, alone, fit.present.exponent)
    if fit.scales.smallest_error < trials.accepted.small:
        return None
    return _worst_lines(trials, trials.errors_alone(best), best)


def _worst_lines(trials: GradientTrials, alone: Mapping[Part, float], exponent: int) -> Suspects | None:
    """Finds the lines with the largest errors alone: as many as make the error small in float32, if few do."""
    if not alone:
        return None
    parts = sorted(alone, key=lambda part: -alone[part])
    paths = list(dict.fromkeys(part.path for part in parts))
    sets = [paths[:count] for count in range(1, min(MOST_SUSPECTS, len(paths)) + 1)]
    errors = [trials.error(trials.kept(chosen), Mode.AS_WRITTEN, exponent) for chosen in sets]
    found = next((i for i, error in enumerate(errors) if error < trials.accepted.small), 0)
    return Suspects(parts[0], alone[parts[0]], sets[found], errors[found])
