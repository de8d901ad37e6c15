"""A check of a whole training step, by running it at several loss scales."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.text import describe, format_percentage
from jmpscale._base.tree import Tree, check_no_nnx_objects, is_inexact, named_leaves
from jmpscale._scaler_of_tree import find_scaler, scale_on_host
from jmpscale._state import LARGEST_SCALE, SkipReason
from jmpscale._update import update
from jmpscale.testing._precision import check_independence, in_float32, wrong_change
from jmpscale.testing._replicated import check_addressable
from jmpscale.testing._runs import Run, Runs, checked, copy, is_equal, is_inside

_RETURNED = (
    "it returned the scaler that it received. Call update, or tx.update, in every step, and return its result; carry "
    "it through jax.lax.scan; do not put back the old state. If the step accumulates gradients over several calls, "
    "check them as one step."
)
_UNSCALED = (
    "the gradients do not depend on the scaler of the state. Take them with jmpscale.value_and_grad(loss_fn)(scaler, "
    "params, batch), or let loss_scaled read the scaler; check_step cannot check a loss scale that is a number."
)
_HIDDEN = (
    "Something replaces infinity and NaN before the check, such as a clip, jnp.nan_to_num or a choice of "
    "micro-batches; or the flag is not about all gradients. If jmpscale.diagnose finds an error in the loss function, "
    "correct it first."
)
_NARROW = (
    "Parameters, unscaled gradients or averages of them are converted to float16, or a part of the backward pass is "
    "not scaled."
)


def check_step(step: Callable[[Tree], Tree], state: Tree, *, ignore: str | Sequence[str] = ()) -> None:
    """Runs a training step at several loss scales, and raises if it mishandles an overflow or the scale.

    At an infinite loss scale, and at the smallest one at which gradients overflow, the step must be skipped, reduce a
    dynamic scale, and change nothing else. At the smallest one, the loss must be finite, and a loop of steps must not
    skip all of them. A step that is skipped because of its loss must change nothing, either. Devices must agree, as for
    `assert_replicated`.

    If JAX can trace the step, it is also evaluated in float32. There, no change may depend on the scale, on whether the
    scale grows after the step, or on whether the previous step was skipped. Just below the scale at which the step is
    skipped, no change may differ from the change in float32 by more than half. Differences that rounding explains are
    accepted.

    Args:
      step: function of the training state that returns the new state, such as
        `lambda state: train_step(*state, batch)[:2]`, with a fixed batch. It runs about 15 times. If gradients are
        accumulated by hand over several calls, it makes all of these calls.
      state: pytree of all that a step changes: parameters, optimizer state, averages, batch statistics, and exactly one
        scaler. It is copied, so the step may donate its argument. This process must hold all of its arrays.
      ignore: the leaves that a skipped step may change, such as `(".step", ".rng")`: their paths in the notation of
        `jax.tree_util.keystr`, or the paths of nodes that contain them. The scaler, and the `grad_norm` of
        `with_loss_scaling`, are always ignored.

    Raises:
      AssertionError: the step is not skipped, changes the state although it is skipped, depends on the scale, or
        differs from float32; or devices differ. The message names the likely mistakes.
      TypeError: `step` is not a function, or changes the structure or the types of the state; or the state contains a
        Flax NNX object.
      ValueError: the state does not contain exactly one scaler; the scaler is disabled; `ignore` names no leaf; or
        other processes hold a part of the state.

    Warns:
      UserWarning: JAX cannot trace the step, so it is not compared with float32; or a NaN in the forward pass reduces
        a dynamic scale, because `update` receives no loss, or one that hides it.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> from jmpscale import testing
    >>> tx = jmpscale.with_loss_scaling(optax.sgd(0.1))
    >>> def step(state):
    ...     w, opt_state = state
    ...     loss, grads = jmpscale.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, w)
    ...     updates, opt_state = tx.update(grads, opt_state, w, value=loss)
    ...     return optax.apply_updates(w, updates), opt_state
    >>> testing.check_step(step, (jnp.ones(3), tx.init(jnp.ones(3))))
    """
    if not callable(step):
        raise TypeError(f"step must be a function of the state, got {describe(step)}. Call check_step(step, state).")
    remedy = "Pass (nnx.state(model), optimizer.opt_state); step puts them into nnx.clone((model, optimizer))."
    check_no_nnx_objects(state, "state", remedy)
    check_addressable(state, "state")
    scaler = find_scaler(state, "state")
    if scaler.config.mode == "disabled":
        raise ValueError("state must contain a scaler that checks gradients, got a disabled one. Use another one.")
    ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    paths = [path for path, _ in named_leaves(state)]
    if unknown := [part for part in ignored if not any(is_inside(path, part) for path in paths)]:
        raise ValueError(f"ignore must name leaves of the state, got {unknown}. The paths are {paths[:20]}.")
    exponent = round(math.log2(scale_on_host(scaler, "state")))
    runs = Runs(checked(step), copy(state), ignored)
    usual = runs.first_applied(exponent)
    for path, was, _ in usual.leaves:
        if is_inexact(was) and jnp.isnan(was).any():
            raise AssertionError(
                f"state{path} contains NaN, which hides whether a step changes it. Check an earlier state."
            )
        if not np.isfinite(usual.changes.get(path, 0)).all():
            raise AssertionError(
                f"the step was not skipped at a loss scale of {usual.name}, where state{path} becomes infinite or NaN. "
                f"{_HIDDEN}"
            )
    # A branch may run in this step only.
    if (infinite := runs.at(math.inf)).is_skipped:
        infinite.check_skipped()
    # In the state after a step, averages that were zero, and copies of parameters, are different.
    later = dataclasses.replace(runs, state=usual.after)
    exact = in_float32(later)
    check_independence(dataclasses.replace(exact, state=runs.state), usual.scale)
    _check_overflow(later, exact, later.first_applied(exponent))
    _check_invalid(runs, usual)


def _check_overflow(runs: Runs, exact: Runs, usual: Run) -> None:
    """Raises if an overflow is applied, or if a skipped step changes the state."""
    expected = exact.at(usual.scale, consecutive_skips=0)
    infinite = runs.at(math.inf)
    if not infinite.is_skipped:
        is_wrong = wrong_change(infinite, runs, expected, exact)
        is_returned = all(map(is_equal, infinite.old[:-1], infinite.new[:-1]))
        why = _RETURNED if is_returned else f"its result is wrong. {_HIDDEN}" if is_wrong else _UNSCALED
        raise AssertionError(f"the step was not skipped at an infinite loss scale: {why}")
    # The smallest scale at which the step is skipped is infinite if nothing overflows, as in float32.
    scales = [*(usual.scale * 2.0 ** np.arange(126 - math.log2(usual.scale))), LARGEST_SCALE, math.inf]
    first = bisect.bisect_left(scales, True, 1, len(scales) - 1, key=lambda scale: runs.at(scale).skips > 0)
    applied, skipped = map(runs.at, scales[first - 1 : first + 1])
    for run in (infinite, skipped):
        if run.is_skipped:  # as a whole
            run.check_skipped()
    if skipped.is_skipped and skipped.scale <= LARGEST_SCALE:
        _check_backoff(skipped, applied)
    if wrong := wrong_change(applied, runs, expected, exact):
        path, error = wrong
        # A smaller scale removes an overflow.
        is_overflow = not wrong_change(runs.at(usual.scale * 2.0**-8), runs, expected, exact)
        raise AssertionError(
            f"the change of state{path} differs from the change in float32 by {format_percentage(error)} at a loss "
            f"scale of {applied.name}. {_HIDDEN if is_overflow else _NARROW}"
        )


def _check_backoff(skipped: Run, applied: Run) -> None:
    """Raises if a skip does not lead to the next smaller scale, at which the step is applied."""
    at, new = f"at a loss scale of {skipped.name}", skipped.new
    if new.last_skip_reason == SkipReason.LOSS:
        raise AssertionError(
            f"the loss passed to update is not finite {at}: pass it alone, unscaled, in float32. It must not depend on "
            "the gradients or the flag, as statistics do. If it is not finite at any scale, jmpscale.diagnose says why."
        )
    if new.loss_scale == skipped.scale > update(skipped.old, False).loss_scale:
        raise AssertionError(f"the skipped step did not reduce the scale {at}. Do not put back the old scale.")
    if new.loss_scale <= applied.scale / 4:
        raise AssertionError(
            f"{skipped.skips} steps were skipped {at}, and none at {applied.name}: after a skip, the next step does "
            "not use the smaller scale. Take the gradients with the scaler that the loop carries, and update it once "
            "in each step."
        )


def _check_invalid(runs: Runs, usual: Run) -> None:
    """Raises if a step that is skipped because of its loss changes the state, and warns if the loss is not passed."""
    overflow = runs.with_numbers(lambda x: np.full_like(x, jnp.finfo(x.dtype).max)).at(usual.scale)
    if overflow.is_skipped:
        reset = {path: was for path, was, _ in usual.leaves}
        overflow.check_skipped(reset, ", in a state of the largest numbers")
    invalid = runs.with_numbers(lambda x: np.full_like(x, np.nan)).at(usual.scale)
    is_dynamic = invalid.old.config.mode == "dynamic"
    if is_dynamic and invalid.skips and invalid.new.last_skip_reason != SkipReason.LOSS:
        warn_user(
            "a NaN in the forward pass reduces the loss scale, because update receives no loss, or one that hides it: "
            "pass it unscaled, as value= to tx.update or as loss= to jmpscale.update, and name all mapped axes in "
            "axis_name."
        )
