"""Compares the changes of a training step with its changes in float32."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.text import format_percentage, format_scale, type_name, with_article
from jmpscale._base.tree import PyTree, find_instances, flatten_matching, is_array
from jmpscale._base.warn import warn_user
from jmpscale._programs.compile import compiled
from jmpscale._programs.float32 import runs_only_as_written
from jmpscale._programs.interpret import operations
from jmpscale._programs.source import place_of_error
from jmpscale._state import ScalerState
from jmpscale.testing._faults import Fault, Faults
from jmpscale.testing._runs import Run, Runs

_OVERWRITTEN = (
    "at a loss scale of {}: it is divided by the loss scale. If a backward pass returns its new value in place of a "
    "gradient, such as an amax, name it in overwrite_with_gradient of jmpscale.value_and_grad; otherwise, unscale once"
)


def check_independence(exact: Runs, scale: float) -> None:
    """Raises if a change in float32 depends on the scale, on its growth, or on a skip of the step before."""
    usual = {"scale": scale, "consecutive_skips": 0}  # as in most steps
    # At a small scale, a term of the loss that is not scaled has a large gradient.
    other = min(scale, 1.0) * 2.0**-8 if exact.is_exact else scale / 4
    variations = (
        (
            {"scale": other},
            f"at a loss scale of {format_scale(other)}. Scale every term of the loss, unscale the gradients once, as "
            "jmpscale.value_and_grad does, clip them only then, and pass the unscaled loss as value=. A custom "
            "backward pass must not clip, normalize or add constants",
        ),
        (
            {"finite_steps": exact.scaler.config.growth_interval - 1},
            "if the scale grows after the step. Unscale the gradients by the scaler from before update, and do not "
            "count steps by its finite_steps",
        ),
        ({"consecutive_skips": 1}, "after a skipped step. Read step_applied from the new state, after the update"),
    )
    expected, limit = exact.at(**usual), 0.01 if exact.is_exact else 0.4
    check_applied(expected)
    for fields, when in variations:
        if wrong := wrong_change(exact.at(**usual | fields), exact, expected, exact, limit):
            path, error = wrong
            if "scale" in fields and _is_divided_by_scale(path, expected, exact.at(**usual | {"scale": scale / 2})):
                when = _OVERWRITTEN.format(format_scale(other))
            else:
                when = f"{when}. If it describes the scaler, pass ignore={path!r}"
            raise AssertionError(f"the change of {path} differs by {format_percentage(error)} {when}.")


def _is_divided_by_scale(path: str, run: Run, run_at_half: Run) -> bool:
    """Tests whether a leaf becomes a value that is twice as large at half of the scale."""
    value, doubled = (next(np.asarray(now) for own, _, now in x.leaves if own == path) for x in (run, run_at_half))
    return bool(value.any() and np.allclose(doubled, 2 * value, rtol=1e-3, atol=0))


def check_applied(exact: Run) -> None:
    """Raises if a run in float32 is skipped."""
    if exact.skips:
        raise AssertionError(
            f"the step is skipped in float32, at a loss scale of {exact.name}. The flag for update must be true if the "
            "gradients are finite: it must not be inverted, or have other conditions, such as a limit of the norm."
        )


def wrong_change(run: Run, runs: Runs, expected: Run, exact: Runs, limit: float = 0.5) -> tuple[str, float] | None:
    """Returns the path and the error of the change, in a run, that differs most from the expected one.

    The errors of right steps in half precision are below 0.1, except for noise. A difference is noise if rounding the
    state changes either result by a similar amount, as for the gradient of a bias before a normalization, or for an
    average that has converged. It is not noise if it disappears from a state that half precision holds: then the step
    rounds the state, as an update that begins from a copy in half precision does.
    """
    norms = {
        path: np.linalg.norm(change) or np.linalg.norm(run.changes[path]) or 1.0
        for path, change in expected.changes.items()
        if np.isfinite(change).all()
    }

    def differences(one: Run, other: Run) -> dict[str, float]:
        """Returns the norms of the differences of the changes of two runs, relative to the expected changes."""
        with np.errstate(invalid="ignore"):
            errors = {path: np.linalg.norm(one.changes[path] - other.changes[path]) / norms[path] for path in norms}
        return {path: float(error) if np.isfinite(error) else math.inf for path, error in errors.items()}

    def noise(seed: int) -> dict[str, float]:
        """Returns how much rounding the state changes the results, relative to the expected changes."""
        rounding = functools.partial(_round, seed=seed)
        in_run = runs.with_numbers(rounding).with_scaler(run.old)
        in_exact = exact.with_numbers(rounding).with_scaler(expected.old)
        if in_exact.skips:
            return {}
        found = differences(in_exact, expected)
        if in_run.skips:
            return found
        of_run, remaining = differences(in_run, run), differences(in_run, in_exact)
        return {path: max(found[path], min(of_run[path], remaining[path])) for path in found}

    wrong = {path: error for path, error in differences(run, expected).items() if error > limit}
    for seed in range(4):  # noise may be small by chance
        if not wrong:
            return None
        found = noise(seed)
        wrong = {path: error for path, error in wrong.items() if not error <= 4 * found.get(path, 0.0) < math.inf}
    return max(wrong.items(), key=operator.itemgetter(1), default=None)


def _round(x: Any, seed: int) -> np.ndarray:
    """Changes numbers at random, each by up to twice the rounding of bfloat16, to numbers that half precision holds."""
    if np.iscomplexobj(x):
        return _round(x.real, seed) + 1j * _round(x.imag, seed)
    changed = x * (1 + 2.0**-8 * np.random.default_rng(seed).uniform(-1, 1, x.shape))
    return changed.astype(jnp.bfloat16).astype(x.dtype)


class InFloat32(NamedTuple):
    """A step in float32."""

    runs: Runs  # as written, if JAX cannot trace the step
    faulty: list[Runs]  # with faults in the gradients, each of which must skip the step
    has_finite_gradients: Callable[[PyTree], bool]  # whether the gradients are finite in a step from a state


def in_float32(written: Runs) -> InFloat32:
    """Returns a step in float32.

    If JAX cannot trace the step, it warns, and returns the step as written.
    """
    arrays, unflatten = flatten_matching(written.state, is_array)  # the step may read other leaves in Python
    positions = [i for i, leaf in enumerate(jax.tree.leaves(written.state)) if is_array(leaf)]
    unflatten_outputs: Callable[..., PyTree] = tuple
    decisions: list[int] = []

    def outputs(*arrays: Any) -> list[Any]:
        nonlocal unflatten_outputs, decisions
        new = written.step(unflatten(arrays))
        after, unflatten_outputs = flatten_matching(new, is_array)
        of_scalers = {id(x) for x in jax.tree.leaves(find_instances(new, ScalerState))}
        decisions = [i for i, x in enumerate(after) if id(x) in of_scalers]
        return after

    try:
        closed = jax.make_jaxpr(outputs)(*arrays)
    except Warning:  # that a filter turns into an error
        raise
    except Exception as failure:  # the step has run
        warn_user(
            f"JAX cannot trace the step, which raises {with_article(type_name(failure))}{place_of_error(failure)}, so "
            "check_step does not compare it with float32. Pass a step that jax.jit accepts: Python must not read the "
            "values of arrays in it. With Flax NNX, pass the model and the optimizer as arguments of the step."
        )
        return InFloat32(written, [], lambda _: False)
    faults = Faults(closed, with_small_scales=written.has_small_scales)
    run = compiled(lambda fault, *arrays: faults.evaluate(arrays, fault))
    has_kernels = any(runs_only_as_written(eqn) for eqn, _ in operations(closed.jaxpr))

    def evaluate(state: PyTree, fault: Fault) -> Any:
        given = jax.tree.leaves(state)
        return run(fault, *(given[i] for i in positions))

    def step(state: PyTree, fault: Fault = faults.none) -> PyTree:
        return unflatten_outputs(evaluate(state, fault)[0])

    exact = dataclasses.replace(written, step=step, is_exact=not has_kernels)
    steps = [functools.partial(step, fault=fault) for fault in faults.all(decisions)]
    faulty = [dataclasses.replace(exact, step=step) for step in steps]
    return InFloat32(exact, faulty, lambda state: bool(evaluate(state, faults.none)[1]))
