"""Meshes and other requirements of tests, which are skipped where there are too few devices, or no CPU."""

import math

import jax
import pytest
from jax.sharding import AxisType


def make_mesh(axis_type=AxisType.Auto, **shape):
    """Returns a mesh with these axes and sizes, by default `data=4, model=2`."""
    shape = shape or {"data": 4, "model": 2}
    require_devices(math.prod(shape.values()))
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))


def require_devices(number):
    if jax.device_count() < number:
        pytest.skip(f"needs {number} devices")


def require_cpu():
    """Skips the test of a program for CPU if the default device is not a CPU."""
    if jax.default_backend() != "cpu":
        pytest.skip("tests a program for CPU")
