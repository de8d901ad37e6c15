"""Compares the loss and the gradients of a step with those in float32."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._diagnosis.thresholds import MOST_SLICES
from jmpscale._programs.compile import compiled_when_called


def has_slices(x: Any) -> bool:
    """Tests whether the slices of an array along its first axis are compared by themselves.

    They may be layers, experts or members of an ensemble, of which each has a matrix. The rows of a matrix are not.
    """
    return x.ndim >= 3 and x.shape[0] <= MOST_SLICES


class Measured(NamedTuple):
    """Measurements of a loss and gradients, each an array with a number for the loss, each gradient, and each slice.

    The errors are relative L2 norms of the difference from the reference; infinite if a value is finite in only one of
    them, or if only the reference is zero.
    """

    errors: np.ndarray
    norms: np.ndarray  # the L2 norms of the finite values of the reference
    severity: np.ndarray  # see `severity`

    @property
    def are_finite(self) -> bool:
        return not self.severity.any()


def measure(outputs: Sequence[Any], reference: Sequence[Any]) -> Measured:
    """Compares a loss and gradients with a reference."""
    # One program for each shape compiles faster than one program for all gradients.
    pairs = list(zip(outputs, reference, strict=True))
    found = [_compare_whole(x, y)[None] for x, y in pairs]
    found += [_compare_slices(x, y) for x, y in pairs if has_slices(y)]
    return Measured(*np.concatenate(jax.device_get(found)).astype(np.float64).T)


@compiled_when_called
def _compare_whole(x: jax.Array, reference: jax.Array) -> jax.Array:
    return _compare(x, reference)


@compiled_when_called
def _compare_slices(x: jax.Array, reference: jax.Array) -> jax.Array:
    return jax.vmap(_compare)(x, reference)


def _compare(x: jax.Array, reference: jax.Array) -> jax.Array:
    x = x.astype(reference.dtype)  # float32 or wider
    are_finite = jnp.isfinite(x) & jnp.isfinite(reference)
    same = (x == reference) | (jnp.isnan(x) & jnp.isnan(reference))
    # In units of the largest value, and limited, because squares overflow and underflow.
    magnitude = jnp.where(jnp.isfinite(reference), jnp.abs(reference), 0)
    largest = magnitude.max(initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    distance = jnp.minimum(jnp.abs(x - reference) / unit, 1e12)
    distance = jnp.where(same, 0, jnp.where(are_finite, distance, np.inf))
    total, norm = (jnp.sqrt((y**2).sum()) for y in (distance, magnitude / unit))
    error = jnp.where(total > 0, total / norm, 0)
    # A norm in float64 may exceed float32; `float` is float64 if JAX has it.
    return jnp.stack([y.astype(float) for y in (error, norm * largest, severity([x]))])


def severity(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns 2 if a value is NaN, otherwise 1 if a value is infinite, otherwise 0."""
    none, infinite, nan = map(np.int32, range(3))
    found = [jnp.where(jnp.isnan(x), nan, jnp.where(jnp.isinf(x), infinite, none)).max(initial=0) for x in arrays]
    return functools.reduce(jnp.maximum, found, jnp.asarray(none))
