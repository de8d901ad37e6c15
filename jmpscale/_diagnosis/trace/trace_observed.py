"""Traces a training step, and observes what `autocast` does in it."""

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


def trace_observed(trace: Callable[[Axes], _T]) -> tuple[_T, tuple[str, ...]]:
    """Traces a program; returns it and the matmuls that `autocast` leaves in float32, with the reason.

    `trace` traces the program in a scope. The program does not show which functions had a derivative rule of their own.
    """
    with observe() as observation:
        traced = trace(_new_scope())
    return traced, tuple(dict.fromkeys(observation.kept))


def trace_with_float32_results(trace: Callable[[Axes], _T]) -> _T | None:
    """Traces a program again, as if all results of `autocast` were float32; returns None if they are.

    It may fail, as for a step that reads from an iterator: the result is None.
    """
    with observe(with_float32_results=True) as observation:
        try:
            traced = trace(_new_scope())
        except Exception:  # whatever Python code raises
            return None
    return traced if observation.has_changed_results else None
