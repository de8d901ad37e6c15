"""The first element in which two leaves differ, for messages, which do not print whole arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.text import truncate


class FirstDifference(NamedTuple):
    """Two elements that differ, as texts, and their place as `, at [0, 3]`; of a scalar, an empty text."""

    one: str
    other: str
    place: str


def first_difference(one: Any, other: Any) -> FirstDifference:
    """Compares two leaves of equal shape bit for bit; `one` may have another dtype, in which case it is converted."""
    old, new = map(_values, (one, other))
    old = old.astype(new.dtype)
    if not new.shape:
        return FirstDifference(truncate(old), truncate(new), "")
    index = tuple(map(int, np.argwhere(_bits(old) != _bits(new))[0, :-1]))
    return FirstDifference(str(old[index]), str(new[index]), f", at {list(index)}")


def _values(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of each element along a new last axis."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.itemsize)
