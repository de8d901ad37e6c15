"""Measures how far two changes of a state differ."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import is_real
from jmpscale._run.forms import State
from jmpscale._run.traced_run import TracedRun

# A change that is smaller, relative to the leaf, is mostly rounding in float32, too.
_NOISE = 2.0**-21
# The relative change of a state that is rounded otherwise: half of the distance between two numbers of bfloat16.
ROUNDING = 2.0**-9
# A change of the state that is large beside the distance from a minimum, and small beside the state.
LARGE_CHANGE = 0.1


class Difference(NamedTuple):
    """A change of a leaf beside its reference."""

    error: float  # the L2 norm of the difference, relative to the norm of the reference
    progress: float  # the projection of the change on the reference, relative to the norm of the reference
    is_decisive: bool  # whether the reference is more than the rounding of float32
    is_finite: bool
    is_finite_in_reference: bool


class Differences:
    """Compares the changes of the leaves of a state that hold real numbers."""

    def __init__(self, traced: TracedRun) -> None:
        self.leaves = [x for x in traced.leaves if is_real(x.value) and not x.is_of_scaler]

    def measure(self, old: State, new: State, old_reference: State, reference: State) -> list[Difference]:
        """Compares the change from an old state to a new one with the change in a reference."""
        states = old, new, old_reference, reference
        found = _fetched(_sums(*[state[x.input] for state in states]) for x in self.leaves)
        return [_difference(*map(float, x)) for x in found]

    def norms(self, old: State, new: State) -> list[float]:
        """Returns the L2 norms of changes."""
        found = _fetched(_norm(old[x.input], new[x.input]) for x in self.leaves)
        return [float(unit) * float(norm) for unit, norm in found]


def _difference(distance: float, size: float, product: float, size_of_old: float, *are_finite: float) -> Difference:
    error = math.sqrt(distance / size) if size else math.inf if distance else 0.0
    progress, is_decisive = product / size if size else 0.0, size > _NOISE**2 * size_of_old
    return Difference(error, progress, is_decisive, *map(bool, are_finite))


def _fetched(results: Iterable[Any]) -> list[Any]:
    """Returns results on the host. Programs on several simulated devices may deadlock if they are queued."""
    waits = jax.device_count() > 1
    return jax.device_get([jax.block_until_ready(x) if waits else x for x in results])


# One program for each shape compiles faster than one program for all leaves.
@jax.jit
def _sums(old: Any, new: Any, old_reference: Any, reference: Any) -> jax.Array:
    """Returns sums of squares and of products of changes, in units of the largest change of the reference."""
    dtype = jnp.promote_types(reference.dtype, np.float32)
    old, new, old_reference, reference = (x.astype(dtype) for x in (old, new, old_reference, reference))
    change, expected = (
        jnp.nan_to_num(x - y, nan=0, posinf=0, neginf=0) for x, y in ((new, old), (reference, old_reference))
    )
    largest = jnp.abs(expected).max(initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    x, y, z = (jnp.clip(v / unit, -1e12, 1e12) for v in (change, expected, jnp.nan_to_num(old_reference)))
    sums = [((x - y) ** 2).sum(), (y**2).sum(), (x * y).sum(), (z**2).sum()]
    return jnp.stack([*sums, *(jnp.isfinite(v).all().astype(dtype) for v in (new, reference))])


@jax.jit
def _norm(old: Any, new: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a unit, and the norm of a change in this unit."""
    dtype = jnp.promote_types(new.dtype, np.float32)
    change = new.astype(dtype) - old.astype(dtype)
    largest = jnp.abs(change).max(initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit, jnp.sqrt(((change / unit) ** 2).sum())


def changed(traced: TracedRun, state: State, size: float) -> State:
    """Returns a state whose arrays are changed by a relative amount of up to `size`, at random.

    Equal numbers change equally, so copies remain copies. Scalars, such as a learning rate, and scalers are unchanged.
    """
    places = [x.input for x in traced.leaves if is_real(x.value) and np.ndim(x.value) and not x.is_of_scaler]
    result = list(state)
    for i in places:
        result[i] = _changed(state[i], np.float32(size))
    return result


@jax.jit
def _changed(x: jax.Array, size: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.uint32)
    for shift, factor in ((15, 0x9E3779B1), (13, 0x85EBCA77), (16, 0xC2B2AE3D)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    change = 1 + size * (bits.astype(np.float32) * 2.0**-31 - 1)
    return x * change.astype(x.dtype)
