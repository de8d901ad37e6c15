"""An error or a warning, between two steps, for a training run that is stuck."""

import collections
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jmpscale._algorithm.get_scaler import find_scaler
from jmpscale._base.arguments import COUNTER_LIMIT, check_count
from jmpscale._base.options import requires_names
from jmpscale._base.text import format_number
from jmpscale._base.tree import PyTree, is_traced
from jmpscale._base.warn import warn_user
from jmpscale._guards.scaler import check_scaler
from jmpscale._runtime.causes import CONSECUTIVE, NEVER_SKIPPED, USUAL_LIMIT, describe_skips, is_at_limit
from jmpscale._state import ScalerState, SkipReason

_FIND_BATCH = (
    " To find the batches, read step_applied of the scaler after each step, which is false after a skip, and pass "
    "jmpscale.diagnose a batch that was skipped."
)
_UNCHANGED = (
    "From step {} to step {} the scaler has counted no step, or it was replaced although it skipped most steps. If "
    "steps were taken, the new state is lost: return it from the training step, and pass it to the next step and to "
    "the monitor. Create it once, not in each epoch. Do not put back the old state after an overflow: "
    "with_loss_scaling skips the step itself. If the loop does not call the optimizer after an overflow, the scale "
    "cannot back off: give jmpscale.scaled_backward a number and warn_if_not_finite=True. With Flax NNX, compile the "
    "step with nnx.jit, not with jax.jit."
)


@requires_names
def raise_if_stuck(scaler: PyTree, *, max_consecutive_skips: int) -> None:
    """Raises if a state shows that too many steps were skipped; call it between steps.

    It waits for the device, so call it every hundred steps, for example. It reads one state alone. In a training loop
    a `RunMonitor` finds more, because it compares states.

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

    >>> import jmpscale
    >>> jmpscale.raise_if_stuck(jmpscale.dynamic(), max_consecutive_skips=20)
    """
    limit = check_count("max_consecutive_skips", max_consecutive_skips)
    for state in _scalers_of(_on_host(scaler)):
        _check_skips(state, limit)


class RunMonitor:
    """Raises or warns if a training run is stuck, which it finds by comparing the states of two calls.

    Create one for each scaler, before the loop, and call `monitor.raise_if_stuck(scaler, step=step)` between steps. It
    waits for the device, so call it every hundred steps, for example. `step` is the loop's own count of the calls that
    update this scaler, `tx.update` or `jmpscale.update`; with `optax.MultiSteps` these are micro-batches. Only
    differences of `step` matter: a resumed run may pass the count of the whole run or start from zero. States are
    compared if at least `2 * max_consecutive_skips` steps lie between them. A call with the same `step` as before,
    from another hook for example, adds nothing, and a smaller `step` begins a new run.

    `raise_if_stuck` raises the errors of the function `jmpscale.raise_if_stuck`, and also a `FloatingPointError` if
    more than half of the steps between two states were skipped. Overflows after which a dynamic scale backed off do not
    count as skips here: the initial backoff is a series of them, and each growth may cause another one.

    It warns if three states in turn are equal, because the loop may lose or put back the new state, or skip steps
    itself, without calling the optimizer; and if a dynamic scale grows to a `max_scale` of 2^32 or more without a skip,
    because the loss may be unscaled.

    Args:
      max_consecutive_skips: the number of consecutive skips that is acceptable, at least 1, as in the function.

    >>> import jmpscale
    >>> monitor, scaler = jmpscale.RunMonitor(max_consecutive_skips=20), jmpscale.dynamic()
    >>> for step in range(100):
    ...     scaler = jmpscale.update(scaler, True)
    ...     monitor.raise_if_stuck(scaler, step=step)
    """

    @requires_names
    def __init__(self, *, max_consecutive_skips: int) -> None:
        self._limit = check_count("max_consecutive_skips", max_consecutive_skips)
        self._earlier: tuple[int, ScalerState] | None = None  # a step, and the state after it, on the host
        self._since, self._unchanged = 0, 0  # the step since which no step was counted, and the number of such spans
        self._rates = collections.deque([1.0], maxlen=10)  # updates per step, as far as the counters show them

    @requires_names
    def raise_if_stuck(self, scaler: PyTree, *, step: int) -> None:
        """Raises a `FloatingPointError` or warns if the run is stuck, as the class describes.

        Args:
          scaler: a scaler, a batch of scalers, or any pytree that contains exactly one.
          step: the loop's count of updates of this scaler, not a count that the training step returns.

        Raises:
          FloatingPointError: too many steps were skipped. The message states the scale, the cause and the remedy.
          TypeError: `step` is not an integer.
          ValueError: `scaler` does not contain exactly one scaler, `step` is negative, or the call is in a compiled
            function.
        """
        state = _on_host(scaler)
        now = check_count("step", step.item() if isinstance(step, (jax.Array, np.ndarray)) else step, low=0)
        scalers = list(_scalers_of(state))
        for each in scalers:
            _check_skips(each, self._limit)
        if self._earlier is None or now < self._earlier[0] or not _can_compare(self._earlier[1], state):
            self._earlier, self._unchanged = (now, state), 0
        elif scalers and state.config.mode != "disabled" and now - self._earlier[0] >= 2 * self._limit:
            start, before = self._earlier
            self._earlier = now, state
            spans = [_Span(a, b, start, now) for a, b in zip(_scalers_of(before), scalers, strict=True)]
            self._warn_if_unchanged(spans)
            # At least 1, unless step counts iterations with several updates each, as in reinforcement learning.
            self._rates.append(max(1.0, *(span.fewest_updates() / (now - start) for span in spans)))
            for span in spans:
                span.check(max(self._rates))

    def _warn_if_unchanged(self, spans: "list[_Span]") -> None:
        # The members of a batch may be replaced by each other, as in population-based training, but not all of them.
        if all(span.counts_no_step() for span in spans):
            self._since = self._since if self._unchanged else spans[0].start
            self._unchanged += 1
            if self._unchanged == 2:
                warn_user(_UNCHANGED.format(self._since, spans[0].stop))
        elif not all(_skips_most(span.after) for span in spans):  # as do scalers that each epoch creates
            self._unchanged = 0


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


def _check_skips(state: ScalerState, limit: int) -> None:
    if state.consecutive_skips > limit:
        raise FloatingPointError(describe_skips(state, CONSECUTIVE.format(state.consecutive_skips)))
    # A run whose scale touches the limit and recovers has no skip at the limit, or few skips in total.
    if is_at_limit(state) and state.last_skip_reason == SkipReason.MIN_SCALE and state.total_skips > limit:
        text = "steps are still skipped at the smallest allowed scale"
        raise FloatingPointError(describe_skips(state, text) + _FIND_BATCH)


def _can_compare(before: ScalerState, after: ScalerState) -> bool:
    """Tests whether two states may belong to one run: equal settings and shapes, and valid scales."""
    if before.config != after.config or before.loss_scale.shape != after.loss_scale.shape:
        return False
    return all(np.all((x.loss_scale > 0) & np.isfinite(x.loss_scale)) for x in (before, after))


class _Span(NamedTuple):
    """The steps between two calls of a monitor: the states of one scaler at the first and at the second call."""

    before: ScalerState
    after: ScalerState
    start: int
    stop: int

    def check(self, rate: float) -> None:
        """Raises if most updates were skipped, and warns if the scale has grown to its limit without a skip.

        `rate` is the number of updates per step.
        """
        skips, updates = self._skips(), max(round(rate * (self.stop - self.start)), self.fewest_updates())
        applied = updates - skips
        # Healthy runs on record skip at most one step in 100 after their initial backoff, so half is far from them.
        if skips - self._most_backoffs(applied) > applied:
            text = f"{skips} of the {updates} steps since step {self.start} were skipped"
            config = self.after.config
            backs_off = config.mode == "dynamic" and config.hysteresis == 1 and not is_at_limit(self.after)
            # If the scale backs off after every skip because of the gradients, most skips have the other reason.
            reason = SkipReason.LOSS if backs_off else None
            raise FloatingPointError(describe_skips(self.after, text, reason) + _FIND_BATCH)
        max_scale = self.after.config.max_scale
        if self._grows_to_limit() and max_scale >= USUAL_LIMIT:
            warn_user(NEVER_SKIPPED.format(format_number(max_scale)))

    def counts_no_step(self) -> bool:
        """Tests whether no sequence of steps leads from one state to the other."""
        before, after = self.before, self.after
        if after.total_skips != before.total_skips:
            return bool(after.total_skips < before.total_skips)
        if after.loss_scale > before.loss_scale or COUNTER_LIMIT in (after.total_skips, after.finite_steps):
            return False
        if after.config.mode == "dynamic" and after.loss_scale >= np.float32(after.config.max_scale):
            # A growth at max_scale resets finite_steps and changes nothing else.
            is_new = not before.finite_steps and not after.finite_steps
            return is_new and (self.stop - self.start) % after.config.growth_interval > 0
        return bool(after.finite_steps <= before.finite_steps)

    def fewest_updates(self) -> int:
        """Returns a lower bound of the number of updates, which the counters show."""
        before, after, config = self.before, self.after, self.after.config
        earlier, later = int(before.finite_steps), int(after.finite_steps)
        if after.loss_scale > before.loss_scale:
            growths = max(1, int(math.log(after.loss_scale / before.loss_scale) / math.log(config.growth_factor)))
            applied = max(growths * config.growth_interval - earlier, 0) + later
        else:
            applied = later - earlier if later >= earlier else later
        return max(self._skips(), 0) + applied

    def _skips(self) -> int:
        return int(self.after.total_skips) - int(self.before.total_skips)

    def _most_backoffs(self, applied: int) -> float:
        """Returns an upper bound of the number of overflows after which the rule has reduced the scale."""
        config = self.after.config
        if config.mode != "dynamic":
            return 0.0
        growths = 1 + applied // config.growth_interval
        change = growths * math.log(config.growth_factor) + math.log(self.before.loss_scale / self.after.loss_scale)
        return config.hysteresis * max(1 - change / math.log(config.backoff_factor), 0.0)

    def _grows_to_limit(self) -> bool:
        """Tests whether a dynamic scale has grown to its limit without a skip, after at least one growth."""
        before, after, config = self.before, self.after, self.after.config
        growths = 1 + (self.stop - self.start) // config.growth_interval
        is_in_reach = math.log(config.max_scale / before.loss_scale) <= growths * math.log(config.growth_factor) + 1e-6
        has_grown = before.loss_scale < np.float32(config.max_scale) <= after.loss_scale
        return bool(config.mode == "dynamic" and has_grown and is_in_reach and not after.total_skips)


def _skips_most(state: ScalerState) -> bool:
    """Tests whether a scaler is new, has just grown, or has skipped more steps than were applied since an overflow."""
    is_early = not state.finite_steps or state.total_skips > state.finite_steps
    return bool(is_early and state.loss_scale < state.config.max_scale)
