"""Decides what is wrong with a run. Its tuned numbers are here, each with its reason.

`benchmarks.studies.runs` has a record of healthy runs and of faults.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._run.run import LeafOfRun, Measured

# The end of a run, whose mean loss depends little on single batches.
_END = 0.2
# The part of float32's decrease of the loss that may be missing. Healthy runs miss at most 3%, and faults at least 6%,
# unless only leaves show them.
_LOST_PROGRESS = 0.05
# The same relative to the loss at the end, below which the losses are the same, whatever the decrease.
_SAME_LOSS = 0.01
# A loss is near a minimum if it differs from float32 by less than this part of what a change of the state by 10% makes.
_NEAR_MINIMUM = 0.1
# The part of a leaf's change that may be missing. Healthy leaves miss at most 21%, faulty ones at least 38%.
_LOST_CHANGE = 0.25
# A leaf is chance if its change, or its value, differs by more than this in a run from a state that is rounded
# otherwise. The values of leaves that hold what rounding removes, as in Kahan summation, do.
_CHANCE_OF_LEAF = 0.3
# How many times as large as chance a difference must be: one run from a state that is rounded otherwise may be near by
# chance. Late in training, averages of gradients that are nearly zero are rounding in half precision. They have not
# fallen behind if so many steps from a state nearby move them as far.
_BEYOND_CHANCE = 4.0


class Losses(NamedTuple):
    """The loss of a run beside float32."""

    start: float  # in float32
    ends: tuple[float, float, float]  # as written, in float32, and in float32 from a state that is rounded otherwise
    chance: float  # how far the losses of the runs in float32 are apart
    noise: float  # how much the loss in float32 changes from batch to batch
    nearby: float  # how much a change of the last state in float32 by 10% increases the loss; NaN if it is not finite

    @property
    def missing(self) -> float:
        """How much larger the loss is than in float32."""
        return self.ends[0] - self.ends[1]

    @property
    def decrease(self) -> float:
        return self.start - self.ends[1]

    @property
    def makes_progress(self) -> bool:
        """Whether the loss clearly falls in float32."""
        return self.decrease > max(2 * self.noise, self.chance, _SAME_LOSS * abs(self.ends[1]))

    @property
    def progress(self) -> float | None:
        """The decrease relative to float32; None if float32 makes no clear progress."""
        return 1 - self.missing / self.decrease if self.makes_progress else None

    @property
    def error(self) -> float:
        """What is missing, relative to the decrease in float32 or, if there is none, to the loss."""
        return self.missing / (self.decrease if self.makes_progress else abs(self.ends[1]) or 1.0)

    @property
    def is_wrong(self) -> bool:
        chance = self.chance if self.makes_progress else max(self.chance, self.noise)
        limits = [_BEYOND_CHANCE * chance, _SAME_LOSS * abs(self.ends[1]), _NEAR_MINIMUM * self.nearby]
        return self.missing > np.nanmax(limits) and self.error > _LOST_PROGRESS


def measure_losses(measured: Measured) -> Losses | None:
    """Returns the loss of a run; None if there is none, or if it is not finite at the end of one of the runs."""
    losses = measured.losses
    if not losses.size or not_finite_at_end(losses):
        return None
    count = _count_at_end(losses)
    written, float32, otherwise = (_mean(x[-count:]) for x in losses)
    stops = range(losses.shape[1], losses.shape[1] // 2, -count)
    windows = [slice(max(0, stop - count), stop) for stop in stops]
    chance = np.nanmax([abs(_mean(losses[2, window]) - _mean(losses[1, window])) for window in windows])
    differences = np.diff(losses[1, -count:])
    noise = float(np.nanstd(differences)) / math.sqrt(2) if np.isfinite(differences).any() else 0.0
    start = float(losses[1][np.isfinite(losses[1])][0])
    nearby = measured.loss_nearby - losses[1, -1]
    return Losses(
        start, (written, float32, otherwise), float(chance), noise, nearby if np.isfinite(nearby) else math.nan
    )


def not_finite_at_end(losses: np.ndarray) -> list[int]:
    """Returns the runs whose loss is infinite or NaN at the end; single steps may be skipped."""
    return [i for i, x in enumerate(losses) if not np.isfinite(x[-_count_at_end(losses) :]).any()]


def _count_at_end(losses: np.ndarray) -> int:
    return math.ceil(_END * losses.shape[1])


def _mean(losses: np.ndarray) -> float:
    finite = losses[np.isfinite(losses)]
    return float(finite.mean()) if finite.size else math.nan


def find_wrong(measured: Measured, losses: Losses | None) -> tuple[DiagnosisFinding, ...]:
    """Returns what is wrong with a run."""
    name = measured.traced.loss[1] if measured.traced.loss else ""
    found: list[DiagnosisFinding] = []
    if names := _not_finite(measured, name):
        found.append(DiagnosisFinding(FindingKind.NOT_FINITE, tuple(names), (), None, math.inf, None))
    if losses and losses.is_wrong:
        found.append(DiagnosisFinding(FindingKind.LOST_PROGRESS, (name,), (), None, losses.error, None))
    return (*found, *_wrong_changes(measured.leaves))


def _not_finite(measured: Measured, name: str) -> list[str]:
    """Returns the names of the loss and of the leaves that are finite in float32 only, at the end of the run."""
    names = [x.leaf.name for x in measured.leaves if not x.written.is_finite and x.written.is_finite_in_reference]
    is_lost = bool(measured.losses.size) and not_finite_at_end(measured.losses) == [0]
    return [name, *names] if is_lost else names


def _wrong_changes(leaves: Sequence[LeafOfRun]) -> list[DiagnosisFinding]:
    """Returns a finding for the leaves of each dtype, first those in half precision."""
    wrong = sorted(filter(_is_wrong, leaves), key=lambda x: (not is_narrow(x.leaf.value), -x.missing))
    groups: dict[str, list[LeafOfRun]] = {}
    for x in wrong:
        groups.setdefault(str(x.leaf.value.dtype), []).append(x)
    return [
        DiagnosisFinding(FindingKind.LAGGING, tuple(x.leaf.name for x in group), (), dtype, group[0].missing, None)
        for dtype, group in groups.items()
    ]


def _is_wrong(x: LeafOfRun) -> bool:
    written, spread = x.written, x.spread
    if not (written.is_decisive and written.is_finite and written.is_finite_in_reference):
        return False
    is_chance = max(spread.error, x.spread_of_value) > _CHANCE_OF_LEAF
    is_behind = x.missing > max(_LOST_CHANGE, _BEYOND_CHANCE * abs(1 - spread.progress))
    return is_behind and not is_chance and written.error > _BEYOND_CHANCE * x.step
