"""Traces a training step again, to observe what `autocast` does in it."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from jmpscale._autocast.observation import observe

Axes = Sequence[tuple[str, int]]  # names and sizes
_T = TypeVar("_T")
_scopes = itertools.count()


def _new_scope() -> Axes:
    """Returns an axis in whose scope JAX does not read the functions that it has traced already from a cache."""
    return ((f"jmpscale_scope_{next(_scopes)}", 1),)


def trace_with_float32_results(trace: Callable[[Axes], _T]) -> _T | None:
    """Traces a program as if all results of `autocast` were float32; returns None if they are.

    `trace` traces the program in a scope. It may fail, as for a step that reads from an iterator: the result is None.
    """
    with observe(with_float32_results=True) as observation:
        traced = _try(trace)
    return traced if observation.has_changed_results else None


def find_kept_matmuls(trace: Callable[[Axes], object]) -> tuple[str, ...]:
    """Returns the matmuls that `autocast` leaves in float32, with the reason; none if the trace fails.

    A program that has been traced does not show which functions had a derivative rule of their own.
    """
    with observe() as observation:
        traced = _try(trace)
    return () if traced is None else tuple(dict.fromkeys(observation.kept))


def _try(trace: Callable[[Axes], _T]) -> _T | None:
    try:
        return trace(_new_scope())
    except Exception:  # whatever Python code raises
        return None
