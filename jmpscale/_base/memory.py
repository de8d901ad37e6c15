"""Memory spaces: arrays in the memory of the host, with which `jax.experimental.compute_on` computes there.

JAX combines arrays of one memory space only, and scalars of any. Before JAX 0.12, the result of an operation on scalars
is always in the memory of the device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def is_on_host(x: Any) -> bool:
    """Tests whether JAX's types show that an array is in the memory of the host."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def beside(x: jax.Array, value: ArrayLike) -> ArrayLike:
    """Returns a number that can be selected in place of elements of an array: an array, if that is on the host.

    JAX would broadcast the number in the memory of the device. The array is computed from `x`, so nothing is moved.
    """
    if not x.ndim or not is_on_host(x):
        return value
    is_same = x == x
    return jnp.asarray(value, x.dtype) - (is_same & ~is_same).astype(x.dtype)  # -0.0 minus 0 is -0.0


def to_memory_of(like: ArrayLike, x: jax.Array) -> jax.Array:
    """Returns an array in the memory space of another one; compiles to nothing if it is there."""
    space = jax.typeof(like).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def on_device(x: Any) -> Any:
    """Returns an array in the memory of the device."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def stack(scalars: Sequence[jax.Array]) -> jax.Array:
    """Stacks scalars, some of which may be on the host; JAX before 0.10 stacks scalars of one memory space only."""
    return jnp.stack(list(map(on_device, scalars)))
