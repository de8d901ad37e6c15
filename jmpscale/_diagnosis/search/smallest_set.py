"""Finds the smallest set of lines, or of anything else, for which a condition holds."""

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

from jmpscale._diagnosis.thresholds import LARGEST_SET

_T = TypeVar("_T")


def smallest_set(items: Sequence[_T], fits: Callable[[Sequence[_T]], bool]) -> list[_T] | None:
    """Returns items that fit together, and do not fit without any one of them; None if all of them do not fit.

    It takes about `k log2(n)` calls for k of n items, if any superset of a set that fits does. Errors can cancel, so
    that a superset does not: therefore the items of the set, and each half of it, are tried alone, too. If there are
    more than `LARGEST_SET` of them, the set also has all items after them.
    """
    if not fits(items):
        return None
    found = _grown(items, fits)
    while smaller := next((part for part in _parts(found) if fits(part)), None):
        found = smaller
    return found


def _parts(items: list[_T]) -> list[list[_T]]:
    """Returns the items of a set that is not large, and its halves, and what remains of it without an item."""
    if not 1 < len(items) <= LARGEST_SET:
        return []
    middle = len(items) // 2
    without = [items[:i] + items[i + 1 :] for i in range(len(items))]
    return [*([x] for x in items), items[:middle], items[middle:], *without]


def _grown(items: Sequence[_T], fits: Callable[[Sequence[_T]], bool]) -> list[_T]:
    """Returns a set that fits, to which items were added one by one."""
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
