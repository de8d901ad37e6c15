"""Measures state that rounding leaves right although its change differs: another leaf of it, or chance, makes up.

In Kahan summation, and in a number that is stored as a sum of two, another leaf takes the part that rounding removes.
In stochastic rounding, a change that is below the last place is made sometimes, so that it is right on average.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._diagnosis.thresholds import DRAWS
from jmpscale._diagnosis.trace.operations import of_moved
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs import flow
from jmpscale._programs.compile import compiled_when_called
from jmpscale._programs.jaxpr import Caller


class Pair(NamedTuple):
    """The change of a sum of two leaves, or of their difference, of which one takes what rounding removes."""

    cancels: float  # the norm of its error, relative to the smaller one of the errors of the leaves
    error: float  # relative to its change


class Values(NamedTuple):
    """The new value of a leaf."""

    written: Any
    reference: Any
    old: Any


def compare_pair(x: Values, y: Values) -> Pair:
    """Compares the sum of two leaves, or their difference if it is more exact, with the reference."""
    found = [_compare_pair(x, y, np.float32(sign)) for sign in (1, -1)]
    return min(Pair(*map(float, numbers)) for numbers in jax.device_get(found))


@compiled_when_called
def _compare_pair(x: Values, y: Values, sign: jax.Array) -> jax.Array:
    errors = [z.written - z.reference for z in (x, y)]
    change = x.reference - x.old.astype(np.float32) + sign * (y.reference - y.old.astype(np.float32))
    first, second, total, size = map(_norm, (*errors, errors[0] + sign * errors[1], change))
    return jnp.stack([total / jnp.minimum(first, second), total / size])


def redraws(program: Program, consts: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the constants of a program with other random keys, a few times; nothing if it has no keys."""
    keys = _find_keys(program)
    for draw in range(1, DRAWS + 1) if keys else ():
        yield [_other_key(x, draw) if i in keys else x for i, x in enumerate(consts)]


def _find_keys(program: Program) -> set[int]:
    """Returns the positions of random keys among the constants of a program, typed ones and arrays of integers."""

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        if eqn.primitive.name == "random_wrap":
            found.update(flow.union(operands))
        return of_moved(eqn, caller, operands)

    found: set[int] = set()
    consts = list(enumerate(program.consts))
    labels = [frozenset([i]) if x.dtype == np.uint32 else flow.NONE for i, x in consts]
    flow.follow(program.jaxpr, rule, constants=labels)
    return found | {i for i, x in consts if _is_key(x)}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _other_key(key: Any, draw: int) -> Any:
    bits = np.uint32(0x9E3779B9 * draw & 0xFFFFFFFF)
    if not _is_key(key):
        return key ^ bits
    return jax.random.wrap_key_data(jax.random.key_data(key) ^ bits, impl=jax.random.key_impl(key))


class ErrorsOfDraws:
    """The errors of a leaf, added up over several draws of random numbers."""

    def __init__(self) -> None:
        self._error: Any = np.float32(0)
        self._change: Any = np.float32(0)
        self._squares = 0.0

    def add(self, x: Values) -> None:
        error, change, norm = _error(x)
        self._error, self._change = self._error + error, self._change + change
        self._squares += float(norm) ** 2

    @property
    def remains(self) -> float:
        """The norm of the mean error, relative to the root mean square: 1 / sqrt(DRAWS) if it is random, 1 if not."""
        size = math.sqrt(DRAWS * self._squares)
        return float(_norm(self._error)) / size if size else 0.0

    @property
    def error(self) -> float:
        """What remains of the mean error without the part that is random, relative to the mean change."""
        size, mean = (float(_norm(x)) / DRAWS for x in (self._change, self._error))
        variance = (self._squares / DRAWS - mean**2) / (DRAWS - 1)  # of the mean
        return math.sqrt(max(0.0, mean**2 - variance)) / size if size else 0.0


@compiled_when_called
def _error(x: Values) -> tuple[jax.Array, jax.Array, jax.Array]:
    error = x.written - x.reference
    return error, x.reference - x.old.astype(error.dtype), _norm(error)


@jax.jit
def _norm(x: jax.Array) -> jax.Array:
    # In units of the largest value, because squares underflow.
    unit = jnp.maximum(jnp.abs(x).max(initial=0), jnp.finfo(np.float32).tiny)
    return unit * jnp.linalg.norm((x / unit).ravel())
