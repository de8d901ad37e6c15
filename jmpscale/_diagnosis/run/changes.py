"""The changes that a step makes of its state, and its other results, beside their references."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.errors import has_slices
from jmpscale._diagnosis.thresholds import NOISE_OF_CHANGE, AcceptedErrors
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs.compile import compiled_when_called


class Change(NamedTuple):
    """The change of a leaf of the state, or another result, beside its reference."""

    result: Result
    error: float  # the relative L2 norm of the difference; infinite if only the reference is finite, or is zero
    lost: float = 0.0  # the part of the change that is missing: 1 - <written, reference> / <reference, reference>
    is_finite: bool = True  # of the reference
    is_decisive: bool = True  # whether the change is more than the rounding of float32
    is_finite_as_written: bool = True
    is_zero: bool = False  # whether the leaf changes neither as written nor in the reference
    part: int | None = None  # the slice along the first axis that is measured; None for the whole leaf
    accepted: AcceptedErrors = AcceptedErrors()

    @property
    def name(self) -> str:
        """The name of what is measured, as Python code."""
        return self.result.name + ("" if self.part is None else f"[{self.part}]")

    @property
    def is_narrow(self) -> bool:
        """Whether it is a leaf of the state that is stored in half precision."""
        return self.result.is_changed and is_narrow(self.result)

    @property
    def badness(self) -> float:
        """The error in units of the largest one that is accepted."""
        if not self.is_decisive:
            return 0.0
        return self.error / (self.accepted.narrow_change if self.is_narrow else self.accepted.change)


def measure_changes(
    results: Sequence[Result],
    olds: Sequence[Any],
    written: Sequence[Any],
    reference: Sequence[Any],
    accepted: AcceptedErrors,
) -> list[Change]:
    """Compares results, as written, with their references: their changes from old values, or their values.

    If the whole of a leaf is right, but a slice is not, it is the worst slice: of the layers, experts or members that
    it stacks, the others may hide it.
    """
    found = jax.device_get([_measure(*x) for x in zip(olds, written, reference, strict=True)])
    triples = zip(results, found, strict=True)
    return [_worst(x, whole, slices, accepted) for x, (whole, slices) in triples]


def _worst(result: Result, whole: np.ndarray, slices: np.ndarray, accepted: AcceptedErrors) -> Change:
    change = _change(result, whole)._replace(accepted=accepted)
    if change.badness > 1 or not result.is_leaf or not change.is_finite:
        return change
    parts = [_change(result, x)._replace(accepted=accepted, part=i) for i, x in enumerate(slices)]
    worst = max(parts, key=lambda x: x.badness, default=change)
    return worst if worst.badness > 1 else change


def _change(result: Result, numbers: np.ndarray) -> Change:
    not_finite, written_not_finite, nonzero, distance, size, product, old = map(float, numbers)
    if not_finite:
        return Change(result, 0.0 if written_not_finite else math.inf, is_finite=False, is_decisive=False)
    if written_not_finite:
        return Change(result, math.inf, 1.0, is_finite_as_written=False)
    # A leaf that is zero in float32 holds what rounding removes from another leaf.
    if result.is_changed and distance and not nonzero:
        return Change(result, 0.0, is_decisive=False)
    is_decisive = size > NOISE_OF_CHANGE**2 * old or not size
    error = 0.0 if not distance else math.sqrt(distance / size) if size else math.inf
    lost, is_zero = 1 - product / size if size else 0.0, not size and not error
    return Change(result, error, lost, is_decisive=is_decisive, is_zero=is_zero)


def _measure(old: Any, written: Any, reference: Any) -> Any:
    old = jnp.zeros_like(reference) if old is None else on_device(old)
    slices = _numbers_of_slices(written, reference, old) if has_slices(reference) else ()
    return _numbers_of_whole(written, reference, old), slices


@compiled_when_called
def _numbers_of_whole(written: jax.Array, reference: jax.Array, old: jax.Array) -> jax.Array:
    return _numbers(written, reference, old)


@compiled_when_called
def _numbers_of_slices(written: jax.Array, reference: jax.Array, old: jax.Array) -> jax.Array:
    return jax.vmap(_numbers)(written, reference, old)


def _numbers(written: jax.Array, reference: jax.Array, old: jax.Array) -> jax.Array:
    """Returns whether values of the reference, and as written, are not finite; if the reference is nonzero; and sums.

    The sums are over the square of the difference of the changes, of the square of the change of the reference, of
    the product of the changes, and of the square of the old value, in units of the largest change of the reference,
    because squares overflow and underflow.
    """
    dtype = jnp.promote_types(reference.dtype, np.float32)
    old = old.astype(dtype)
    not_finite = [(~jnp.isfinite(z)).astype(dtype) for z in (reference, written)]
    x, y = (jnp.where(jnp.isfinite(z), z.astype(dtype) - old, 0) for z in (written, reference))
    # One reduction with several operands compiles faster than several reductions.
    nonzero = (reference != 0).astype(dtype)
    *flags, largest, largest_written = _reduce(jnp.maximum, *not_finite, nonzero, jnp.abs(y), jnp.abs(x))
    unit = jnp.where(largest > 0, largest, jnp.maximum(largest_written, jnp.finfo(dtype).tiny))
    x, y, old = (jnp.clip(z / unit, -1e12, 1e12) for z in (x, y, old))
    sums = _reduce(jnp.add, (x - y) ** 2, y**2, x * y, old**2)
    return jnp.stack([z.astype(float) for z in (*flags, *sums)])


def _reduce(combine: Callable[[Any, Any], Any], *operands: jax.Array) -> list[jax.Array]:
    """Reduces arrays of one shape and dtype, which are not negative if `combine` is a maximum, to scalars."""
    zeros = tuple(np.zeros((), x.dtype) for x in operands)
    return list(jax.lax.reduce(operands, zeros, lambda x, y: tuple(map(combine, x, y)), range(operands[0].ndim)))
