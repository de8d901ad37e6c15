"""Monitoring: values to log, and an error or a warning for a run that is stuck.

Nothing here changes a state.
"""

import collections
import operator
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jmpscale._base.check import check_count, warn_user
from jmpscale._base.text import format_number
from jmpscale._base.tree import PyTree, find_instances, is_traced
from jmpscale._get_scaler import find_scaler
from jmpscale._guards.scaler import check_scaler
from jmpscale._state import ARRAY_FIELDS, LARGEST_SCALE, ScalerState, SkipReason, WithLossScalingState

_CONSECUTIVE = "{} consecutive steps were skipped"
_OVERFLOW = "In the most recent skip the loss, if given, was finite, but the flag of the gradients was false. "
_CAUSES = (  # in the order of _describe_skips
    "The loss scale is invalid: the state was corrupted, in storage or by hand. Restore an older checkpoint.",
    "In the most recent skip the loss that was passed was not finite, which no loss scale can prevent, unless the loss "
    "depends on the scale, the gradients or the flag. Look for invalid data, for an overflow in the forward pass, or "
    "for parameters or optimizer state that are NaN because a step was not gated by all_finite of its gradients; "
    "jmpscale.diagnose names the line.",
    f"{_OVERFLOW}The scale cannot back off any further. Perhaps some batches have no finite gradients at any allowed "
    "scale, as with a softmax over a row in which a mask hides every value; or a sum of gradients is NaN, because a "
    "skip does not reset it; or the gradients were scaled by a different scaler: pass the state of with_loss_scaling "
    "to jmpscale.value_and_grad; or the flag for update is inverted or has other conditions. jmpscale.diagnose with "
    "such a batch names the line, or prints scales that fit: if they are smaller, decrease min_scale, or the number "
    "given to loss_scaled(fun, number); if they are larger, correct the sum or the flag.",
    f"{_OVERFLOW}The scale is static and does not back off. jmpscale.diagnose with the same batch prints the scales "
    "that fit: pass one of them to static, or to loss_scaled(fun, number).",
    f"{_OVERFLOW}These are the first skips of this run: the scale is still backing off from its initial value. Allow "
    "more skips, unless the flag for update is inverted, or call jmpscale.diagnose: it prints the scales that fit, for "
    "init_scale, or names the line if there are none.",
    f"{_OVERFLOW}The scale is still backing off. Allow more skips, or look for a change in the data or the model: "
    "jmpscale.diagnose names the line.",
)
_NEVER_SKIPPED = (
    "The loss scale has grown to its limit, {}, without a skip. Unless the gradients are very small, the loss is not "
    "scaled, or something replaces infinity and NaN before the optimizer checks them. To find out, use the scale "
    "jmpscale.static(2.0**60) in a few steps, which should be skipped."
)
_UNCHANGED = (
    "In three calls of raise_if_stuck the scaler was the same, or a new one although the previous one skipped most "
    "steps. If steps were taken between them, the new state is lost: return it from the training step, and pass it to "
    "the next step and to raise_if_stuck. Create it once, not in each epoch. Do not put back the old state after an "
    "overflow: with_loss_scaling skips the step itself. With Flax NNX, compile the step with nnx.jit, not with jax.jit."
)
_USUAL_LIMIT = 2.0**32  # the default of max_scale; a lower limit is reached without a mistake


def metrics(scaler: PyTree) -> dict[str, jax.Array]:
    """Returns the values of a scaler that are worth logging.

    Args:
      scaler: a scaler, a batch of scalers, or any pytree that contains exactly one, such as the optimizer state of
        `with_loss_scaling`.

    Returns:
      A dict of the arrays of the `ScalerState`, by the names of its fields. For an optimizer state of
      `with_loss_scaling(max_norm=...)` it also contains `grad_norm`, f32[], the global norm before clipping. The values
      are the arrays of the state itself, so read or copy them before the state is donated. `loss_scale` is the scaler's
      own; the backward pass of `loss_scaled(fun, number)` uses the number instead.

    Raises:
      ValueError: `scaler` does not contain exactly one scaler.

    >>> import jmpscale
    >>> {name: float(value) for name, value in jmpscale.metrics(jmpscale.dynamic(8.0)).items() if "scale" in name}
    {'loss_scale': 8.0}
    """
    found = find_scaler(scaler, allow_batch=True)
    values = {name: getattr(found, name) for name in ARRAY_FIELDS}
    for state in find_instances(scaler, WithLossScalingState):
        norm = jax.tree.leaves(state.grad_norm)  # an optimizer of Flax NNX wraps it; without max_norm it is None
        values |= {"grad_norm": norm[0]} if norm else {}
    return values


def raise_if_stuck(scaler: PyTree, *, max_consecutive_skips: int) -> None:
    """Raises if too many steps were skipped; call it between steps.

    It waits for the device, so call it every hundred steps, for example.

    Args:
      scaler: a scaler, a batch of scalers, or any pytree that contains exactly one.
      max_consecutive_skips: the number of consecutive skips that is acceptable, at least 1. The initial backoff skips
        some steps: from a scale of 2^16 to 1, it skips 16.

    Raises:
      FloatingPointError: more than `max_consecutive_skips` consecutive steps were skipped; or more than
        `max_consecutive_skips` in total, the scale of a dynamic scaler is `min_scale`, and the most recent overflow
        happened at this scale. The message states the scale, the cause and the remedy.
      TypeError: `max_consecutive_skips` is not an integer.
      ValueError: `scaler` does not contain exactly one scaler; `max_consecutive_skips` is below 1; or the call is in a
        compiled function.

    Warns:
      UserWarning: in three calls the scaler was the same, or a new one although the previous one skipped most steps,
        so the training loop may lose the new state; or a dynamic scale has grown to a `max_scale` of 2^32 or more
        without a skip, so the loss may be unscaled.

    >>> import jmpscale
    >>> jmpscale.raise_if_stuck(jmpscale.dynamic(), max_consecutive_skips=20)
    """
    state = find_scaler(scaler, allow_batch=True)
    limit = check_count("max_consecutive_skips", max_consecutive_skips)
    if any(map(is_traced, jax.tree.leaves(state))):
        raise ValueError(
            "raise_if_stuck reads the state, so it cannot be called in a compiled function. Call it between steps, "
            "with the state that the step returns; if a loop does not return it, use warn_after_skips of "
            "with_loss_scaling."
        )
    steps = state.finite_steps
    # Under a transformation JAX would trace operations on known arrays; a view would keep the state alive.
    state = jax.tree.map(np.array, state)
    shapes = {x.shape for x in jax.tree.leaves(state)}
    if len(shapes) > 1:  # neither a scaler nor a batch of scalers
        check_scaler(state)
    for index in np.ndindex(shapes.pop()):
        scaler_of_batch = jax.tree.map(operator.itemgetter(index), state)
        check_scaler(scaler_of_batch)
        _check_skips(scaler_of_batch, limit)
    if isinstance(steps, (jax.Array, np.ndarray)) and steps.ndim == 0 and state.config.mode != "disabled":
        _calls.add(steps, state)


def _check_skips(state: ScalerState, limit: int) -> None:
    if state.consecutive_skips > limit:
        raise FloatingPointError(_describe_skips(state, _CONSECUTIVE.format(state.consecutive_skips)))
    # A run whose scale touches the limit and recovers has no skip at the limit, or few skips in total.
    if _is_at_limit(state) and state.last_skip_reason == SkipReason.MIN_SCALE and state.total_skips > limit:
        raise FloatingPointError(_describe_skips(state, "steps are still skipped at the smallest allowed scale"))


class _Calls:
    """The latest call of `raise_if_stuck`, and the number of calls whose states cannot be the results of steps."""

    def __init__(self) -> None:
        self._steps: Callable[[], Any] = lambda: None  # refers to the array `finite_steps` of the latest call
        self._state: ScalerState | None = None  # on the host
        self._same = self._new = 0

    def add(self, steps: jax.Array | np.ndarray, state: ScalerState) -> None:
        """Warns if steps have not changed the scaler in three calls, or if the scale has grown to its limit."""
        earlier, before = self._steps(), self._state
        self._steps, self._state = weakref.ref(steps), state
        if before is None:
            return
        # The scalers of several runs may have any values, but then the earlier one still exists. A new scaler, which
        # consists of NumPy arrays, is not the result of a step.
        is_new = earlier is None and isinstance(steps, jax.Array) and _skips_most(before) and _restarts(before, state)
        self._same = self._same + 1 if earlier is steps else 0
        if is_new:
            self._new += 1
        elif earlier is not steps and not _skips_most(state):
            self._new = 0
        if self._same == 2 or (is_new and self._new == 2):
            warn_user(_UNCHANGED)
        if _has_grown_without_skip(before, state):
            warn_user(_NEVER_SKIPPED.format(format_number(state.config.max_scale)))


_calls = _Calls()


def _skips_most(state: ScalerState) -> bool:
    """Tests whether a scaler is new, has just grown, or has skipped more steps than were applied since an overflow."""
    is_early = not state.finite_steps or state.total_skips > state.finite_steps
    return bool(is_early and state.loss_scale < state.config.max_scale)


def _restarts(before: ScalerState, after: ScalerState) -> bool:
    """Tests whether no sequence of steps leads from one state to another. Only growth resets a count without a skip."""
    is_same = after.finite_steps <= before.finite_steps and after.loss_scale <= before.loss_scale
    return bool(after.total_skips < before.total_skips or (after.total_skips == before.total_skips and is_same))


class _Skip(NamedTuple):
    """A skipped step, and what the monitor says about it."""

    after: ScalerState
    step: int = 0  # counted from the first skip that the monitor remembers
    follows_growth: bool = False  # such a skip is part of the rule, and is not counted
    has_warned: bool = False  # about this skip, or an earlier one of the same series
    text: str = ""


class SkipMonitor:
    """Warns about the skips of an optimizer, even from inside a compiled program; remembers them on the host.

    Devices report in any order, so the message about a skip depends on the states of the run alone.
    """

    def __init__(self, count: int) -> None:
        self._count, self._window = count, 5 * count
        self._skips = collections.deque[_Skip](maxlen=self._window)
        self._lock = threading.Lock()

    def watch(self, before: ScalerState, after: ScalerState) -> ScalerState:
        """Warns as the argument `warn_after_skips` of `with_loss_scaling` describes, and returns the scaler `after`.

        In a compiled program its count of consecutive skips depends on the callback, so the compiler keeps it. A
        `jax.debug.callback`, which needs no result, slows down small programs on CPU.
        """
        if not any(map(is_traced, jax.tree.leaves((before, after)))):
            self._warn(before, after)
            return after

        def warn_from_program(before: ScalerState, after: ScalerState) -> jax.Array:
            return jax.pure_callback(self._warn, after.consecutive_skips, before, after, vmap_method="sequential")

        is_due = (after.consecutive_skips > 0) | _has_grown_without_skip(before, after)
        known = jax.lax.stop_gradient((before, after))
        skips = jax.lax.cond(is_due, warn_from_program, lambda _, after: after.consecutive_skips, *known)
        return after._replace(consecutive_skips=skips)

    def _warn(self, before: ScalerState, after: ScalerState) -> np.ndarray:
        before, after = jax.tree.map(np.asarray, (before, after))
        if after.consecutive_skips > 0:  # under jax.vmap the callback runs for every scaler
            with self._lock:
                text = self._remember(before, after).text
            if text:
                warnings.warn(_describe_skips(after, text), stacklevel=2)
        elif _has_grown_without_skip(before, after):
            warnings.warn(_NEVER_SKIPPED.format(format_number(after.config.max_scale)), stacklevel=2)
        return np.asarray(after.consecutive_skips)

    def _remember(self, before: ScalerState, after: ScalerState) -> _Skip:
        """Returns the record of a skip: the one that exists if another device has reported the same skip."""
        for skip in self._skips:
            if skip.after == after:
                return skip
        if self._skips and after.total_skips != self._skips[-1].after.total_skips + 1:
            self._skips.clear()  # another run
        latest = self._skips[-1] if self._skips else _Skip(before)
        has_grown = before.loss_scale > latest.after.loss_scale or before.finite_steps < latest.after.finite_steps
        steps = 1 + int(before.finite_steps) - int(latest.after.finite_steps)
        steps += after.config.growth_interval if has_grown else 0
        skip = _Skip(after, latest.step + steps, bool(has_grown), latest.has_warned and steps <= self._window)
        recent = [s for s in (*self._skips, skip) if s.step > skip.step - self._window and not s.follows_growth]
        if after.consecutive_skips == self._count:
            skip = skip._replace(has_warned=True, text=_CONSECUTIVE.format(self._count))
        elif len(recent) >= self._count and not skip.has_warned:
            text = f"{len(recent)} of the last {self._window} steps were skipped"
            skip = skip._replace(has_warned=True, text=text)
        self._skips.append(skip)
        return skip


def _has_grown_without_skip(before: ScalerState, after: ScalerState) -> jax.Array:
    """Tests whether a dynamic scale has just reached its limit, at which float16 gradients usually overflow."""
    limit, config = np.float32(after.config.max_scale), after.config
    is_below = (before.loss_scale < limit) & (before.loss_scale * config.growth_factor >= limit)  # by one growth
    has_reached = is_below & (after.loss_scale >= limit) & (after.total_skips == 0)
    return has_reached & (config.mode == "dynamic" and config.max_scale >= _USUAL_LIMIT)


def _describe_skips(state: ScalerState, skips: str) -> str:
    """Describes a state on the host, and the first cause that applies."""
    applies = (
        not 0 < state.loss_scale <= LARGEST_SCALE,  # also NaN
        state.last_skip_reason == SkipReason.LOSS,
        _is_at_limit(state),
        state.config.mode == "static",
        state.consecutive_skips == state.total_skips,
        True,
    )
    cause = next(text for holds, text in zip(applies, _CAUSES, strict=True) if holds)
    scale = format_number(np.float32(state.loss_scale))
    return f"{skips} ({state.total_skips} in total); the loss scale is {scale}. {cause}"


def _is_at_limit(state: ScalerState) -> bool:
    return bool(state.config.mode == "dynamic" and state.loss_scale <= np.float32(state.config.min_scale))
