"""diagnose measures each result as NumPy does in float64, whichever library computes it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmpscale._diagnosis import measure
from jmpscale._diagnosis.measure import Measured

INF, NAN = np.inf, np.nan
H, F = np.float16, np.float32


def bfloat16(values):
    return np.array(values, ml_dtypes.bfloat16)


@pytest.fixture(params=["NumPy", "JAX"], autouse=True)
def library(request, monkeypatch):
    if request.param == "JAX":
        monkeypatch.setattr(measure, "_SMALL", 0)


MEASURED = {  # the values in float32, the values as written, and the fields that differ from the defaults
    "equal": (F([1, -2]), H([1, -2]), {"extreme": -2, "finite": 1, "float32_finite": 1}),
    "extremes of both signs": (F([-2, 2]), H([-2, 2]), {"extreme": 2}),
    "rounding": (F([3, 4]), H([3, 4.5]), {"extreme": 4, "error": 0.1}),
    "overflow": (F([-3e5, 1]), H([-INF, 1]), {"extreme": -3e5, "error": INF, "overflow": 0.5, "finite": 0}),
    "mask": (F([-INF, 1]), H([-INF, 1]), {"extreme": 1, "finite": 0, "float32_finite": 0}),
    "NaN": (F([NAN, 1]), H([NAN, 1]), {"extreme": 1, "finite": 0, "float32_finite": 0, "float32_nan": 1}),
    "NaN instead of an infinity": (
        F([INF, 1]),
        H([NAN, 1]),
        {"extreme": 1, "error": INF, "finite": 0, "float32_finite": 0},
    ),
    "a number instead of an infinity": (F([INF, 1]), H([5, 1]), {"extreme": 1, "error": INF, "float32_finite": 0}),
    "underflow": (
        F([2.0**-26, 2.0**-24]),
        H([0, 2.0**-24]),
        {"extreme": 2.0**-24, "error": 17**-0.5, "underflow": 0.2, "subnormal": 0.8},
    ),
    "zero in float32 only": (F([0, 0]), H([0, 1]), {"error": INF}),
    "zeros": (F([0, -0.0]), H([-0.0, 0]), {}),
    "smallest normal number": (
        F([2.0**-14, 2.0**-15]),
        H([2.0**-14, 2.0**-15]),
        {"extreme": 2.0**-14, "subnormal": 1 / 3},
    ),
    "smallest normal number of bfloat16": (F([2.0**-100, 1]), bfloat16([2.0**-100, 1]), {"extreme": 1}),
    "squares that overflow": (F([3e30, 4e30]), F([3e30, 4.5e30]), {"extreme": 4e30, "error": 0.1}),
    "squares that underflow": (F([3e-30, 4e-30]), F([3e-30, 4.5e-30]), {"extreme": 4e-30, "error": 0.1}),
    "integers": (np.int32([1, 2]), np.int32([1, 9]), {"error": 0.5, "finite": 1, "float32_finite": 1}),
    "booleans": (np.array([True, False]), np.array([True, True]), {"error": 0.5}),
    "complex": (np.complex64([3j, 4]), np.complex64([3j, 4 + 0.5j]), {"extreme": 4, "error": 0.1}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measure(name):
    float32, written, fields = MEASURED[name]
    found = measure.measure(jnp.asarray(float32), jnp.asarray(written))
    assert found._asdict() == pytest.approx(Measured(**fields)._asdict(), rel=1e-5)


ERRORS = {
    "rounding": (F([3, 4]), H([3, 4.5]), 0.1),
    "infinity": (F([3, 4]), H([3, INF]), INF),
    "the same infinity": (F([3, INF]), H([3, INF]), 0),
    "integers": (np.int32([3, 4]), np.int32([3, 6]), 0.4),
    "nothing": (F([]), H([]), 0),
}


@pytest.mark.parametrize("name", ERRORS)
def test_relative_error(name):
    float32, written, expected = ERRORS[name]
    assert measure.relative_error(jnp.asarray(float32), jnp.asarray(written)) == pytest.approx(expected)


def test_measure_is_exact():
    float32 = np.float32(np.random.default_rng(0).normal(size=(5, 7)))
    written = float32.astype(np.float16)
    x, y = float32.astype(np.float64), written.astype(np.float64)
    found = measure.measure(jnp.asarray(float32), jnp.asarray(written))
    assert found.error == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-5)
    assert found.extreme == x.flat[np.abs(x).argmax()]


NUMBERS = {
    "floats": (np.zeros(2, np.float16), True),
    "complex": (np.zeros(2, np.complex64), True),
    "integers": (np.zeros(2, np.int8), True),
    "booleans": (np.zeros(2, bool), True),
    "nothing": (np.zeros((0, 2), np.float16), False),
    "float0": (np.zeros(2, "V"), False),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_is_number(name):
    x, expected = NUMBERS[name]
    assert measure.is_number(x) == expected


FLAGS = {  # the values; whether all are finite, whether all are zero
    "zeros": ([-0.0, 0.0], (True, True)),
    "some zeros": ([0.0, 1.0], (True, False)),
    "infinity": ([0.0, -np.inf], (False, False)),
    "NaN": ([0.0, np.nan], (False, False)),
}


@pytest.mark.parametrize("name", FLAGS)
def test_is_finite_and_is_zero(name):
    values, expected = FLAGS[name]
    x = jnp.float32(values)
    assert (measure.is_finite(x), measure.is_zero(x)) == expected
