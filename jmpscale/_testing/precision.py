"""Compares a training step with the same step in float32."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.frameworks import is_trace_error
from jmpscale._base.tree import PyTree, flatten_matching, is_array, is_inexact
from jmpscale._diagnosis.float32 import evaluate_in_float32
from jmpscale._diagnosis.step import UNREADABLE, compiled
from jmpscale._testing.runs import Run, Runs

_LARGEST_ERROR = 0.5  # of a change; in right steps it is below 0.1, except for noise
_ROUNDING = 2.0**-8  # the relative change of the state by which noise is recognized; bfloat16 rounds by half of it


def check_precision(runs: Runs, run: Run) -> None:
    """Raises if a change of a run differs much from the change in float32, unless rounding can be the reason.

    Rounding can be the reason if rounding the state changes the result by a similar amount, as for the gradient of a
    bias before a normalization, or for an average that has converged.
    """
    state = runs.state_at(run.scale)
    try:
        step = _in_float32(runs.step, state)
    except Exception as failure:
        if not (isinstance(failure, UNREADABLE) or is_trace_error(failure)):
            raise
        warn_user(
            "JAX cannot trace the step, so check_step does not compare it with float32. Pass a step that jax.jit "
            "accepts; with Flax NNX, one that puts the state into nnx.clone((model, optimizer))."
        )
        return
    written, expected = measured = _changes(run), _changes(runs.result(state, step(state)))
    rounded = runs.with_numbers(_round)
    state = rounded.state_at(run.scale)
    others = _changes(rounded.at(run.scale)), _changes(rounded.result(state, step(state)))
    for path, change in expected.items():
        error = _difference(written[path], change, change)
        noise = max(_difference(x[path], y[path], change) for x, y in zip(measured, others, strict=True))
        if error > max(_LARGEST_ERROR, 4 * noise):
            raise AssertionError(
                f"the change of state{path} differs from the change in float32 by {error:.0%} at a loss scale of "
                f"{run.name}. Either an overflow is hidden, by a clip, by a choice of micro-batches or by a flag that "
                "is not about all gradients; or a part of the backward pass is not scaled; or unscaled gradients, or "
                "averages of them, are converted to float16. If jmpscale.diagnose finds the error in the loss "
                "function, correct it there."
            )


def _round(x: np.ndarray) -> np.ndarray:
    """Changes numbers at random, each by a fraction of at most `_ROUNDING`."""
    return x * (1 + _ROUNDING * np.random.default_rng(0).uniform(-1, 1, x.shape))


def _in_float32(step: Callable[[Any], Any], state: PyTree) -> Callable[[Any], Any]:
    """Returns a step that computes in float32."""
    unflatten_outputs: Callable[..., PyTree] = tuple

    def outputs(*arrays: Any) -> list[Any]:
        nonlocal unflatten_outputs
        leaves, unflatten_outputs = flatten_matching(step(unflatten(arrays)), is_array)
        return leaves

    arrays, unflatten = flatten_matching(state, is_array)
    closed = jax.make_jaxpr(outputs)(*arrays)
    run = compiled(lambda *arrays: evaluate_in_float32(closed.jaxpr, closed.consts, arrays))
    return lambda state: unflatten_outputs(run(*flatten_matching(state, is_array)[0]))


def _changes(run: Run) -> dict[str, np.ndarray]:
    return {path: _wide(now) - _wide(was) for path, was, now in run.leaves if is_inexact(was)}


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    return np.where(np.isfinite(x), x, 0)


def _difference(one: np.ndarray, other: np.ndarray, unit: np.ndarray) -> float:
    """Returns the norm of the difference of two arrays, relative to the norm of a third one."""
    norm = np.linalg.norm(unit)
    return float(np.linalg.norm(one - other) / norm) if norm else 0.0
