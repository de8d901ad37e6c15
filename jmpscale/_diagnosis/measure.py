"""Compares results of a program as written with the same results in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SMALL = 2**20  # numbers in an array that NumPy measures, because a compilation would take longer


class Measured(NamedTuple):
    """How a result differs from float32."""

    extreme: float = 0.0  # the finite value in float32 with the largest magnitude
    error: float = 0.0  # the relative error; of integers and booleans, the fraction that differs
    overflow: float = 0.0  # the fraction of values that are finite in float32 only
    underflow: float = 0.0  # the fraction of the L1 norm in values that are zero as written only
    subnormal: float = 0.0  # the fraction of the L1 norm in values that are subnormal as written
    finite: float = 1.0  # 1 if all values as written are finite, otherwise 0
    float32_finite: float = 1.0
    float32_nan: float = 0.0


def is_number(x: Any) -> bool:
    """Tests whether an array can be measured: it holds numbers or booleans, not PRNG keys."""
    return x.size > 0 and (jnp.issubdtype(x.dtype, np.number) or jnp.issubdtype(x.dtype, np.bool_))


def measure(float32: Any, written: Any) -> Measured:
    """Compares the values of a result in float32 and as the program is written.

    Args:
      float32: an array for which `is_number` holds.
      written: an array of the same shape, of the program's own dtype.
    """
    return Measured(*_apply(_measure, float32, written))


def relative_error(float32: Any, written: Any) -> float:
    """Returns the L2 norm of the difference of two arrays, relative to the norm of the first.

    It is infinite if a value is not finite in one of them only, or if only the first one is zero.
    """
    return _apply(_error, float32, written)[0]


def _apply(function: Callable[..., Sequence[Any]], *arrays: Any) -> list[float]:
    """Calls a function with NumPy or jax.numpy and arrays; it returns numbers."""
    is_local = all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in arrays)
    if is_local and arrays[0].size <= _SMALL:
        with np.errstate(all="ignore"):
            return [float(x) for x in function(np, *map(np.asarray, arrays))]
    return np.asarray(_compiled(function)(*arrays)).tolist()


@functools.cache
def _compiled(function: Callable[..., Sequence[Any]]) -> Callable[..., jax.Array]:
    def run(*arrays: jax.Array) -> jax.Array:
        return jnp.stack([jnp.asarray(x).astype(np.float32) for x in function(jnp, *arrays)])

    return jax.jit(run)


def _measure(xp: Any, float32: Any, written: Any) -> Measured:
    """Measures by the functions of NumPy or of `jax.numpy`."""
    if not jnp.issubdtype(written.dtype, np.inexact):
        return Measured(error=xp.mean(float32 != written, dtype=np.float32))
    is_complex = jnp.issubdtype(float32.dtype, np.complexfloating)
    x = (xp.abs(float32) if is_complex else float32).astype(np.float32)
    y = xp.abs(written).astype(np.float32)
    finite, both = xp.isfinite(x), xp.isfinite(x) & xp.isfinite(y)
    known = xp.where(finite, x, np.float32(0))
    high, low = known.max(), known.min()
    lost = both & (y == 0)
    tiny = np.float32(jnp.finfo(written.dtype).smallest_normal)
    return Measured(
        extreme=xp.where(high >= -low, high, low),
        error=_error(xp, float32, written)[0],
        overflow=xp.mean(finite & ~both, dtype=np.float32),
        underflow=_fraction_of_norm(xp, known, lost),
        subnormal=_fraction_of_norm(xp, known, both & ~lost & (y < tiny)),
        finite=xp.isfinite(y).all(),
        float32_finite=finite.all(),
        float32_nan=xp.isnan(x).any(),
    )


def _fraction_of_norm(xp: Any, x: Any, selected: Any) -> Any:
    norm = xp.abs(x).sum()
    return xp.where(selected, xp.abs(x), np.float32(0)).sum() / xp.where(norm > 0, norm, np.float32(1))


def _error(xp: Any, float32: Any, written: Any) -> list[Any]:
    kind = float32.dtype if jnp.issubdtype(float32.dtype, np.inexact) else np.dtype(np.float32)
    x, y = float32.astype(kind), written.astype(kind)
    same = (x == y) | (xp.isnan(x) & xp.isnan(y))
    differs = ~same & ~(xp.isfinite(x) & xp.isfinite(y))
    zero = np.float32(0)
    known = xp.where(xp.isfinite(x), xp.abs(x), zero)
    largest = known.max(initial=0)
    largest = xp.where(largest > 0, largest, 1).astype(known.dtype)  # squares of normalized values do not overflow
    distance = xp.where(same | differs, zero, xp.abs(x - y)) / largest
    squares, norm = (distance**2).sum(), ((known / largest) ** 2).sum()
    error = xp.where(squares > 0, xp.sqrt(squares / norm), zero)
    return [xp.where(differs.any(), np.float32(np.inf), error)]


def is_finite(x: Any) -> bool:
    """Tests whether all values of an array are finite."""
    return _apply(_all_finite, x)[0] == 1


def _all_finite(xp: Any, x: Any) -> list[Any]:
    return [xp.isfinite(x).all()]


def is_zero(x: Any) -> bool:
    """Tests whether all values of an array are zero."""
    return _apply(_all_zero, x)[0] == 1


def _all_zero(xp: Any, x: Any) -> list[Any]:
    return [(x == 0).all()]
