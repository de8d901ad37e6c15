"""Measures state that rounding leaves right although its change differs: another leaf of it, or chance, makes up.

In Kahan summation, and in a number that is stored as a sum of two, another leaf takes the part that rounding removes.
In stochastic rounding, a change that is below the last place is made sometimes, so that it is right on average.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._diagnosis.thresholds import CANCELS, DRAWS, IS_RANDOM, STANDARD_ERRORS
from jmpscale._programs.compile import compiled_when_called


class Values(NamedTuple):
    """The new value of a leaf."""

    written: Any
    reference: Any
    old: Any


def may_cancel(first: Sequence[np.ndarray], second: Sequence[np.ndarray], sign: int) -> bool:
    """Tests whether the errors of two leaves may cancel, given the sketches of both errors after each step.

    The sketches only estimate the norms of errors, so the limit is twice that of `error_of_sum`.
    """

    def cancel(x: np.ndarray, y: np.ndarray) -> bool:
        smaller = min(np.linalg.norm(x), np.linalg.norm(y))
        return bool(np.linalg.norm(x + sign * y) < 2 * CANCELS * smaller)

    return all(map(cancel, first, second))


@compiled_when_called
def sketch(x: Values) -> jax.Array:
    """Returns sums of the errors of a leaf with pseudorandom signs, which distinguish leaves with different errors."""
    error = (x.written - x.reference).ravel()
    bits = jnp.arange(error.size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x85EBCA77)
    unit = jnp.maximum(jnp.abs(error).max(initial=0), jnp.finfo(error.dtype).tiny)
    scaled = error / unit

    def sum_with_signs(i: jax.Array) -> jax.Array:
        return jnp.where((bits >> i) & 1, -scaled, scaled).sum()

    # The sums are computed in turn: the signs of all of them would take 16 times the memory of the leaf.
    return unit * jax.lax.map(sum_with_signs, jnp.arange(16, dtype=np.uint32))


def error_of_sum(steps: Sequence[tuple[Values, Values]], sign: int) -> float:
    """Returns the largest error of a sum, or a difference, of two leaves after some steps; infinite if it is not right.

    The error of the sum must be small beside the error of each leaf.
    """
    found = [jax.device_get(_compare_pair(x, y, np.float32(sign))) for x, y in steps]
    return float(max(error if cancels < CANCELS else math.inf for cancels, error in found))


@compiled_when_called
def _compare_pair(x: Values, y: Values, sign: jax.Array) -> jax.Array:
    errors = [z.written - z.reference for z in (x, y)]
    change = x.reference - x.old.astype(np.float32) + sign * (y.reference - y.old.astype(np.float32))
    first, second, total, size = map(norm, (*errors, errors[0] + sign * errors[1], change))
    return jnp.stack([total / jnp.minimum(first, second), total / size])


def other_draw(consts: Sequence[Any], inputs: Sequence[int], draw: int) -> list[Any]:
    """Returns constants with other random numbers: those of `inputs` are keys, and counts of which keys may be made."""
    return [_other(x, draw) if i in inputs else x for i, x in enumerate(consts)]


def may_draw(x: Any) -> bool:
    """Tests whether an array may be a random key, or a count of which one is made."""
    return _is_key(x) or x.dtype == np.uint32 or (x.ndim == 0 and jnp.issubdtype(x.dtype, np.integer))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _other(x: Any, draw: int) -> Any:
    bits = np.uint32(0x9E3779B9 * draw & 0xFFFFFFFF)
    if _is_key(x):
        return jax.random.wrap_key_data(jax.random.key_data(x) ^ bits, impl=jax.random.key_impl(x))
    return x ^ bits if x.dtype == np.uint32 else x + np.asarray(draw, x.dtype)


class ErrorsOfDraws:
    """The errors of a change of a leaf, added up over several draws of random numbers."""

    def __init__(self) -> None:
        self._error: Any = np.float32(0)
        self._sums = np.zeros(4)
        self._unit: Any = None  # of the sums, because squares underflow

    def add(self, written: Any, reference: Any) -> None:
        """Adds a change as it is written, and in float32."""
        self._unit = _unit(reference) if self._unit is None else self._unit
        error, sums = _error(written, reference, self._unit)
        self._error = self._error + error
        self._sums += np.asarray(sums, np.float64)

    @property
    def is_random(self) -> bool:
        """Whether the values that are written are right on average: the mean of the errors is small beside one of them.

        So is their part along the change, which a change that is always lost has.
        """
        squares, changes, _, weighted = self._sums
        if not squares or not changes:
            return False
        remains = float(norm(self._error)) / math.sqrt(DRAWS * squares)
        uncertain = math.sqrt(weighted) / changes
        return bool(remains < IS_RANDOM and self.error < max(IS_RANDOM, STANDARD_ERRORS * uncertain))

    @property
    def error(self) -> float:
        """The part of the change that is missing on average."""
        _, changes, products, _ = self._sums
        return float(abs(products) / changes)


@compiled_when_called
def _unit(change: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.abs(change).max(initial=0), jnp.finfo(change.dtype).tiny)


@compiled_when_called
def _error(written: jax.Array, reference: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    error, change = (written - reference) / unit, reference / unit
    return error, jnp.stack([y.sum() for y in (error**2, change**2, error * change, (error * change) ** 2)])


@jax.jit
def norm(x: jax.Array) -> jax.Array:
    """Returns the L2 norm."""
    # In units of the largest value, because squares underflow.
    unit = jnp.maximum(jnp.abs(x).max(initial=0), jnp.finfo(np.float32).tiny)
    return unit * jnp.linalg.norm((x / unit).ravel())
