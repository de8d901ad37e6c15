"""Finds why lines must compute in float32: where the error begins, and whether it is range or rounding."""

import enum
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jmpscale._diagnosis.run.modes import Mode, Site
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.lines import Lines
from jmpscale._diagnosis.thresholds import MOST_NAMED, SAME_SIZE

Groups = Sequence[Collection[int]]  # the numbers of operations of a site, each of them once


class Reason(enum.Enum):
    """Why a result must be computed in float32."""

    OVERFLOW = "overflows"
    OVERFLOW_AND_ROUNDING = "overflows and loses precision"
    UNDERFLOW = "underflows"
    ROUNDING = "loses precision"

    @property
    def is_overflow(self) -> bool:
        return self in (Reason.OVERFLOW, Reason.OVERFLOW_AND_ROUNDING)


class Cause(NamedTuple):
    """Where an error begins, and why."""

    site: Site
    reason: Reason


class WrongCasts(NamedTuple):
    """The arguments whose casts are wrong alone, of a line that casts several, such as a tree of parameters."""

    site: Site
    names: tuple[str, ...]  # of the arguments, such as `params['w']`


def find_causes(trials: GradientTrials, lines: Lines, *, finite: bool) -> list[Cause]:
    """Finds where an error begins, and the reason, by computing only one result of the lines as it is written.

    The first cause has the largest error, or is the first one of several with errors of this size.

    If the range of float32 makes the error much smaller, with the precision as written, the result overflows or
    underflows. Rounding is the reason for an error that is not `finite` only if nothing else is.
    """
    kept = trials.kept(lines.paths)
    statistics = trials.statistics(2.0**lines.exponent)

    def error(site: Site, mode: Mode) -> float:
        return trials.error(kept | {site: mode}, Mode.AS_WRITTEN, lines.exponent)

    def reason(site: Site) -> Reason:
        found = statistics[site]
        # Not `<=`: both may be infinite.
        if error(site, Mode.RANGE) < error(site, Mode.AS_WRITTEN) / SAME_SIZE:
            return Reason.OVERFLOW if found.overflow else Reason.UNDERFLOW if found.tiny else Reason.ROUNDING
        return Reason.OVERFLOW_AND_ROUNDING if found.overflow else Reason.ROUNDING

    def rank(cause: Cause) -> tuple[bool, bool, bool]:
        # A result that is only infinite because its operand is too large is not the first choice.
        fits = statistics[cause.site].max_abs <= cause.site.limit
        is_smaller = error(cause.site, Mode.AS_WRITTEN) < largest_error / SAME_SIZE
        return cause.reason is Reason.ROUNDING and not finite, is_smaller, cause.reason.is_overflow and fits

    # A wrong result explains others, and an error of the forward pass explains the errors of the backward pass.
    limits = sorted({lines.limit, max(lines.limit, trials.accepted.gradient)}, reverse=True)
    for limit, backward in itertools.product(limits, (False, True)):
        wrong = [x for x in kept if x.part.backward == backward and error(x, Mode.AS_WRITTEN) > limit]
        if wrong:
            largest_error = max(error(x, Mode.AS_WRITTEN) for x in wrong)
            return sorted([Cause(x, reason(x)) for x in wrong], key=rank)
    return [Cause(next(iter(kept)), Reason.ROUNDING)]


def find_casts(trials: GradientTrials, cause: Cause, lines: Lines) -> WrongCasts | None:
    """Finds the few casts of a line of which each one is wrong if it alone computes as it is written.

    Returns None if there are none, or many, as if the line casts one argument; and if the line is still wrong with
    these casts in float32.
    """
    inputs = trials.program.cast_inputs(cause.site)
    names = [trials.program.names[i] for i in inputs]
    if len(names) < 2 or not all(names):  # a cast of an array that is not an argument
        return None
    found = find_wrong_groups(trials, cause, lines, [[i] for i in range(len(names))])
    return WrongCasts(cause.site, tuple(names[i] for i in found)) if found else None


def find_wrong_groups(trials: GradientTrials, cause: Cause, lines: Lines, groups: Groups) -> list[int]:
    """Finds the few groups of operations of a line of which each one is wrong if it alone computes as it is written.

    If the line overflows or underflows, a group that only rounds does not count, although the overflow may amplify its
    rounding. Returns nothing if there are none, or many, or all of them; and if the line is still wrong with these
    groups in float32.
    """
    site, kept = cause.site, trials.kept(lines.paths)
    group_of = {i: number for number, group in enumerate(groups) for i in group}

    def error(chosen: Collection[int], mode: Mode, others: Mode = Mode.FLOAT32) -> float:
        modes = tuple(mode if group_of[i] in chosen else others for i in range(len(group_of)))
        return trials.error(kept | {site: modes}, Mode.AS_WRITTEN, lines.exponent)

    def is_wrong(chosen: range) -> bool:
        as_written = error(chosen, Mode.AS_WRITTEN)
        is_certain = math.isinf(as_written) or cause.reason in (Reason.ROUNDING, Reason.OVERFLOW_AND_ROUNDING)
        if as_written <= lines.limit or is_certain:
            return as_written > lines.limit
        return as_written > SAME_SIZE * error(chosen, Mode.RANGE)  # equal without values out of range

    found = few(len(groups), is_wrong)
    if not found:
        return []
    without = error(found, Mode.FLOAT32, Mode.AS_WRITTEN)
    if without > lines.limit and not without < error(range(len(groups)), Mode.AS_WRITTEN) / SAME_SIZE:
        return []
    return found


def few(count: int, is_wrong: Callable[[range], bool]) -> list[int]:
    """Returns the integers below `count` that are wrong, by bisection; none if they are more than `MOST_NAMED`, or all.

    A range is wrong if one of its integers is.
    """
    found: list[int] = []
    pending = [range(count)]
    while pending and len(found) <= MOST_NAMED:
        chosen = pending.pop()
        if is_wrong(chosen):
            middle = len(chosen) // 2
            found += chosen if middle == 0 else []
            pending += [chosen[middle:], chosen[:middle]] if middle else []
    return sorted(found) if len(found) <= min(MOST_NAMED, count - 1) else []
