"""Warnings from inside a compiled step that is stuck: the option `warn_after_skips` of the optax wrapper."""

import collections
import threading

import jax
import numpy as np

from jmpscale._base.compat import as_varying, varying_axes
from jmpscale._base.memory import to_memory_of
from jmpscale._base.text import format_number
from jmpscale._base.tree import is_traced
from jmpscale._base.warn import warn_from_program, warn_user
from jmpscale._monitoring.causes import NEVER_OVERFLOWED, USUAL_LIMIT
from jmpscale._monitoring.skip_history import SkipHistory, continues
from jmpscale._state import ScalerState

_REPORTS = 100  # the number of reports that are remembered, for devices that report later than others


class CompiledMonitor:
    """Warns about the skips of an optimizer, even from inside a compiled program; remembers them on the host.

    Each skip is judged as `RunMonitor` judges a call. Devices report in any order, so the warning about a skip depends
    on the states of the run alone. A copy, in another process for example, remembers nothing.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._history = SkipHistory(count - 1)
        self._reports = collections.deque[tuple[ScalerState, str]](maxlen=_REPORTS)
        self._is_stuck = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["CompiledMonitor"], tuple[int]]:
        return CompiledMonitor, (self._count,)  # a lock cannot be pickled

    def watch(self, finite: jax.Array, before: ScalerState, after: ScalerState) -> jax.Array:
        """Warns as the argument `warn_after_skips` of `with_loss_scaling` describes, and returns the flag `finite`.

        In a compiled program the flag depends on the callback, so the compiler keeps the callback if the program
        returns anything that depends on the flag: the updates, the state of the optimizer, or the scaler. A
        `jax.debug.callback`, which needs no result, slows down small programs on CPU.
        """
        if not any(map(is_traced, jax.tree.leaves((finite, before, after)))):
            if text := self._message(before, after):
                warn_user(text)
            return finite

        def report(finite: jax.Array, before: ScalerState, after: ScalerState) -> np.ndarray:
            if text := self._message(before, after):
                warn_from_program(text)
            return np.asarray(finite)

        def call_report(finite: jax.Array, before: ScalerState, after: ScalerState) -> jax.Array:
            reported = jax.pure_callback(report, finite, finite, before, after, vmap_method="sequential")
            return as_varying(to_memory_of(finite, reported), tuple(varying_axes(finite)))

        is_due = (after.consecutive_skips > 0) | _has_reached_limit(before, after)
        known = jax.lax.stop_gradient((finite, before, after))
        return jax.lax.cond(is_due, call_report, lambda finite, *_: finite, *known)

    def _message(self, before: ScalerState, after: ScalerState) -> str:
        """Returns the warning about a step, which another device may have reported already, or an empty text."""
        before, after = jax.tree.map(np.asarray, (before, after))
        is_skip = bool(after.consecutive_skips > 0)
        if not is_skip and not _has_reached_limit(before, after):  # under jax.vmap the callback runs for every scaler
            return ""
        with self._lock:
            for reported, text in self._reports:
                if reported == after:
                    return text
            if self._reports and not continues(self._reports[-1][0], before):  # another run
                self._reports.clear()
                self._is_stuck = False
            text = self._judge_skip(before, after) if is_skip else self._judge_growth(after)
            self._reports.append((after, text))
            return text

    def _judge_skip(self, before: ScalerState, after: ScalerState) -> str:
        self._history.remember(before)
        text, was_stuck = self._history.describe(after), self._is_stuck
        self._is_stuck = bool(text)
        # A series of skips causes one warning, and each series of consecutive ones another.
        return "" if was_stuck and after.consecutive_skips != self._count else text

    def _judge_growth(self, after: ScalerState) -> str:
        if self._history.has_overflowed(after):
            return ""
        return NEVER_OVERFLOWED.format(format_number(after.config.max_scale))


def _has_reached_limit(before: ScalerState, after: ScalerState) -> jax.Array:
    """Tests whether a dynamic scale has just reached its limit, at which float16 gradients usually overflow."""
    limit, config = np.float32(after.config.max_scale), after.config
    is_below = (before.loss_scale < limit) & (before.loss_scale * config.growth_factor >= limit)  # by one growth
    has_reached = is_below & (after.loss_scale >= limit)
    return has_reached & (config.mode == "dynamic" and config.max_scale >= USUAL_LIMIT)
