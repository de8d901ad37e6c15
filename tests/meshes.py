"""Meshes, and what else a test needs: it is skipped where there are fewer devices, or no CPU, as on a single GPU."""

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
    """Skips the test if there are fewer devices."""
    if jax.device_count() < number:
        pytest.skip(f"needs {number} devices")


def require_cpu():
    """Skips the test of a program for CPU if the default device is another one."""
    if jax.default_backend() != "cpu":
        pytest.skip("tests a program for CPU")
