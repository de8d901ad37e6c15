"""Finds the smallest set of lines, or of anything else, for which a condition holds."""

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

from jmpscale._diagnosis.thresholds import LARGEST_SET

_T = TypeVar("_T")


def smallest_set(items: Sequence[_T], fits: Callable[[Sequence[_T]], bool]) -> list[_T] | None:
    """Returns items that fit together, and do not fit without any one of them; None if all of them do not fit.

    Any superset of a set that fits must fit. It takes about `k log2(n)` calls for k of n items. If there are more than
    `LARGEST_SET` of them, the set also has all items after them.
    """
    if not fits(items):
        return None
    kept: list[_T] = []
    start = 0
    while not fits(kept):
        if len(kept) == LARGEST_SET:
            return [*kept, *items[start:]]
        # Without the items below the new start the rest does not fit, and with the last of them it does.
        places = range(len(items))
        start = bisect.bisect_left(places, True, start, key=lambda i: not fits([*kept, *items[i:]]))
        kept.append(items[start - 1])
    return kept
