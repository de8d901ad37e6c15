"""Finds choices for which random numbers in half precision are too coarse.

No comparison shows it, because both runs draw the same numbers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.thresholds import RARE, STANDARD_ERRORS
from jmpscale._diagnosis.trace.choices import Choice


class CoarseChoice(NamedTuple):
    """A choice by random numbers of which too few differ."""

    choice: Choice
    rare: float = 0.0  # the fraction of numbers that are on the rarer side of a threshold


def find_coarse_choices(choices: Sequence[Choice], trials: GradientTrials) -> list[CoarseChoice]:
    """Returns the choices that are wrong.

    Of more candidates than there are different numbers, several have the largest one, and the first of them is chosen.
    If only a few of the different numbers are below a threshold, the probability has a large error.
    """
    selections = [CoarseChoice(x) for x in choices if x.candidates > x.draw.distinct]
    compared = {(x.line, x.operation): x for x in choices if not x.candidates}
    if not compared:
        return selections
    counted = trials.count({key: x.draw.dtype for key, x in compared.items() if x.draw.dtype})
    return [
        *selections,
        *(CoarseChoice(compared[k], x) for k, (x, n) in counted.items() if _is_rare(compared[k], x, n)),
    ]


def _is_rare(choice: Choice, fraction: float, count: float) -> bool:
    """Tests whether a fraction is not zero, and significantly below the fraction that a few different numbers have."""
    return fraction > 0 and fraction + STANDARD_ERRORS * math.sqrt(fraction / count) < RARE / choice.draw.distinct
