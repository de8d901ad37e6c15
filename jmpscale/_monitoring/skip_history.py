"""The rule by which a training run is stuck: the counts of a scaler, compared with its counts at earlier steps."""

import collections
import math
from typing import Any

import numpy as np

from jmpscale._monitoring.causes import CONSECUTIVE, FIND_BATCH, describe_skips, is_at_limit
from jmpscale._state import ScalerState, SkipReason

# At min_scale a run is stuck if more than one step in so many is skipped. At fewer skips, min_scale may be the scale
# that fits: with a limit of 15 or more, a run in which 1% of the batches are bad is not stuck.
_STEPS_PER_SKIP = 25


class SkipHistory:
    """Earlier states of one scaler, with NumPy arrays, by which a later state is judged.

    A run is stuck if more than `limit` consecutive steps were skipped. It is also stuck if, since an earlier state,
    more than `limit` steps were skipped, and more than were applied; or, while the scale was `min_scale`, more than one
    in 25. The second and third rule do not count the skips of a dynamic scale that backs off: see `_backoffs`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._earlier = collections.deque[ScalerState]()  # of one run, in the order of its steps
        self._at_limit = collections.deque[ScalerState]()  # those since which the scale is min_scale
        self._has_overflowed = False  # before the latest state

    def describe(self, state: ScalerState) -> str:
        """Returns the error of a state, or an empty text if the run is not stuck."""
        self._forget_another_run(state)
        if state.consecutive_skips > self._limit:
            return describe_skips(state, CONSECUTIVE.format(state.consecutive_skips))
        return self._describe_most_skipped(state) or self._describe_skipped_at_limit(state)

    def _describe_most_skipped(self, state: ScalerState) -> str:
        for before in self._earlier or [_first_state(state)]:
            skips, steps = _skips_and_steps(before, state)
            applied = steps - skips
            # A restored or damaged state may have counts that no run has.
            if continues(before, state) and skips - _backoffs(before, state, applied) > max(applied, self._limit):
                backs_off = state.config.mode == "dynamic" and state.config.hysteresis == 1 and not is_at_limit(state)
                # The skips of a scale that backs off after each overflow do not count, so the others have this reason.
                reason = SkipReason.LOSS if backs_off else None
                text = f"{skips} of the last {steps} steps were skipped"
                return describe_skips(state, text, reason) + FIND_BATCH
        return ""

    def _describe_skipped_at_limit(self, state: ScalerState) -> str:
        if not is_at_limit(state) or state.last_skip_reason != SkipReason.MIN_SCALE:
            return ""
        for before in self._at_limit:
            skips, steps = _skips_and_steps(before, state)
            if skips <= self._limit:  # and since a later state, no more
                return ""
            if skips - _backoffs(before, state, steps - skips) > max(steps / _STEPS_PER_SKIP, self._limit):
                text = f"{skips} of the last {steps} steps were skipped at the smallest allowed scale"
                return describe_skips(state, text) + FIND_BATCH
        return ""

    def remember(self, state: ScalerState) -> None:
        """Adds a state, and forgets the states of another run and those that no rule needs any more."""
        self._has_overflowed = self.has_overflowed(state)
        # With fewer steps than these, a rule requires more than limit skips; with more, a fraction of the steps. So the
        # oldest state is the last one before them.
        _append(self._earlier, state, 2 * self._limit)
        if is_at_limit(state):
            _append(self._at_limit, state, _STEPS_PER_SKIP * self._limit)
        else:
            self._at_limit.clear()

    def grows_to_limit(self, state: ScalerState) -> bool:
        """Tests whether, since the latest state, a dynamic scale has grown to its limit in a run without overflows."""
        self._forget_another_run(state)
        if not self._earlier or state.config.mode != "dynamic":
            return False
        before, config = self._earlier[-1], state.config
        has_grown = before.loss_scale < np.float32(config.max_scale) <= state.loss_scale
        growth = _most_growths(before, _skips_and_steps(before, state)[1]) * math.log2(config.growth_factor)
        # A scale that was replaced by hand is not within reach. Growth rounds to float32.
        is_within_reach = math.log2(config.max_scale) - math.log2(before.loss_scale) <= growth + 1e-6
        return bool(has_grown and is_within_reach and not self.has_overflowed(state))

    def has_overflowed(self, state: ScalerState) -> bool:
        """Tests whether this run may have skipped a step because of its gradients."""
        self._forget_another_run(state)
        if self._earlier:
            return self._has_overflowed or _has_overflowed_since(self._earlier[-1], state)
        return bool(state.total_skips > (state.last_skip_reason == SkipReason.LOSS))  # other reasons are unknown

    def _forget_another_run(self, state: ScalerState) -> None:
        if self._earlier and not continues(self._earlier[-1], state):
            self._earlier.clear()
            self._at_limit.clear()


def _append(states: collections.deque[ScalerState], state: ScalerState, steps: int) -> None:
    """Adds a state to states, and removes all but the last one of those from before the last `steps` steps."""
    states.append(state)
    while len(states) > 1 and _skips_and_steps(states[1], state)[1] > steps:
        states.popleft()


def continues(before: ScalerState, after: ScalerState) -> bool:
    """Tests whether a sequence of steps may lead from one state to the other; if not, the scaler was replaced."""
    skips, steps = _skips_and_steps(before, after)
    scales = np.array([before.loss_scale, after.loss_scale])
    is_valid = bool(np.all((scales > 0) & np.isfinite(scales)))
    is_counted = 0 <= skips <= steps and int(after.finite_steps) <= int(before.finite_steps) + steps - skips
    return before.config == after.config and is_valid and is_counted


def _first_state(state: ScalerState) -> ScalerState:
    """Returns the state with which a run began; its scale, which is unknown, was `max_scale` at most."""
    first: dict[str, Any] = dict.fromkeys(("total_steps", "total_skips", "finite_steps"), np.array(0, np.int32))
    if state.config.mode == "dynamic":
        first["loss_scale"] = np.float32(state.config.max_scale)
    return state._replace(**first)


def _skips_and_steps(before: ScalerState, after: ScalerState) -> tuple[int, int]:
    steps = int(after.total_steps) - int(before.total_steps)
    return int(after.total_skips) - int(before.total_skips), steps


def _most_growths(before: ScalerState, applied: int) -> int:
    return (int(before.finite_steps) + applied) // before.config.growth_interval


def _has_overflowed_since(before: ScalerState, after: ScalerState) -> bool:
    """Tests whether some of the skips between two states of a dynamic scaler may be because of the gradients.

    Such a skip resets `finite_steps`, or backs the scale off. The other ones, because of the loss, do neither.
    """
    skips, steps = _skips_and_steps(before, after)
    if not skips or after.config.mode != "dynamic":
        return bool(skips)
    config = after.config
    growths, finite_steps = divmod(int(before.finite_steps) + steps - skips, config.growth_interval)
    grown = math.log2(before.loss_scale) + growths * math.log2(config.growth_factor)
    fall = min(grown, math.log2(config.max_scale)) - math.log2(after.loss_scale)
    has_only_grown = finite_steps == after.finite_steps and fall < -math.log2(config.backoff_factor) / 2
    return not (has_only_grown and bool(after.last_skip_reason == SkipReason.LOSS))


def _backoffs(before: ScalerState, after: ScalerState, applied: int) -> float:
    """Returns an upper bound of the number of overflows after which a dynamic scale backed off above `min_scale`.

    The initial backoff is a series of them, and each growth may cause more. The fall of the scale, and its growths, for
    which `applied` steps suffice, give their number.
    """
    config = after.config
    if config.mode != "dynamic":
        return 0.0
    growth = _most_growths(before, applied) * math.log2(config.growth_factor)
    fall = math.log2(before.loss_scale) - math.log2(after.loss_scale)
    return config.hysteresis * max((growth + fall) / -math.log2(config.backoff_factor), 0.0)
