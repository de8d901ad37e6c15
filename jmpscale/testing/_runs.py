"""Runs of a training step at different loss scales, and what they change."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.text import format_scale, truncate
from jmpscale._base.tree import PyTree, bit_pattern, find_instances, is_array, is_inexact
from jmpscale._gate import check_same_types, is_numeric
from jmpscale._scaler_of_tree import get_scaler, is_scaler, replace_scaler
from jmpscale._state import ScalerState, SkipReason, WithLossScalingState
from jmpscale._update import update

Step = Callable[[Any], Any]

_SKIPPED = (
    "the step was skipped at every loss scale. jmpscale.diagnose names the line, unless the flag for update is "
    "inverted: it must be true if the gradients are finite."
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a step."""

    old: ScalerState  # before the step
    new: ScalerState  # after the step
    leaves: list[tuple[str, Any, Any]]  # that a skipped step must not change: the path, before and after the step
    after: PyTree

    @property
    def scale(self) -> float:
        return float(self.old.loss_scale)

    @property
    def skips(self) -> int:
        return int(self.new.total_skips) - int(self.old.total_skips)

    @property
    def is_skipped(self) -> bool:
        """Whether the step is skipped as a whole, if it consists of several steps."""
        return 0 < self.skips == int(self.new.consecutive_skips) - int(self.old.consecutive_skips)

    @property
    def returns_scaler(self) -> bool:
        """Whether it returns the scaler that it received."""
        return all(map(is_equal, self.old[:-1], self.new[:-1]))

    @property
    def keeps_scale(self) -> bool:
        """Whether it does not reduce the scale although gradients overflow."""
        overflows = self.skips > 0 and int(self.new.last_skip_reason) != SkipReason.LOSS
        return overflows and float(self.new.loss_scale) == self.scale > float(update(self.old, False).loss_scale)

    @property
    def name(self) -> str:
        """The loss scale, in messages."""
        return format_scale(self.scale)

    @functools.cached_property
    def changes(self) -> dict[str, np.ndarray]:
        """The changes of the leaves of floating-point or complex numbers; zero where a number was not finite."""
        return {path: _change(was, now) for path, was, now in self.leaves if is_inexact(was)}

    def check_skipped(self, reset: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Raises if a skipped step has changed any bit; a leaf may return to its value in `reset`, as sums do."""
        for path, was, now in self.leaves:
            if not (is_equal(was, now) or (path in reset and is_equal(reset[path], now))):
                raise AssertionError(
                    f"the skipped step changed state{path}: {truncate(was)} before, {truncate(now)} after. Gate it "
                    "with apply_if by step_applied or all_finite(grads), unless it counts calls or batches, is a "
                    f"random key, describes the scaler, or has a gate of its own: then pass ignore={path!r}. If it is "
                    "a sum of gradients, reset it after a skip, too."
                )


class Runs:
    """Runs of a step from one state, with other fields of the scaler."""

    def __init__(self, step: Step, state: PyTree, ignored: tuple[str, ...], *, is_exact: bool = False) -> None:
        self.step, self._ignored = step, ignored
        self.is_exact = is_exact  # whether a power of two, as a factor of the scale, changes no bit of a right step
        self.state = jax.tree.map(_copy, state)  # a step can change variables of Flax NNX in place

    def with_step(self, step: Step, *, is_exact: bool) -> "Runs":
        return Runs(step, self.state, self._ignored, is_exact=is_exact)

    def with_state(self, state: PyTree) -> "Runs":
        return Runs(self.step, state, self._ignored, is_exact=self.is_exact)

    def with_numbers(self, change: Callable[[np.ndarray], np.ndarray]) -> "Runs":
        """Returns runs from a state with other floating-point and complex numbers, but the same scaler."""

        def new(x: Any) -> Any:
            is_changed = not is_scaler(x) and is_array(x) and jnp.issubdtype(x.dtype, np.inexact)
            return _place_like(change(np.asarray(x)).astype(x.dtype), x) if is_changed else x

        return self.with_state(jax.tree.map(new, self.state, is_leaf=is_scaler))

    def state_at(self, scale: float, **fields: int) -> PyTree:
        """Returns the state with another scale, and with other values of some fields of the scaler."""
        old = get_scaler(self.state)
        # The count starts at one, because the first of several steps resets it to zero if it is applied.
        values = {"loss_scale": scale, "consecutive_skips": 1, **fields}
        old = old._replace(**{name: _with_value(getattr(old, name), value) for name, value in values.items()})
        return replace_scaler(self.state, old)

    def at(self, scale: float, **fields: int) -> Run:
        state = self.state_at(scale, **fields)
        after = self.step(state)
        pairs = zip(_gated_leaves(state, self._ignored), _gated_leaves(after, self._ignored), strict=True)
        leaves = [(path, was, now) for (path, was), (_, now) in pairs]
        return Run(get_scaler(state), get_scaler(after), leaves, after)

    def first_applied(self, exponent: int) -> Run:
        """Returns the first run that is not skipped, from a power of two to smaller ones."""
        for k in range(exponent, -110, -8):
            if not (run := self.at(2.0**k)).skips:
                return run
        raise AssertionError(_SKIPPED)


def checked(step: Step) -> Step:
    """Returns a step that keeps its argument, and raises if the types of the state change."""

    def run(state: PyTree) -> PyTree:
        after = step(jax.tree.map(_copy, state))
        check_same_types(state, after, "state", "step", "Return the state alone: lambda s: train_step(*s, batch)[:2].")
        return jax.tree.map(_copy, after)

    return run


def _change(was: Any, now: Any) -> np.ndarray:
    dtype = np.complex128 if np.iscomplexobj(was) else np.float64
    old, new = (np.asarray(x).astype(dtype) for x in (was, now))
    known = np.isfinite(old)  # such as a mask of -inf, or a best loss of infinity, is not
    return np.where(known, new - np.where(known, old, 0), 0)


def is_equal(was: Any, now: Any) -> bool:
    """Tests whether two leaves are equal bit for bit. A Python number equals its array."""
    if not (is_numeric(was) and is_numeric(now)) or (hasattr(was, "dtype") and hasattr(now, "dtype")):
        return bit_pattern(was) == bit_pattern(now)
    dtype = getattr(was, "dtype", getattr(now, "dtype", None))
    return np.array_equal(np.asarray(was, dtype), np.asarray(now, dtype), equal_nan=True)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _with_value(array: Any, value: float) -> Any:
    """Returns an array with the dtype and the sharding of a scalar array."""
    return _place_like(np.full_like(array, value), array)


def _place_like(new: np.ndarray, array: Any) -> Any:
    """Returns an array on the devices of another one, if these are fixed."""
    return jax.device_put(new, array.sharding) if isinstance(array, jax.Array) and array.committed else new


def is_inside(path: str, part: str) -> bool:
    return path == part or path.startswith((f"{part}.", f"{part}["))


def _gated_leaves(state: PyTree, ignored: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the leaves that a skipped step must not change, with their paths."""
    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaler)
    wrapped = find_instances(state, WithLossScalingState)
    norms = {id(x) for x in jax.tree.leaves([x.grad_norm for x in wrapped])}
    leaves = [(jax.tree_util.keystr(path), x) for path, x in entries if not is_scaler(x) and id(x) not in norms]
    return [(path, x) for path, x in leaves if not any(is_inside(path, part) for part in ignored)]
