"""Errors and warnings between the steps of a training run that is stuck."""

import operator
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.arguments import COUNTER_LIMIT, check_count
from jmpscale._base.frameworks import averages_of_gradients
from jmpscale._base.options import requires_names
from jmpscale._base.text import format_number
from jmpscale._base.tree import PyTree, is_traced
from jmpscale._base.warn import warn_user
from jmpscale._get_scaler import find_scaler
from jmpscale._guards.checks import check_scaler, warn_if_inside_another
from jmpscale._monitoring.causes import NEVER_OVERFLOWED, USUAL_LIMIT
from jmpscale._monitoring.skip_history import SkipHistory
from jmpscale._state import ScalerState

_LOST = (
    "At {} calls total_steps of the scaler had not risen since the call before, and it never exceeded {} between them. "
    "Ignore this if no step was taken between the calls: the network is not trained yet, or gradients are accumulated "
    "over several calls. If steps were taken, the new state is lost: return it from the training step, and pass it to "
    "the next step and to the monitor. Create it once, not in each epoch. Do not put back the old state after an "
    "overflow: with_loss_scaling skips the step itself. If the loop does not call the optimizer after an overflow, the "
    "scale cannot back off: give jmpscale.scaled_backward a number and warn_if_not_finite=True. With Flax NNX, compile "
    "the step with nnx.jit, not with jax.jit."
)
_FLOAT16_MAX = 65504.0
_CALLS_WITHOUT_STEP = 3  # fewer happen in a right program, in which several hooks call the monitor


class RunMonitor:
    """Raises or warns if a training run is stuck, which it finds by comparing the counts of a scaler between calls.

    Create one for each scaler, before the loop, and call `monitor.raise_if_stuck(scaler)` between steps, at any
    intervals. It waits for the device, so call it every hundred steps, for example. After a run inside one `jax.jit`, a
    single call judges the whole run.

    `raise_if_stuck` raises a `FloatingPointError` if, with `n = max_consecutive_skips`:

    - more than `n` consecutive steps were skipped;
    - more than `n` steps were skipped, and more than were applied, since an earlier call or, at the first call, since
      the scaler was created;
    - more than `n` steps were skipped, and more than one in 25, since an earlier call; the scale was `min_scale` at
      this call and all later ones, and the most recent overflow happened at it.

    In the second and third case, overflows after which a dynamic scale backed off do not count: the initial backoff is
    a series of them, and each growth may cause another one. A scaler with other counts, such as one from a checkpoint,
    is compared with later calls only. In population-based training, where members of a batch of scalers replace each
    other, create a new monitor after each exchange.

    It warns once if the loop may lose the state: at three calls `total_steps` had not risen since the call before, and
    between them it did not exceed its largest value. This takes at least four calls, and may also happen if no step is
    taken between calls. It warns if a dynamic scale grows to a `max_scale` of 2^32 or more and, as far as the calls
    show, no step was skipped because of its gradients: the loss may be unscaled. It does not warn if the averages of
    the gradients in the optimizer state, as of Adam, are so small that they do not overflow at this scale. It also
    warns if `with_loss_scaling` is inside another transformation of optax that keeps it from its work. Several threads
    may call one monitor; a call may be late, so each further thread adds one to the three calls.

    Args:
      max_consecutive_skips: the number of consecutive skips that is acceptable, at least 1. The initial backoff skips
        some steps: from a scale of 2^16 to 1, it skips 16.

    >>> import jmpscale
    >>> monitor, scaler = jmpscale.RunMonitor(max_consecutive_skips=20), jmpscale.dynamic()
    >>> for step in range(100):
    ...     scaler = jmpscale.update(scaler, True)
    ...     monitor.raise_if_stuck(scaler)
    """

    @requires_names
    def __init__(self, *, max_consecutive_skips: int) -> None:
        self._limit = check_count("max_consecutive_skips", max_consecutive_skips)
        self._histories: list[SkipHistory] = []  # of each scaler of a batch
        self._progress: _Progress | None = None
        self._has_warned_of_loss = False
        self._threads: set[int] = set()  # those that have called
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}  # a lock cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def raise_if_stuck(self, scaler: PyTree) -> None:
        """Raises a `FloatingPointError` or warns if the run is stuck, as the class describes.

        Args:
          scaler: a scaler, a batch of scalers, or any pytree that contains exactly one.

        Raises:
          FloatingPointError: too many steps were skipped. The message states the scale, the cause and the remedy.
          ValueError: `scaler` does not contain exactly one scaler, or the call is in a compiled function.
        """
        state = _on_host(scaler)
        scalers = list(_scalers_of(state))
        warn_if_inside_another(scaler)
        if state.config.mode == "disabled" or not scalers:
            return
        with self._lock:
            lost, grows, error = self._judge(state, scalers)
        if lost:
            warn_user(lost)
        if grows and state.config.max_scale >= USUAL_LIMIT and not _are_small(scaler, state.config.max_scale):
            warn_user(NEVER_OVERFLOWED.format(format_number(state.config.max_scale)))
        if error:
            raise FloatingPointError(error)

    def _judge(self, state: ScalerState, scalers: list[ScalerState]) -> tuple[str, bool, str]:
        """Returns the warning about a lost state, whether a scale grows to its limit, and the error of a stuck run."""
        lost = ""
        self._threads.add(threading.get_ident())
        # Between two calls with the largest count, each of the other threads may call once with an earlier state.
        calls = _CALLS_WITHOUT_STEP + len(self._threads) - 1
        if self._progress is None or not self._progress.is_of(state):
            self._progress, self._histories = _Progress(state), [SkipHistory(self._limit) for _ in scalers]
        elif self._progress.ends_at(state, calls) and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            lost = _LOST.format(calls, self._progress.highest.max())
        members = list(zip(self._histories, scalers, strict=True))
        errors = [history.describe(each) for history, each in members]
        grow = [history.grows_to_limit(each) for history, each in members]
        for history, each in members:
            history.remember(each)
        return lost, any(grow), next(filter(None, errors), "")


def _are_small(tree: PyTree, scale: float) -> bool:
    """Tests whether a tree has averages of gradients, as of Adam, that do not overflow in float16 at a scale.

    It reads the shards of this process alone: a reduction over processes would wait for those that do not call it.
    """
    averages = [x for x in averages_of_gradients(tree, ("mu", "trace")) if isinstance(x, jax.Array)]
    largest = [jnp.abs(shard.data).max(initial=0) for x in averages for shard in x.addressable_shards]
    return bool(largest) and bool(max(largest) * scale <= _FLOAT16_MAX)


class _Progress:
    """The counts of steps of a scaler, or of a batch of scalers, at the calls of a monitor."""

    def __init__(self, state: ScalerState) -> None:
        self._latest, self._calls = state, 0
        self.highest: Any = state.total_steps

    def is_of(self, state: ScalerState) -> bool:
        """Tests whether a state has the settings and the shape of the earlier states."""
        return self._latest.config == state.config and self.highest.shape == state.total_steps.shape

    def ends_at(self, state: ScalerState, calls: int) -> bool:
        """Tests whether, at the last of a number of `calls`, no count has risen, and none is above its largest value.

        After a checkpoint was restored, the count is smaller once, and later above its largest value.
        """
        steps = state.total_steps
        is_above = np.any((steps > self.highest) | (steps == COUNTER_LIMIT))
        has_risen = is_above or np.any(steps > self._latest.total_steps)
        self._calls = 0 if is_above else self._calls + (not has_risen)
        self._latest, self.highest = state, np.maximum(steps, self.highest)
        return self._calls >= calls and not has_risen


def _on_host(scaler: PyTree) -> ScalerState:
    """Returns the scaler of a tree, or a batch of scalers, with NumPy arrays."""
    state = find_scaler(scaler, allow_batch=True)
    if any(map(is_traced, jax.tree.leaves(state))):
        raise ValueError(
            "raise_if_stuck reads the state, so it cannot be called in a compiled function. Call it between steps, "
            "with the state that the step returns; if a loop does not return it, use warn_after_skips of "
            "with_loss_scaling."
        )
    # Under a transformation JAX would trace operations on known arrays; a view would keep the state alive.
    return jax.tree.map(np.array, state)


def _scalers_of(state: ScalerState) -> Iterator[ScalerState]:
    """Yields the scalers of a batch on the host, or the only scaler."""
    shapes = {x.shape for x in jax.tree.leaves(state)}
    if len(shapes) > 1:  # neither a scaler nor a batch of scalers
        check_scaler(state)
    for index in np.ndindex(shapes.pop()):
        scaler = jax.tree.map(operator.itemgetter(index), state)
        check_scaler(scaler)
        yield scaler
