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
from jmpscale._get_scaler import get_scaler, is_scaler, replace_scaler
from jmpscale._guards.gate import check_same_types
from jmpscale._state import ScalerState, WithLossScalingState
from jmpscale.testing._replicated import check_copies

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
    after: PyTree
    leaves: list[tuple[str, Any, Any]]  # that a skipped step must not change: path, old value, new value

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
    def name(self) -> str:
        """The loss scale, in messages."""
        return format_scale(self.scale)

    @functools.cached_property
    def changes(self) -> dict[str, np.ndarray]:
        """The changes of the leaves of floating-point or complex numbers; zero where a number was not finite."""
        return {path: _change(was, now) for path, was, now in self.leaves if is_inexact(was)}

    def check_skipped(self, reset: Mapping[str, Any] = MappingProxyType({}), numbers: str = "") -> None:
        """Raises if a skipped step has changed any bit; a leaf may return to its value in `reset`, as sums do."""
        for path, was, now in self.leaves:
            if not (is_equal(was, now) or is_equal(reset.get(path, was), now)):
                raise AssertionError(
                    f"the skipped step changed state{path}{numbers}: {truncate(was)} before, {truncate(now)} after. "
                    "Gate it with apply_if by step_applied or all_finite(grads), unless it counts calls or batches, is "
                    f"a random key, describes the scaler, or has a gate of its own: then pass ignore={path!r}. If it "
                    "is a sum of gradients, reset it after a skip, too."
                )


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a step from one state, with other fields of the scaler."""

    step: Step
    state: PyTree
    ignored: tuple[str, ...]
    is_exact: bool = False  # whether a power of two, as a factor of the scale, changes no bit of a right step

    def with_numbers(self, change: Callable[[np.ndarray], np.ndarray]) -> "Runs":
        """Returns runs from a state with other floating-point and complex numbers, but the same scaler."""

        def new(x: Any) -> Any:
            is_changed = is_array(x) and jnp.issubdtype(x.dtype, np.inexact)
            return _place_like(change(np.asarray(x)).astype(x.dtype), x) if is_changed else x

        return dataclasses.replace(self, state=jax.tree.map(new, self.state, is_leaf=is_scaler))

    def at(self, scale: float, **fields: float) -> Run:
        """Runs the step with another scale, and with other values of some fields of the scaler."""
        old = get_scaler(self.state)
        # The count starts at one, because the first of several steps resets it to zero if it is applied.
        values = {"loss_scale": scale, "consecutive_skips": 1, **fields}
        arrays = {name: getattr(old, name) for name in values}
        new = {name: _place_like(np.full_like(x, values[name]), x) for name, x in arrays.items()}
        return self.with_scaler(old._replace(**new))

    def with_scaler(self, scaler: ScalerState) -> Run:
        state = replace_scaler(self.state, scaler)
        after = self.step(state)
        check_copies(after, "state")
        pairs = zip(_gated_leaves(state, self.ignored), _gated_leaves(after, self.ignored), strict=True)
        leaves = [(path, was, now) for (path, was), (_, now) in pairs]
        return Run(scaler, get_scaler(after), after, leaves)

    def first_applied(self, exponent: int) -> Run:
        """Returns the first run that is not skipped, from a power of two to smaller ones."""
        for k in range(exponent, -110, -8):
            if not (run := self.at(2.0**k)).skips:
                return run
        raise AssertionError(_SKIPPED)


def checked(step: Step) -> Step:
    """Returns a step that keeps its argument, and raises if the types of the state change."""

    def run(state: PyTree) -> PyTree:
        after = copy(step(copy(state)))
        check_same_types(state, after, "state", "step", "Return the state alone: lambda s: train_step(*s, batch)[:2].")
        return after

    return run


def copy(state: PyTree) -> PyTree:
    """Returns a copy of a state, because a step may donate its arrays, or change variables of Flax NNX in place."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x, state)


def _change(was: Any, now: Any) -> np.ndarray:
    dtype = np.complex128 if np.iscomplexobj(was) else np.float64
    old, new = (np.asarray(x).astype(dtype) for x in (was, now))
    known = np.isfinite(old)  # such as a mask of -inf, or a best loss of infinity, is not
    return np.where(known, new - np.where(known, old, 0), 0)


def is_equal(was: Any, now: Any) -> bool:
    """Tests whether two leaves are equal bit for bit. A Python number equals its array."""
    dtype = getattr(was, "dtype", getattr(now, "dtype", None))
    if dtype is not None:
        was, now = (np.asarray(x, dtype) if isinstance(x, (bool, int, float, complex)) else x for x in (was, now))
    return bit_pattern(was) == bit_pattern(now)


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
