"""Checks of arguments.

An error names the argument, its value and a remedy. Values of arrays are never read.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpscale._base.text import describe, format_number, type_name

COUNTER_LIMIT = int(np.iinfo(np.int32).max)


def check_flag(finite: ArrayLike) -> None:
    """Raises if `finite` is not a boolean scalar."""
    dtype = getattr(finite, "dtype", bool if isinstance(finite, bool) else None)
    if dtype is None or dtype != np.dtype(bool):
        raise TypeError(f"finite must be a boolean, got {describe(finite)}. Pass the result of all_finite.")
    if (shape := jnp.shape(finite)) != ():
        raise ValueError(f"finite must be a scalar, got shape {shape}. Combine with .all(), or call under jax.vmap.")


def check_count(name: str, value: object, low: int = 1) -> int:
    """Returns `value` as a Python int of at least `low` that fits a 32-bit counter, or raises."""
    remedy = "Pass a count in this range; counters have 32 bits."
    return int(check_in_range(name, value, low, COUNTER_LIMIT, remedy, kind=int))


def check_in_range(
    name: str, value: Any, low: float, high: float, remedy: str, kind: type[int] | type[float] = float
) -> float:
    """Returns `value` as a Python number of a kind in `[low, high]`, or raises with the remedy."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise TypeError(
            f"{name} must be a Python {kind.__name__}, got {describe(value)} of type {type_name(value)}. Convert a "
            f"concrete value with {kind.__name__}(); a traced value cannot be a setting of a compiled program."
        )
    if not low <= value <= high:
        limits = f"{format_number(low)} and {format_number(high)}"
        got = describe(value) if isinstance(value, int) else format_number(value)
        raise ValueError(f"{name} must be between {limits}, got {got}. {remedy}")
    return kind(value)


def as_dtype(value: object) -> np.dtype | None:
    """Returns the dtype that a value names; None for other values, such as arrays, which NumPy would accept too."""
    try:
        return np.dtype(value) if isinstance(value, (str, type, np.dtype)) else None
    except (TypeError, ValueError):
        return None


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {describe(value)}.")
