"""The magnitudes of the results of a program, as `range_report` records them.

`measure` computes the statistics of one result. The other functions combine them: over the iterations of a loop, the
branches of a conditional, and devices.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jmpscale._base.compat import varying_axes

MAX_UNDERFLOW = 0.01  # of the L1 norm of a result, at the smallest scale that fits
FINITE, INFINITE, NAN = 0, 1, 2
_PVARY = None if hasattr(jax.lax, "pcast") else getattr(jax.lax, "pvary", None)


class Smallest(NamedTuple):
    """The execution of an operation that has the smallest magnitudes."""

    exponent: jax.Array  # i32[], such that values with smaller exponents have at most MAX_UNDERFLOW of the L1 norm
    counts: jax.Array
    steps: jax.Array


class Range(NamedTuple):
    """The magnitudes of a result."""

    counts: jax.Array  # f32[256], how many nonzero finite values have each exponent (the bits of float32)
    max_abs: jax.Array  # f32[], of the finite values
    steps: jax.Array  # i32[loops], the iterations with the largest magnitude, of the outermost loop first
    smallest: Smallest | None  # of the iterations of loops that are separate, if there are any


class Statistics(NamedTuple):
    """Statistics of a result over all executions of the operation."""

    kind: jax.Array  # i32[], FINITE, INFINITE or NAN: the worst of its values
    range: Range | None  # None if the program would not hold the result in half precision


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Combines the statistics of two executions of an operation."""
    merged = None
    if a.range is not None and b.range is not None:
        steps = jnp.where(b.range.max_abs > a.range.max_abs, b.range.steps, a.range.steps)
        counts = a.range.counts + b.range.counts
        smallest = a.range.smallest
        if smallest is not None and b.range.smallest is not None:
            is_smaller = b.range.smallest.exponent < smallest.exponent
            smallest = jax.tree.map(functools.partial(jnp.where, is_smaller), b.range.smallest, smallest)
        merged = Range(counts, jnp.maximum(a.range.max_abs, b.range.max_abs), steps, smallest)
    return Statistics(jnp.maximum(a.kind, b.kind), merged)


def at_step(statistics: list[Statistics], index: jax.Array, separate: Sequence[bool]) -> list[Statistics]:
    """Adds the iteration of a loop to the iterations of the loops inside it.

    Args:
      statistics: of the operations in the loop, in one iteration.
      index: i32[], the iteration.
      separate: for each operation, whether the iterations are like different operations.
    """
    step = index.astype(np.int32)[None]

    def at_step(statistics: Statistics, is_separate: bool) -> Statistics:
        found = statistics.range
        if found is None:
            return statistics
        smallest = None
        if is_separate:
            smallest = found.smallest or Smallest(
                _smallest_exponent(found.counts), found.counts, jnp.zeros(0, np.int32)
            )
            smallest = smallest._replace(steps=jnp.concatenate([step, smallest.steps]))
        found = found._replace(steps=jnp.concatenate([step, found.steps]), smallest=smallest)
        return statistics._replace(range=found)

    return list(map(at_step, statistics, separate))


def nothing_like(statistics: list[Statistics]) -> list[Statistics]:
    """Returns the statistics of operations that were not executed."""

    def empty(statistics: Statistics) -> Statistics:
        found = statistics.range
        if found is not None:
            smallest = found.smallest and jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found.smallest)
            smallest = smallest and smallest._replace(exponent=jnp.int32(256))
            steps = jnp.zeros(found.steps.shape, np.int32)
            found = Range(jnp.zeros(256, np.float32), jnp.float32(-1), steps, smallest)
        return _varying(Statistics(jnp.int32(FINITE), found), varying_axes(statistics.kind))

    return list(map(empty, statistics))


def measure(x: jax.Array, in_half: bool) -> Statistics:
    """Returns the statistics of a result."""
    measure = _measure_values if in_half else _measure_kind
    mesh = jax.typeof(x).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # With Explicit axes JAX would require the sharding of each intermediate array.
        in_auto_mode: Any = jax.sharding.auto_axes(measure, out_sharding=jax.P())
        return in_auto_mode(x)
    return _varying(measure(x), varying_axes(x))


@jax.jit
def _measure_values(x: jax.Array) -> Statistics:
    x = x.astype(np.float32)
    exponents = jax.lax.shift_right_logical(jax.lax.bitcast_convert_type(x, np.int32), np.int32(23)) & np.int32(255)
    counts = jnp.zeros(257, np.int32).at[exponents.ravel() + jnp.isnan(x).ravel().astype(np.int32)].add(np.int32(1))
    kind = jnp.where(counts[256] > 0, np.int32(NAN), (counts[255] > 0).astype(np.int32))
    counts = counts[:256].at[np.array([0, 255])].set(np.int32(0))  # zeros and infinities
    max_abs = jnp.where(jnp.isfinite(x), jnp.abs(x), np.float32(0)).max(initial=0)
    return Statistics(kind, Range(counts.astype(np.float32), max_abs, jnp.zeros(0, np.int32), None))


@jax.jit
def _measure_kind(x: jax.Array) -> Statistics:
    kinds = jnp.isnan(x).astype(np.int32) + (jnp.logical_not(jnp.isfinite(x))).astype(np.int32)
    return Statistics(kinds.max(initial=FINITE), None)


def _smallest_exponent(counts: jax.Array) -> jax.Array:
    exponents = np.arange(256, dtype=np.int32)
    largest = jnp.where(counts > 0, exponents, np.int32(-1)).max()
    # Relative to the largest exponent, so that no norm overflows; there are no values above it.
    norms = jnp.cumsum(counts * jnp.exp2(jnp.minimum(exponents - largest, 0).astype(np.float32)))
    exponent = (norms <= np.float32(MAX_UNDERFLOW) * norms[-1]).sum(dtype=np.int32)
    return jnp.where(largest < 0, np.int32(256), exponent)


def over_devices(statistics: Statistics, axes: Collection[str]) -> Statistics:
    """Combines statistics over the devices along manual mesh axes."""
    axes = tuple(sorted(axes))
    if not axes:
        return statistics
    kind, found = jax.lax.pmax(statistics.kind, axes), statistics.range
    if found is None:
        return Statistics(kind, None)
    max_abs = jax.lax.pmax(found.max_abs, axes)
    steps = _steps_of(found.max_abs == max_abs, found.steps, axes)
    smallest = found.smallest
    if smallest is not None:
        exponent = jax.lax.pmin(smallest.exponent, axes)
        smallest_steps = _steps_of(smallest.exponent == exponent, smallest.steps, axes)
        smallest = Smallest(exponent, jax.lax.psum(smallest.counts, axes), smallest_steps)
    return Statistics(kind, Range(jax.lax.psum(found.counts, axes), max_abs, steps, smallest))


def _steps_of(is_chosen: jax.Array, steps: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the iterations of a chosen device; of several ones, the last in lexicographic order."""
    found = []
    for step in steps:
        found.append(jax.lax.pmax(jnp.where(is_chosen, step, np.int32(-1)), axes))
        is_chosen = is_chosen & (step == found[-1])
    return jnp.array(found, np.int32)


def _varying(statistics: Statistics, axes: Collection[str]) -> Statistics:
    """Returns statistics of which all vary over the same mesh axes, as the types of loops and branches require."""

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        if not missing:
            return x
        # JAX has replaced jax.lax.pvary by pcast.
        return _PVARY(x, missing) if _PVARY else jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(vary, statistics)
