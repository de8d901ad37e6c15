"""The option `warn_after_skips` of the optax wrapper: warnings about skips, from inside a compiled program."""

import collections
import threading
from typing import NamedTuple

import jax
import numpy as np

from jmpscale._base.text import format_number
from jmpscale._base.tree import is_traced
from jmpscale._base.warn import warn_from_program, warn_user
from jmpscale._runtime.causes import CONSECUTIVE, NEVER_SKIPPED, USUAL_LIMIT, describe_skips
from jmpscale._state import ScalerState


class _Skip(NamedTuple):
    """A skipped step, and what the monitor says about it."""

    after: ScalerState
    step: int = 0  # counted from the first skip that the monitor remembers
    follows_growth: bool = False  # such a skip is part of the rule, and is not counted
    has_warned: bool = False  # about this skip, or an earlier one of the same series
    text: str = ""


class SkipMonitor:
    """Warns about the skips of an optimizer, even from inside a compiled program; remembers them on the host.

    Devices report in any order, so the message about a skip depends on the states of the run alone. A copy, in another
    process for example, remembers nothing.
    """

    def __init__(self, count: int) -> None:
        self._count, self._window = count, 5 * count
        self._skips = collections.deque[_Skip](maxlen=self._window)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["SkipMonitor"], tuple[int]]:
        return SkipMonitor, (self._count,)  # a lock cannot be pickled

    def watch(self, before: ScalerState, after: ScalerState) -> ScalerState:
        """Warns as the argument `warn_after_skips` of `with_loss_scaling` describes, and returns the scaler `after`.

        In a compiled program its count of consecutive skips depends on the callback, so the compiler keeps it. A
        `jax.debug.callback`, which needs no result, slows down small programs on CPU.
        """
        if not any(map(is_traced, jax.tree.leaves((before, after)))):
            if text := self._message(before, after):
                warn_user(text)
            return after

        def report(before: ScalerState, after: ScalerState) -> np.ndarray:
            if text := self._message(before, after):
                warn_from_program(text)
            return np.asarray(after.consecutive_skips)

        def call_report(before: ScalerState, after: ScalerState) -> jax.Array:
            return jax.pure_callback(report, after.consecutive_skips, before, after, vmap_method="sequential")

        is_due = (after.consecutive_skips > 0) | _has_grown_without_skip(before, after)
        known = jax.lax.stop_gradient((before, after))
        skips = jax.lax.cond(is_due, call_report, lambda _, after: after.consecutive_skips, *known)
        return after._replace(consecutive_skips=skips)

    def _message(self, before: ScalerState, after: ScalerState) -> str:
        """Returns the warning about a step, or an empty text."""
        before, after = jax.tree.map(np.asarray, (before, after))
        if after.consecutive_skips > 0:  # under jax.vmap the callback runs for every scaler
            with self._lock:
                text = self._remember(before, after).text
            return describe_skips(after, text) if text else ""
        if _has_grown_without_skip(before, after):
            return NEVER_SKIPPED.format(format_number(after.config.max_scale))
        return ""

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
            skip = skip._replace(has_warned=True, text=CONSECUTIVE.format(self._count))
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
    return has_reached & (config.mode == "dynamic" and config.max_scale >= USUAL_LIMIT)
