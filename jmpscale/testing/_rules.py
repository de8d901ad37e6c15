"""What a training step must do with a scaler of its state: a check for each rule, with the likely mistakes."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jmpscale._algorithm.update import update
from jmpscale._base.text import format_percentage, format_scale
from jmpscale._base.tree import is_inexact, is_real_scalar
from jmpscale._base.types import is_narrow
from jmpscale._base.warn import warn_user
from jmpscale._state import LARGEST_SCALE, SkipReason
from jmpscale.testing._precision import check_applied, check_independence, in_float32, wrong_change
from jmpscale.testing._runs import Run, Runs, is_equal

_RETURNED = (
    "it returned the scaler that it received. Call update, or tx.update, in every step, and return its result; carry "
    "it through jax.lax.scan; do not put back the old state. If the step accumulates gradients over several calls, "
    "check them as one step."
)
_UNSCALED = (
    "the loss was not scaled, or not by the scaler of the state. Take the gradients with "
    "jmpscale.value_and_grad(loss_fn)(scaler, params, batch), or let scaled_backward read the scaler. check_step "
    "cannot check a loss scale that is a number: run a few steps with 2.0**60, all of which total_skips must count."
)
_HIDDEN = (
    "Something replaces infinity and NaN before the check, such as a clip, jnp.nan_to_num or a choice of "
    "micro-batches; or the flag is not about all gradients."
)
_BEFORE_UNSCALING = (
    " If the flag is computed from the scaled gradients, call unscale first: at scales below 1, which this scaler "
    "allows, finite gradients may become infinite."
)
_DIAGNOSE = (
    "First run jmpscale.diagnose, which names the line if the loss function overflows or rounds. If it names none, "
)
_HIDDEN_BEFORE = (
    "something replaces infinity and NaN before the gradients are unscaled, such as a clip or jnp.nan_to_num."
)
_NARROW = (
    "parameters, unscaled gradients or averages of them are converted to float16, or a part of the backward pass is "
    "not scaled."
)


def first_applied(runs: Runs) -> Run:
    """Returns an applied run at a scale of the scaler, or raises if there is none, or if it shows a mistake."""
    usual = runs.first_applied(runs.exponents) or _explain_skips(runs)
    for path, was, _ in usual.leaves:
        if is_inexact(was) and np.isnan(np.asarray(was)).any():
            raise AssertionError(f"{path} contains NaN, which hides whether a step changes it. Check an earlier state.")
    if infinite := usual.infinite_leaf():
        _explain_infinite(runs, usual, infinite)
    return usual


def _explain_infinite(runs: Runs, run: Run, path: str) -> NoReturn:
    """Raises for a step that is not skipped although a leaf becomes infinite or NaN."""
    what = f"the step was not skipped at a loss scale of {run.name}, where {path} becomes infinite or NaN"
    exact = in_float32(runs)
    in_exact = exact.runs.with_scaler(run.old)
    if in_exact.infinite_leaf() and exact.has_finite_gradients(runs.state_with(run.old)):
        rounded = [
            f"{name} is 1 in {was.dtype}"
            for name, was, _ in run.leaves
            if is_real_scalar(was) and is_narrow(was) and float(was) == 1
        ]
        hint = f" {', '.join(rounded)}, perhaps by rounding: keep it in float32." if rounded else ""
        raise AssertionError(f"{what} although all gradients are finite: the optimizer divides by zero.{hint}")
    raise AssertionError(
        f"{what}. {_HIDDEN} If jmpscale.diagnose finds an error in the loss function, correct it first."
    )


def _explain_skips(runs: Runs) -> NoReturn:
    """Raises for a step that is skipped at every scale of its scaler."""
    *_, smallest = runs.exponents
    applied = runs.first_applied(range(smallest - 8, -110, -8))
    if not applied:
        raise AssertionError(
            "the step was skipped at every loss scale. jmpscale.diagnose names the line, unless the loss is not scaled "
            "by the scaler of the state, or the flag for update is inverted: it must be true if the gradients are "
            "finite."
        )
    exact = in_float32(runs).runs
    if exact is not runs:
        check_applied(exact.at(2.0**smallest))
    limit = "its min_scale" if runs.scaler.config.mode == "dynamic" else "which is fixed"
    raise AssertionError(
        f"the step was skipped at every loss scale of the scaler, down to {format_scale(2.0**smallest)}, {limit}, but "
        f"not at {applied.name}: every step of the run would be skipped. jmpscale.diagnose prints the scaler to use."
    )


def check_handling(runs: Runs, usual: Run, exact: Runs, faulty: Sequence[Runs]) -> None:
    """Raises if a step mishandles one of the scalers of its state, while the other ones keep their scales.

    `exact` and `faulty` are the step in float32, as it is and with faults in its gradients.
    """
    # A branch may run in this step only.
    _check_skipped(runs, runs.at(math.inf), usual)
    if runs.recomputed:
        returned = dataclasses.replace(runs, state=usual.after)
        if run := _skipped_as_a_whole(returned, returned.at(math.inf)):
            returned.check_recomputed(run)
    # An average of parameters may still be a copy of them, as after a step with a learning rate of zero.
    later = dataclasses.replace(runs, state=usual.after).with_different_copies()
    check_independence(exact.of_state(runs), usual.scale)
    _check_overflow(later, exact.of_state(later), [run.of_state(later) for run in faulty])
    _check_growth(runs, usual)
    _check_invalid(runs, usual)


def _check_skipped(
    runs: Runs, run: Run, applied: Run, reset: Mapping[str, Any] = MappingProxyType({}), numbers: str = ""
) -> None:
    """Raises if a step that is skipped as a whole changes the state."""
    if skipped := _skipped_as_a_whole(runs, run):
        runs.check_skipped(skipped, applied, reset, numbers)


def _skipped_as_a_whole(runs: Runs, run: Run) -> Run | None:
    """Returns a run that is skipped as a whole, with several scalers by all of them; None if the run is not skipped."""
    if len(run.all_skips) > 1:
        run = runs.at(run.scale, others=math.inf)
    return run if run.is_skipped and all(run.all_skips) else None


def _check_overflow(runs: Runs, exact: Runs, faulty: Sequence[Runs]) -> None:
    """Raises if an overflow is applied, or if a skipped step changes the state."""
    usual = first_applied(runs)
    expected = exact.at(usual.scale, consecutive_skips=0)
    infinite = runs.at(math.inf)
    if not infinite.is_skipped:
        is_returned = all(map(is_equal, infinite.old[:-1], infinite.new[:-1]))
        is_scaled = not infinite.has_result_of(runs.at(usual.scale))
        why = _RETURNED if is_returned else f"its result is wrong. {_HIDDEN}" if is_scaled else _unscaled(runs, usual)
        raise AssertionError(f"the step was not skipped at an infinite loss scale: {why}")
    _check_skipped(runs, infinite, usual)
    # The smallest scale at which the step is skipped is infinite if nothing overflows, as in float32.
    scales = [*(usual.scale * 2.0 ** np.arange(126 - math.log2(usual.scale))), LARGEST_SCALE, math.inf]
    first = bisect.bisect_left(scales, True, 1, len(scales) - 1, key=lambda scale: runs.at(scale).skips > 0)
    applied, skipped = map(runs.at, scales[first - 1 : first + 1])
    _check_skipped(runs, skipped, usual)
    if skipped.is_skipped and skipped.scale <= LARGEST_SCALE:
        _check_backoff(skipped, applied)
    _check_faults(faulty, exact, expected)
    if wrong := wrong_change(applied, runs, expected, exact):
        path, error = wrong
        if lost := _lost_by_dtype(applied, expected, path):
            raise AssertionError(lost)
        # A smaller scale removes an overflow.
        is_overflow = not wrong_change(runs.at(usual.scale * 2.0**-8), runs, expected, exact)
        why = _DIAGNOSE + (_HIDDEN_BEFORE if is_overflow else _NARROW)
        raise AssertionError(
            f"the change of {path} differs from the change in float32 by {format_percentage(error)} at a loss "
            f"scale of {applied.name}. {why}"
        )


def _check_faults(faulty: Sequence[Runs], exact: Runs, expected: Run) -> None:
    """Raises if infinite gradients of a group change the state, or count as more than one overflow."""
    errors: list[AssertionError] = []  # less likely than that the flag is not about all gradients
    for runs in faulty:
        run = runs.at(expected.scale, consecutive_skips=0)
        if any(run.all_skips):
            try:
                _check_skipped_fault(runs, run, expected)
            except AssertionError as error:
                errors.append(error)
        elif wrong := wrong_change(run, runs, expected, exact):  # the step may not use these gradients
            path, difference = wrong
            raise AssertionError(
                "the step was not skipped when a part of the unscaled gradients was infinite: the change of "
                f"{path} differs by {format_percentage(difference)}. {_HIDDEN} Call all_finite with all "
                "gradients; place a clip, or a transformation such as optax.scale_by_sign, inside with_loss_scaling."
                f"{_BEFORE_UNSCALING if runs.has_small_scales else ''}"
            )
    if errors:
        raise errors[0]


def _check_skipped_fault(runs: Runs, run: Run, expected: Run) -> None:
    if (count := max(run.all_skips)) > 1:
        raise AssertionError(
            f"one overflow counted as {count} skips: the scaler is updated more than once in a step. Call update once; "
            "with_loss_scaling updates its own scaler."
        )
    if run.is_skipped and len(run.all_skips) == 1:
        runs.check_skipped(run, expected)
    if path := run.infinite_leaf():
        raise AssertionError(
            f"{path} becomes infinite or NaN when a part of the gradients is infinite, although a scaler counts a "
            "skip. Gate it by the flag of these gradients."
        )


def _check_backoff(skipped: Run, applied: Run) -> None:
    """Raises if a skip does not lead to the next smaller scale, at which the step is applied."""
    at, new = f"at a loss scale of {skipped.name}", skipped.new
    if new.last_skip_reason == SkipReason.LOSS:
        raise AssertionError(
            f"the loss passed to update is not finite {at}: pass the unscaled loss, in float32, without anything that "
            "is computed from the gradients, such as their norm. If the loss is not finite at any scale, "
            "jmpscale.diagnose says why."
        )
    reduced = skipped.old
    for _ in range(skipped.skips):
        reduced = update(reduced, False)
    if new.loss_scale == skipped.scale > reduced.loss_scale:
        raise AssertionError(f"the skipped step did not reduce the scale {at}. Do not put back the old scale.")
    # Of several steps, the second one may overflow as well: the first one has changed no parameter.
    if skipped.skips > 2 and new.loss_scale < 1.001 * skipped.scale * new.config.backoff_factor**3:
        raise AssertionError(
            f"{_count_skips(skipped.skips)} {at}, and none at {applied.name}: after a skip, the next step does "
            "not use the smaller scale. Take the gradients with the scaler that the loop carries, and update it once "
            "in each step."
        )
    if not math.isclose(new.loss_scale, reduced.loss_scale, rel_tol=1e-6):
        raise AssertionError(
            f"{_count_skips(skipped.skips)} {at}, and the scale became {format_scale(float(new.loss_scale))}, not "
            f"{format_scale(float(reduced.loss_scale))}, as backoff_factor requires. Return the scaler of update as it "
            "is, and give the settings to dynamic."
        )


def _count_skips(count: int) -> str:
    return "1 step was skipped" if count == 1 else f"{count} steps were skipped"


def _check_growth(runs: Runs, usual: Run) -> None:
    """Raises if finite steps do not let a dynamic scale grow."""
    config = runs.scaler.config
    scale = min(usual.scale, config.max_scale / config.growth_factor)
    if config.mode != "dynamic" or not config.min_scale <= scale < config.max_scale:
        return
    remedy = "Call update in every step, also if the gradients are finite, and return its scaler as it is."
    first, last = (runs.at(scale, finite_steps=count) for count in (0, config.growth_interval - 1))
    if not (first.skips or first.new.finite_steps > 0 or first.new.loss_scale > scale):
        raise AssertionError(f"finite_steps is still 0 after a finite step, so the scale never grows. {remedy}")
    if not (last.skips or last.new.loss_scale > scale):
        raise AssertionError(
            f"the scale does not grow from {last.name} after growth_interval finite steps, so after an early overflow "
            f"it stays low. {remedy} To limit the scale, use max_scale."
        )


def _unscaled(runs: Runs, usual: Run) -> str:
    """Returns why a step is not skipped at an infinite scale of its scaler: perhaps another leaf holds the scale."""
    for path, was, _ in usual.leaves:
        if not is_real_scalar(was):
            continue
        run = runs.with_leaf(path, np.inf).at(usual.scale)
        if run.skips and run.new.last_skip_reason == SkipReason.GRADIENTS:
            return (
                f"the loss is scaled by {path}, not by the scaler of the state. If it is a variable of Flax NNX, it "
                "was the scaler's until optimizer.opt_state was assigned: assign it again, or change the state by "
                "nnx.update, which keeps it."
            )
    return _UNSCALED


def _lost_by_dtype(applied: Run, expected: Run, path: str) -> str:
    """Returns a message if the dtype of a leaf explains a wrong change, as the leaf cannot hold it; or nothing."""
    was = next(was for own, was, _ in expected.leaves if own == path)
    change = expected.changes[path]
    if not is_narrow(was):
        return ""
    old = np.asarray(was).astype(np.float64)
    stored = (old + change).astype(was.dtype).astype(np.float64) - old
    lost = float(np.linalg.norm(stored - change) / np.linalg.norm(change))
    if lost < 0.5:
        return ""
    return (
        f"{path} is {was.dtype}, and its change is below its rounding: {format_percentage(lost)} of the change is "
        "lost. Keep it in float32, and convert a copy where it is used."
    )


def _check_invalid(runs: Runs, usual: Run) -> None:
    """Raises if a step that is skipped because of its loss changes the state, and warns if the loss is not passed."""
    # One number, so that a float32 copy of a parameter in half precision still rounds to the parameter.
    dtypes = {jnp.result_type(was) for _, was, _ in usual.leaves if is_inexact(was)}
    largest = min((float(jnp.finfo(dtype).max) for dtype in dtypes), default=math.inf)
    numbers = runs.with_numbers(lambda x: np.full_like(x, largest))
    overflow = numbers.at(usual.scale)
    if overflow.is_skipped:
        reset = {path: was for path, was, _ in usual.leaves}
        _check_skipped(numbers, overflow, usual, reset, ", in a state of the largest numbers")
    invalid = runs.with_numbers(lambda x: np.full_like(x, np.nan)).at(usual.scale)
    is_dynamic = invalid.old.config.mode == "dynamic"
    if is_dynamic and invalid.skips and invalid.new.last_skip_reason != SkipReason.LOSS:
        warn_user(
            "update does not see that the loss is not finite, so it reduces the loss scale: pass the unscaled loss, as "
            "value= to tx.update or as loss= to jmpscale.update, and name all mapped axes in axis_name."
        )
