"""diagnose finds the powers of two that fit, and the smallest set of lines, in few runs."""

import numpy as np
import pytest

from jmpscale._diagnosis.fitting_scales import search
from jmpscale._diagnosis.smallest_set import smallest_set

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


SEARCHES = {  # the errors, the exponent of the present scale, the exponents of the scales that fit, and of the best one
    "inside": (window(-10, 19), 10, (-10, 19), 19),
    "too small": (window(-10, 19), -30, (-10, 19), 19),
    "too large": (window(-10, 19), 40, (-10, 19), 19),
    "one scale": (window(4, 4), 16, (4, 4), 4),
    "narrow and far below": (window(-61, -58), 16, (-61, -58), -58),
    "all scales": (window(-200, 200), 16, (-126, 126), 126),
    "to the largest scale": (window(100, 200), 120, (100, 126), 126),
    "to the smallest scale": (islands, 16, (-126, -100), -100),
    "no finite gradient": (not_finite, 16, None, None),
    "useless at all scales": (window(-200, 12, best=0.51), 4, None, 12),
    "almost useless": (window(-200, 12, best=0.49), 4, (-126, 12), 12),
    "useless where it does not overflow": (window(20, 12, below=0.9), 4, None, 12),
    "rounded more than gradients of zero are wrong": (window(5, 12, best=1.3), 4, None, 12),
    "slow underflow": (slow_underflow, 8, (-3, 15), 15),
    "each gradient for itself": (two_gradients, 8, (3, 20), 20),
    "wrong at the present scale only": (wrong_at_the_present_scale, 3, (4, 20), 20),
    "clipped": (worse_at_large_scales, 16, (-126, -5), -6),
    "no gradient counts": (lambda k: NOT_FINITE if k > 5 else np.zeros(1), 0, (-126, 5), 5),
}


@pytest.mark.parametrize("expected", [-100, 0, 19, 100])
@pytest.mark.parametrize(("error", "present", "fitting", "best"), SEARCHES.values(), ids=SEARCHES)
def test_search(error, present, fitting, best, expected):
    runs = set()

    def counted(k):
        runs.add(k)
        assert -126 <= k <= 126
        return error(k)

    found = search(counted, not_finite, present, expected)
    assert (found.fitting, found.best) == (fitting, best)
    assert sorted(found.errors) == sorted(runs)
    assert len(runs) <= 40, sorted(runs)
    assert 0 in runs or found.fitting is None, "the error without loss scaling is shown"


def test_only_the_best_scale_fits_if_gradients_are_best_at_different_scales():
    errors = {5: [0.15, 0.001], 2: [0.001, 0.14], -1: [0.16, 0.16]}
    found = search(lambda k: NOT_FINITE if k > 5 else np.array(errors.get(k, [1.0, 1.0])), not_finite, 2, 5)
    assert (found.fitting, found.best) == ((2, 2), 2)


def test_scales_fit_up_to_the_error_of_the_forward_pass():
    """At one scale, errors of both passes cancel."""
    errors = {8: 0.11} | dict.fromkeys(range(8), 0.17)
    found = search(lambda k: NOT_FINITE if k > 8 else np.array([errors.get(k, 0.4)]), lambda k: np.array([0.16]), 3, 8)
    assert (found.fitting, found.best) == ((0, 8), 8)


TOLERANCES = {  # the best error, the error at other scales, and whether they fit
    "1% more": (0.001, 0.0108, True),
    "1.1% more": (0.001, 0.012, False),
    "a tenth more than a large error": (0.18, 0.207, True),
    "a third more than a large error": (0.18, 0.24, True),
    "half more than a large error": (0.18, 0.27, False),
}


@pytest.mark.parametrize(("best", "other", "fits"), TOLERANCES.values(), ids=TOLERANCES)
def test_scale_fits_up_to_a_tolerance(best, other, fits):
    found = search(lambda k: NOT_FINITE if k > 10 else np.array([best if k > 0 else other]), not_finite, 5, 10)
    assert found.fitting == ((-126 if fits else 1), 10)


SETS = {  # the number of integers, the sets that are enough, and the set that is found
    "none needed": (5, [set()], set()),
    "the first": (5, [{0}], {0}),
    "the last": (5, [{4}], {4}),
    "two": (40, [{3, 31}], {3, 31}),
    "one of two": (8, [{2}, {6}], {6}),
    "one instead of two": (8, [{1, 2}, {6}], {6}),
    "all": (4, [{0, 1, 2, 3}], {0, 1, 2, 3}),
}


@pytest.mark.parametrize(("count", "enough", "expected"), SETS.values(), ids=SETS)
def test_smallest_set(count, enough, expected):
    runs = []

    def fits(chosen):
        runs.append(set(chosen))
        assert runs[-1] <= set(range(count))
        return any(needed <= runs[-1] for needed in enough)

    assert set(smallest_set(range(count), fits)) == expected
    assert len(runs) <= 3 + len(expected) * (2 + np.ceil(np.log2(count)))


def test_set_of_many_integers_is_found_in_few_runs():
    runs = []

    def fits(chosen):
        runs.append(set(chosen))
        return set(range(3, 200)) <= runs[-1]

    assert set(smallest_set(range(200), fits)) == set(range(3, 200))
    assert len(runs) < 150
