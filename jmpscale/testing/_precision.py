"""Compares the changes of a training step with its changes in float32."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.frameworks import is_trace_error
from jmpscale._base.text import format_percentage, format_scale
from jmpscale._base.tree import PyTree, flatten_matching, is_array
from jmpscale._diagnosis.float32 import evaluate_in_float32, runs_only_as_written
from jmpscale._diagnosis.interpret import operations
from jmpscale._diagnosis.step import UNREADABLE, compiled
from jmpscale.testing._runs import Run, Runs

_LARGEST_ERROR = 0.5  # of a change in half precision; in right steps it is below 0.1, except for noise
_ROUNDING = 2.0**-8  # the relative change of the state by which noise is recognized; bfloat16 rounds by half of it


class Reference:
    """A run of a step in float32, with whose changes the changes of other runs are compared.

    A difference is noise if rounding the state changes the result by a similar amount, as for the gradient of a bias
    before a normalization, or for an average that has converged.
    """

    def __init__(self, written: Runs, in_float32: Runs, scale: float) -> None:
        self._written, self._in_float32 = written, in_float32
        self._usual = in_float32.at(scale, consecutive_skips=0)  # as in most steps
        self._norms = {path: np.linalg.norm(change) for path, change in self._usual.changes.items()}
        rounded = in_float32.with_numbers(_round).at(scale, consecutive_skips=0)
        self._noise = self._with_noise(dict.fromkeys(self._norms, 0.0), rounded, self._usual)

    def _differences(self, run: Run, other: Run) -> dict[str, float]:
        """Returns the norm of the difference of the changes of two runs, relative to the change in float32."""
        return {path: _difference(run.changes[path], other.changes[path], norm) for path, norm in self._norms.items()}

    def _with_noise(self, noise: dict[str, float], rounded: Run, run: Run) -> dict[str, float]:
        """Returns the larger one of the noise that is known and the noise that a run from a rounded state shows."""
        found = self._differences(rounded, run)
        return {path: max(known, found[path]) if math.isfinite(found[path]) else known for path, known in noise.items()}

    def wrong_change(self, run: Run) -> tuple[str, float] | None:
        """Returns the path and the error of the change, in a run as written, that differs most from float32."""
        wrong, errors, noise = None, self._differences(run, self._usual), self._noise
        for seed in range(4):  # noise may be small by chance
            rounded = self._written.with_numbers(functools.partial(_round, seed=seed)).at(run.scale)
            noise = noise if rounded.skips else self._with_noise(noise, rounded, run)
            wrong = _largest(errors, _LARGEST_ERROR, noise)
            if wrong is None:
                break
        return wrong

    def check_independence(self, growth_interval: int) -> None:
        """Raises if a change in float32 depends on the scale, on its growth, or on a skip of the step before."""
        scale = self._usual.scale
        # At a small scale, a term of the loss that is not scaled has a large gradient.
        other = min(scale, 1.0) * 2.0**-8 if self._in_float32.is_exact else scale / 4
        self._check_equal(
            self._in_float32.at(other, consecutive_skips=0),
            f"at a loss scale of {format_scale(other)}. Scale every term of the loss, unscale the gradients once, as "
            "jmpscale.value_and_grad does, clip them only then, and pass the unscaled loss as value=",
        )
        self._check_equal(
            self._in_float32.at(scale, finite_steps=growth_interval - 1, consecutive_skips=0),
            "if the scale grows after the step. Unscale the gradients by the scaler from before update, and do not "
            "count steps by its finite_steps",
        )
        self._check_equal(
            self._in_float32.at(scale, consecutive_skips=1),
            "after a skipped step. Read step_applied from the new state, after the update",
        )

    def _check_equal(self, run: Run, when: str) -> None:
        limit = 0.01 if self._in_float32.is_exact else 0.4
        if wrong := _largest(self._differences(run, self._usual), limit, self._noise):
            path, error = wrong
            raise AssertionError(
                f"the change of state{path} differs by {format_percentage(error)} {when}. If it describes the scaler, "
                f"pass ignore={path!r}."
            )


def _largest(errors: dict[str, float], limit: float, noise: dict[str, float]) -> tuple[str, float] | None:
    """Returns the path of the largest error above a limit that is not noise, and the error."""
    wrong = [path for path, error in errors.items() if error > max(limit, 4 * noise[path])]
    return max(((path, errors[path]) for path in wrong), key=lambda item: item[1], default=None)


def _difference(one: np.ndarray, other: np.ndarray, norm: np.floating) -> float:
    """Returns the norm of a difference relative to a norm; infinity if the difference is not finite."""
    if not np.isfinite(norm):
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.linalg.norm(one - other)
    error = distance / norm if norm else float(distance > 0)
    return float(error) if np.isfinite(error) else math.inf


def _round(x: Any, seed: int = 0) -> np.ndarray:
    """Changes numbers at random, each by a fraction of about `_ROUNDING`, to numbers that half precision holds."""
    if np.iscomplexobj(x):
        return _round(x.real, seed) + 1j * _round(x.imag, seed)
    changed = x * (1 + _ROUNDING * np.random.default_rng(seed).uniform(-1, 1, x.shape))
    return changed.astype(jnp.bfloat16).astype(x.dtype)


def in_float32(written: Runs) -> Runs:
    """Returns runs that compute in float32; if JAX cannot trace the step, it warns, and returns the runs as written."""
    arrays, unflatten = flatten_matching(written.state, is_array)  # the step may read other leaves in Python
    positions = [i for i, leaf in enumerate(jax.tree.leaves(written.state)) if is_array(leaf)]
    unflatten_outputs: Callable[..., PyTree] = tuple

    def outputs(*arrays: Any) -> list[Any]:
        nonlocal unflatten_outputs
        after, unflatten_outputs = flatten_matching(written.step(unflatten(arrays)), is_array)
        return after

    try:
        closed = jax.make_jaxpr(outputs)(*arrays)
    except Exception as failure:
        if not (isinstance(failure, UNREADABLE) or is_trace_error(failure)):
            raise
        warn_user(
            "JAX cannot trace the step, so check_step does not compare it with float32. Pass a step that jax.jit "
            "accepts; with Flax NNX, one that puts the state into nnx.clone((model, optimizer))."
        )
        return written
    run = compiled(lambda *arrays: evaluate_in_float32(closed.jaxpr, closed.consts, arrays))
    has_kernels = any(runs_only_as_written(eqn) for eqn, _ in operations(closed.jaxpr))

    def step(state: PyTree) -> PyTree:
        given = jax.tree.leaves(state)
        return unflatten_outputs(run(*(given[i] for i in positions)))

    return written.with_step(step, is_exact=not has_kernels)
