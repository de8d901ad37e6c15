"""diagnose finds the powers of two that fit, and the smallest set of lines, in few runs."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from jmpscale._diagnosis.run.fitting_scales import search
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import WRONG_ERROR

from tables import rows

NOT_FINITE = np.array([np.inf])


def not_finite(k):
    """Measures the errors of a forward pass that overflows."""
    return NOT_FINITE


def window(low, high, best=0.001, below=1.0):
    """Returns the error of one gradient that underflows below a scale, and overflows above another one."""
    return lambda k: NOT_FINITE if k > high else np.array([best if k >= low else below])


def two_gradients(k):
    """The first one has a large error at each scale, the second one underflows below 2^3."""
    return NOT_FINITE if k > 20 else np.array([0.18, 0.001 if k >= 3 else 0.1])


def worse_at_large_scales(k):
    """The backward pass clips from 2^-5 on."""
    return NOT_FINITE if k > 30 else np.array([0.001 if k <= -5 else 0.1 + 0.001 * k])


def slow_underflow(k):
    """The error doubles from one scale to the next smaller one."""
    return NOT_FINITE if k > 15 else np.array([0.001 + 2.0 ** (-k - 10)])


def wrong_at_the_present_scale(k):
    return NOT_FINITE if k > 20 else np.array([2.0 if k == 3 else 0.001])


def islands(k):
    """The gradients are finite only at the smallest scales."""
    return np.array([0.001]) if k <= -100 else NOT_FINITE


class Search(NamedTuple):
    """A search for the scales that fit.

    Attributes:
      error: returns the errors of the gradients at a scale, whose exponent is given.
      present: the exponent of the present scale.
      fitting: the exponents of the smallest and of the largest scale that fit.
      best: the exponent of the best scale.
    """

    error: Callable[[int], np.ndarray]
    present: int
    fitting: tuple[int, int] | None
    best: int | None


SEARCHES = {
    "inside": Search(window(-10, 19), present=10, fitting=(-10, 19), best=19),
    "too small": Search(window(-10, 19), present=-30, fitting=(-10, 19), best=19),
    "too large": Search(window(-10, 19), present=40, fitting=(-10, 19), best=19),
    "one scale": Search(window(4, 4), present=16, fitting=(4, 4), best=4),
    "narrow and far below": Search(window(-61, -58), present=16, fitting=(-61, -58), best=-58),
    "all scales": Search(window(-200, 200), present=16, fitting=(-126, 126), best=126),
    "to the largest scale": Search(window(100, 200), present=120, fitting=(100, 126), best=126),
    "to the smallest scale": Search(islands, present=16, fitting=(-126, -100), best=-100),
    "no finite gradient": Search(not_finite, present=16, fitting=None, best=None),
    "useless at all scales": Search(window(-200, 12, best=0.51), present=4, fitting=None, best=12),
    "almost useless": Search(window(-200, 12, best=0.49), present=4, fitting=(-126, 12), best=12),
    "useless where it does not overflow": Search(window(20, 12, below=0.9), present=4, fitting=None, best=12),
    "rounded more than gradients of zero are wrong": Search(window(5, 12, best=1.3), present=4, fitting=None, best=12),
    "slow underflow": Search(slow_underflow, present=8, fitting=(-3, 15), best=15),
    "each gradient for itself": Search(two_gradients, present=8, fitting=(3, 20), best=20),
    "wrong at the present scale only": Search(wrong_at_the_present_scale, present=3, fitting=(4, 20), best=20),
    "clipped": Search(worse_at_large_scales, present=16, fitting=(-126, -5), best=-6),
    "no gradient counts": Search(lambda k: NOT_FINITE if k > 5 else np.zeros(1), present=0, fitting=(-126, 5), best=5),
}


@pytest.mark.parametrize("expected", [-100, 0, 19, 100])
@pytest.mark.parametrize("row", rows(SEARCHES))
def testsearch(row, expected):
    runs = set()

    def counted(k):
        runs.add(k)
        assert -126 <= k <= 126
        return row.error(k)

    found = search(counted, not_finite, row.present, expected, WRONG_ERROR)
    assert (found.fitting, found.best) == (row.fitting, row.best)
    assert sorted(found.errors) == sorted(runs)
    assert len(runs) <= 40, sorted(runs)
    assert 0 in runs or found.fitting is None, "the error without loss scaling is shown"


def test_only_the_best_scale_fits_if_gradients_are_best_at_different_scales():
    errors = {5: [0.15, 0.001], 2: [0.001, 0.14], -1: [0.16, 0.16]}
    found = search(
        lambda k: NOT_FINITE if k > 5 else np.array(errors.get(k, [1.0, 1.0])), not_finite, 2, 5, WRONG_ERROR
    )
    assert (found.fitting, found.best) == ((2, 2), 2)


def test_scales_fit_up_to_the_error_of_the_forward_pass():
    """At one scale, errors of both passes cancel."""
    errors = {8: 0.11} | dict.fromkeys(range(8), 0.17)
    found = search(
        lambda k: NOT_FINITE if k > 8 else np.array([errors.get(k, 0.4)]), lambda k: np.array([0.16]), 3, 8, WRONG_ERROR
    )
    assert (found.fitting, found.best) == ((0, 8), 8)


class Tolerance(NamedTuple):
    """The error at the best scales, the error at other scales, and whether these fit."""

    best: float
    other: float
    fits: bool


TOLERANCES = {
    "1% more": Tolerance(best=0.001, other=0.0108, fits=True),
    "1.1% more": Tolerance(best=0.001, other=0.012, fits=False),
    "a tenth more than a large error": Tolerance(best=0.18, other=0.207, fits=True),
    "a third more than a large error": Tolerance(best=0.18, other=0.24, fits=True),
    "half more than a large error": Tolerance(best=0.18, other=0.27, fits=False),
}


@pytest.mark.parametrize("row", rows(TOLERANCES))
def test_scale_fits_up_to_a_tolerance(row):
    found = search(
        lambda k: NOT_FINITE if k > 10 else np.array([row.best if k > 0 else row.other]), not_finite, 5, 10, WRONG_ERROR
    )
    assert found.fitting == ((-126 if row.fits else 1), 10)


class Set(NamedTuple):
    """The number of integers, the sets of them that are enough, and the smallest set that is found."""

    count: int
    enough: list[set[int]]
    found: set[int]


SETS = {
    "none needed": Set(5, enough=[set()], found=set()),
    "the first": Set(5, enough=[{0}], found={0}),
    "the last": Set(5, enough=[{4}], found={4}),
    "two": Set(40, enough=[{3, 31}], found={3, 31}),
    "one of two": Set(8, enough=[{2}, {6}], found={6}),
    "one instead of two": Set(8, enough=[{1, 2}, {6}], found={6}),
    "all": Set(4, enough=[{0, 1, 2, 3}], found={0, 1, 2, 3}),
}


@pytest.mark.parametrize("row", rows(SETS))
def test_smallest_set(row):
    runs = []

    def fits(chosen):
        runs.append(set(chosen))
        assert runs[-1] <= set(range(row.count))
        return any(needed <= runs[-1] for needed in row.enough)

    assert set(smallest_set(range(row.count), fits)) == row.found
    size = len(row.found)
    assert len(runs) <= 3 + size * (2 + np.ceil(np.log2(row.count))) + 2 * size + 2


def test_smallest_set_is_smaller_than_a_set_whose_superset_does_not_fit():
    """Errors cancel: a set with the item that is enough does not fit without two others."""
    found = smallest_set(range(4), lambda chosen: set(chosen) in ({3}, {0, 1, 3}, {0, 1, 2, 3}))
    assert found == [3]


def test_set_of_many_integers_is_found_in_few_runs():
    runs = []

    def fits(chosen):
        runs.append(set(chosen))
        return set(range(3, 200)) <= runs[-1]

    assert set(smallest_set(range(200), fits)) == set(range(3, 200))
    assert len(runs) < 150
