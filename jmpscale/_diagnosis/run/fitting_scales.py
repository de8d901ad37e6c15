"""Finds the loss scales that fit, among powers of two."""

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jmpscale._diagnosis.thresholds import FACTOR, NOISE_OF_ERRORS, SMALL_ERROR, TOLERANCE
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE

_LOWEST, _HIGHEST = round(math.log2(SMALLEST_SCALE)), round(math.log2(LARGEST_SCALE))

Errors = np.ndarray  # the relative error of each gradient; all of them are infinite if a gradient is not finite


class Scales(NamedTuple):
    """The scales that fit."""

    errors: dict[int, float]  # the largest error of a gradient, by the exponent of each power of two that was tried
    fitting: tuple[int, int] | None  # the exponents of the smallest and the largest scale that fit; None if none does
    best: int | None  # the exponent of the scale with the smallest error, if gradients are finite at any scale
    limits: Errors | None = None  # the largest error of each gradient at a scale that fits, if one fits
    errors_at_best: Errors | None = None  # of each gradient, at the best scale

    @property
    def smallest_error(self) -> float:
        """The error at the best scale."""
        return math.inf if self.best is None else self.errors[self.best]


def largest(errors: Errors) -> float:
    return float(errors.max(initial=0.0))


def at_one_scale(errors: Errors, exponent: int, largest_error: float) -> Scales:
    """Returns the result for a step whose scale cannot change."""
    error = largest(errors)
    fitting = (exponent, exponent) if error <= largest_error else None
    return Scales({exponent: error}, fitting, exponent if math.isfinite(error) else None, errors, errors)


def search(
    measure: Callable[[int], Errors],
    measure_forward: Callable[[int], Errors],
    present: int,
    expected: int,
    largest_error: float,
) -> Scales:
    """Finds the scales that fit, among powers of two, which are given by their exponents.

    `present` is the present scale, and `expected` is probably the largest one with finite gradients. `measure_forward`
    measures the errors that remain if the backward pass computes in float32. No scale fits if the error at the best one
    exceeds `largest_error`.
    """
    found: dict[int, Errors] = {}

    def errors(exponent: int) -> Errors:
        if exponent not in found:
            found[exponent] = measure(exponent)
        return found[exponent]

    def error(exponent: int) -> float:
        return largest(errors(exponent))

    def result(fitting: tuple[int, int] | None, best: int | None, limits: Errors | None = None) -> Scales:
        errors = None if best is None else found[best]
        return Scales({k: largest(found[k]) for k in sorted(found)}, fitting, best, limits, errors)

    def is_finite(k: int) -> bool:
        return math.isfinite(error(k))

    starts = [present, 0, 12, -12, -24, -40, -60, -90, _LOWEST]
    start = next(filter(is_finite, starts), None)
    if start is None:
        return result(None, None)
    highest = _last(is_finite, expected if expected > start and is_finite(expected) else start, 1)

    # The error is constant from the largest scale down to where values begin to underflow, unless the backward pass
    # clips, or compares scaled values with others: then smaller scales may be better.
    candidates = [highest]
    if error(highest) > TOLERANCE:
        candidates += [k for k in (highest - 3, highest - 6) if k >= _LOWEST]
    on_plateau = min(candidates, key=error)
    if error(on_plateau) > TOLERANCE:
        candidates += [k for k in (0, *range(highest - 12, highest - 49, -6)) if k >= _LOWEST]
    best = min(candidates, key=error)
    if error(best) > largest_error:
        return result(None, on_plateau)  # not a smaller one, at which all gradients are zero and the error is only 100%
    smallest = np.min([errors(k) for k in candidates], axis=0)  # of each gradient
    if error(best) >= SMALL_ERROR and math.isfinite(largest(forward := measure_forward(best))):
        # The errors of the forward pass do not depend on the scale, but can cancel others at some scales by chance.
        smallest = np.maximum(smallest, forward)
    limits = FACTOR * smallest + TOLERANCE + NOISE_OF_ERRORS * error(best)

    def fits(k: int) -> bool:
        return bool((errors(k) <= limits).all())

    fitting = list(filter(fits, found)) or [best]
    low, high = _last(fits, min(fitting), -1, step=4), _last(fits, max(fitting), 1)
    # The steps to the ends grow, so a scale between them that was tried for another reason may not fit.
    unfit = [k for k in found if low < k < high and not fits(k)]
    low, high = max([low, *(k + 1 for k in unfit if k < best)]), min([high, *(k - 1 for k in unfit if k > best)])
    errors(0)  # the error without loss scaling, for readers of the result
    return result((low, high), best, limits)


def _last(holds: Callable[[int], bool], start: int, direction: int, step: int = 1) -> int:
    """Returns the last integer for which a condition holds, from `start`, for which it holds, in a direction."""
    limit = abs((_HIGHEST if direction > 0 else _LOWEST) - start)
    good, bad = 0, min(step, limit)  # distances from the start
    while good < bad and holds(start + direction * bad):
        good, bad = bad, min(2 * bad + step, limit)
    fails = bisect.bisect_left(range(bad), True, good + 1, key=lambda n: not holds(start + direction * n))
    return start + direction * (fails - 1)
