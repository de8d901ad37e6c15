"""Finds the operations at which an evaluated program begins to differ from float32, and the reason."""

import enum
from collections.abc import Callable, Iterable, Sequence

from jmpscale._diagnosis.evaluate import LARGE_ERROR, Result
from jmpscale._diagnosis.float32 import is_narrow

_USELESS = 0.5  # the error of an operand that explains why a result is not finite
_POLES = {"atan2", "div", "integer_pow", "log", "log1p", "pow", "rsqrt"}


class Kind(enum.Enum):
    """How a result leaves half precision, although its operands do not."""

    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    POLE = "a function of an operand that half precision rounds to zero"
    ROUNDING = "rounding"


def kind_of(result: Result) -> Kind:
    """Returns how a result differs from float32, although its operands do not."""
    measured = result.measured
    if _is_finite_in_float32_only(result):
        if any(operand.measured.underflow for operand in result.operands) and result.site.operation in _POLES:
            return Kind.POLE
        return Kind.OVERFLOW if is_narrow(result.site) else Kind.ROUNDING
    lost = measured.underflow + measured.subnormal
    return Kind.UNDERFLOW if lost > measured.error / 4 else Kind.ROUNDING


def origins(outputs: Iterable[Result]) -> list[Result]:
    """Returns the results at which the errors of outputs begin, in program order.

    An error that a later operation removes, such as the infinity of a mask, is not on the way to an output.
    """
    ends = list(outputs)
    not_finite = [x for x in ends if _is_finite_in_float32_only(x)]
    if not_finite:
        infinite = _walk(not_finite, _is_finite_in_float32_only)
        return _walk(infinite, lambda x: x.measured.error > _USELESS)
    limit = min(LARGE_ERROR, max((x.measured.error for x in ends), default=0.0) / 3)
    return _walk(ends, lambda x: x.measured.error > limit)


def float32_origins(outputs: Iterable[Result]) -> list[Result]:
    """Returns the results at which values begin to be infinite or NaN in float32, and stay so up to an output.

    An infinity may be intended, such as a mask. It is named if the program has made it from finite values, or if it
    reaches an output without becoming NaN.
    """
    ends = [x for x in outputs if x.measured.float32_finite == 0]
    begin = _walk(ends, _is_nan_in_float32)
    made = _walk(begin, lambda x: x.measured.float32_finite == 0)
    return [x for x in made if not _is_given(x)] or list(filter(_is_nan_in_float32, begin)) or made


def _is_given(result: Result) -> bool:
    """Tests whether a result consists of values of arguments and constants, such as a mask of infinities."""
    return result.site.moves or (result.site.operation == "convert_element_type" and not result.operands)


def _is_nan_in_float32(result: Result) -> bool:
    return result.measured.float32_nan == 1


def _is_finite_in_float32_only(result: Result) -> bool:
    return result.measured.float32_finite == 1 and result.measured.finite == 0


def _walk(ends: Iterable[Result], is_bad: Callable[[Result], bool]) -> list[Result]:
    """Returns the results without a bad operand that are reached from results by way of bad operands."""
    return _last_reached(ends, lambda result: [x for x in result.operands if is_bad(x)])


def _last_reached(starts: Iterable[Result], successors: Callable[[Result], Sequence[Result]]) -> list[Result]:
    """Returns the results without successors that are reached from results, in program order."""
    found, seen, stack = [], set(), list(starts)
    while stack:
        result = stack.pop()
        if result.number in seen:
            continue
        seen.add(result.number)
        following = successors(result)
        stack += following
        if not following:
            found.append(result)
    return sorted(found, key=lambda x: x.number)


def lines_to_change(origin: Result) -> list[str]:
    """Returns the lines that must compute in float32, so that an error does not begin.

    If an operation amplifies the rounding of its operands, they are the lines of the half-precision operations whose
    results reach it without another one between them; otherwise the line of the operation itself.
    """
    if not origin.amplifies:
        return [origin.site.line]
    reached = _last_reached(origin.operands, lambda result: () if _rounds(result) else result.operands)
    return list(dict.fromkeys(x.site.line for x in reached if _rounds(x))) or [origin.site.line]


def _rounds(result: Result) -> bool:
    """Tests whether an operation computes in half precision."""
    return is_narrow(result.site) and not result.site.moves
