"""Finds why lines must compute in float32: where the error begins, and whether it is range or rounding."""

import enum
from collections.abc import Collection
from typing import NamedTuple

from jmpscale._diagnosis.lines import Lines
from jmpscale._diagnosis.modes import Mode, Site
from jmpscale._diagnosis.thresholds import MOST_CALLS, SAME_SIZE
from jmpscale._diagnosis.trials import GradientTrials


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


class WrongCalls(NamedTuple):
    """Which calls of a line are wrong alone, such as the 8th of 12 layers of a loop in Python."""

    site: Site
    numbers: tuple[int, ...]  # from 1, in the order of the forward pass
    total: int
    inputs: tuple[str, ...] = ()  # the names of the arguments that the calls cast, if each of them casts one

    @property
    def text(self) -> str:
        """The numbers of the calls, such as `8 of 12`, or the names of the arguments, such as `params['w']`."""
        return ", ".join(self.inputs) or f"{', '.join(map(str, self.numbers))} of {self.total}"


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

    # An error of the forward pass explains the errors of the backward pass.
    for backward in (False, True):
        wrong = [x for x in kept if x.part.backward == backward and error(x, Mode.AS_WRITTEN) > lines.limit]
        if wrong:
            largest_error = max(error(x, Mode.AS_WRITTEN) for x in wrong)
            return sorted([Cause(x, reason(x)) for x in wrong], key=rank)
    return [Cause(next(iter(kept)), Reason.ROUNDING)]


def find_calls(trials: GradientTrials, cause: Cause, lines: Lines) -> WrongCalls | None:
    """Finds the few calls of a line of which each one is wrong if it alone computes as it is written.

    If the line overflows or underflows, a call in which it only rounds does not count, although the overflow may
    amplify its rounding. Returns None if there are none, or many, as if the line is called once; if the line is
    still wrong with these calls in float32; and if it is not certain which call an operation belongs to.
    """
    site, kept = cause.site, trials.kept(lines.paths)
    calls = trials.program.calls(site)
    if calls is None:
        return None

    def error(chosen: Collection[int], mode: Mode, others: Mode = Mode.FLOAT32) -> float:
        of_operations = tuple(mode if call in chosen else others for call in calls.of_operations)
        return trials.error(kept | {site: of_operations}, Mode.AS_WRITTEN, lines.exponent)

    def is_wrong(chosen: range) -> bool:
        as_written = error(chosen, Mode.AS_WRITTEN)
        if as_written <= lines.limit or cause.reason in (Reason.ROUNDING, Reason.OVERFLOW_AND_ROUNDING):
            return as_written > lines.limit
        return as_written > SAME_SIZE * error(chosen, Mode.RANGE)  # equal without values out of range

    found: list[int] = []
    pending = [range(calls.total)]
    while pending and len(found) <= MOST_CALLS:
        chosen = pending.pop()
        if is_wrong(chosen):
            middle = len(chosen) // 2
            found += chosen if middle == 0 else []
            pending += [chosen[middle:], chosen[:middle]] if middle else []
    if not 0 < len(found) <= min(MOST_CALLS, calls.total - 1):
        return None
    without = error(found, Mode.FLOAT32, Mode.AS_WRITTEN)
    if without > lines.limit and not without < error(range(calls.total), Mode.AS_WRITTEN) / SAME_SIZE:
        return None
    inputs = tuple(trials.inputs[calls.inputs[i]] for i in sorted(found)) if calls.inputs else ()
    if not all(inputs):  # a cast of an array that is not an argument
        return None
    return WrongCalls(site, tuple(i + 1 for i in sorted(found)), calls.total, inputs)
