"""Runs of a training step at different loss scales, and what they change."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.text import format_scale, truncate
from jmpscale._base.tree import PyTree, bit_pattern, find_instances, is_array, is_inexact, is_named
from jmpscale._get_scaler import find_scaler
from jmpscale._guards.checks import states_beside_wrapper
from jmpscale._state import ARRAY_FIELDS, ScalerState, WithLossScalingState, is_scaler
from jmpscale.testing._counts import find_optimizer_states, kind_of_count
from jmpscale.testing._first_difference import first_difference
from jmpscale.testing._replicated import check_copies

Step = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a step."""

    old: ScalerState  # before the step; if the state contains several scalers, the one that is checked
    new: ScalerState  # after the step
    after: PyTree
    leaves: list[tuple[str, Any, Any]]  # that a skipped step must not change: path, old value, new value
    all_skips: list[int]  # the number of skips of each scaler of the state
    recomputed: frozenset[str]  # the paths of leaves whose new value is not computed from their old one

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
        """The changes of the leaves of floating-point or complex numbers; zero where a number was not finite.

        The change of a leaf that is recomputed is its new value: its old value has no influence on it.
        """
        leaves = [leaf for leaf in self.leaves if is_inexact(leaf[1])]
        return {path: _change(was, now, is_from_old=path not in self.recomputed) for path, was, now in leaves}

    def has_result_of(self, other: "Run") -> bool:
        """Tests whether the step from another scale has changed each leaf in the same way."""
        return all(is_equal(mine, now) for (*_, mine), (*_, now) in zip(self.leaves, other.leaves, strict=True))

    def infinite_leaf(self) -> str | None:
        """Returns the path of a leaf that has become infinite or NaN."""
        return next((path for path, change in self.changes.items() if not np.isfinite(change).all()), None)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a step from one state, with other fields of a scaler."""

    step: Step
    state: PyTree
    ignored: tuple[str, ...]
    recomputed: frozenset[str]  # the paths of leaves whose new value is not computed from their old one
    position: int = 0  # of the scaler that is checked, among the scalers of the state
    is_exact: bool = False  # whether a power of two, as a factor of the scale, changes no bit of a right step
    counts: dict[str, str] = dataclasses.field(default_factory=dict)  # accepted changes of skipped steps, by path

    @property
    def scalers(self) -> list[ScalerState]:
        return scalers_of(self.state)

    @property
    def scaler(self) -> ScalerState:
        return self.scalers[self.position]

    @property
    def has_small_scales(self) -> bool:
        """Whether a scaler of the state may have a scale below 1."""
        return any(
            (x.config.min_scale if x.config.mode == "dynamic" else float(x.loss_scale)) < 1 for x in self.scalers
        )

    def of_state(self, other: "Runs") -> "Runs":
        """Returns runs of the same step, from the state and about the scaler of other runs."""
        return dataclasses.replace(self, state=other.state, position=other.position)

    def with_numbers(self, change: Callable[[np.ndarray], np.ndarray]) -> "Runs":
        """Returns runs from a state with other floating-point and complex numbers, but the same scalers."""

        def new(x: Any) -> Any:
            is_changed = is_array(x) and jnp.issubdtype(x.dtype, np.inexact)
            return _place_like(change(np.asarray(x)).astype(x.dtype), x) if is_changed else x

        return dataclasses.replace(self, state=jax.tree.map(new, self.state, is_leaf=is_scaler))

    def with_leaf(self, path: str, value: float) -> "Runs":
        """Returns runs from a state in which the leaf with a path has another value."""

        def new(own: Any, x: Any) -> Any:
            return _place_like(np.full_like(x, value), x) if jax.tree_util.keystr(own) == path else x

        return dataclasses.replace(self, state=jax.tree_util.tree_map_with_path(new, self.state))

    def with_different_copies(self) -> "Runs":
        """Returns runs from a state in which no array is a copy of another one, as an average is at first."""
        seen: set[object] = set()

        def new(x: Any) -> Any:
            if not (is_array(x) and jnp.issubdtype(x.dtype, np.inexact)):
                return x
            is_copy = bit_pattern(x) in seen
            seen.add(bit_pattern(x))
            return _place_like((np.asarray(x) * (1 + 2.0**-6)).astype(x.dtype), x) if is_copy else x

        return dataclasses.replace(self, state=jax.tree.map(new, self.state, is_leaf=is_scaler))

    def at(self, scale: float, *, others: float | None = None, **fields: float) -> Run:
        """Runs the step with another scale, and with other values of some fields of the scaler.

        `others` is the scale of all other scalers of the state, which otherwise keep theirs.
        """
        old = self.scaler
        # The count starts at one, because the first of several steps resets it to zero if it is applied.
        scaler = _with_fields(old, {"loss_scale": scale, "consecutive_skips": 1, **fields})
        if others is None:
            return self.with_scaler(scaler)
        scalers = [_with_fields(x, {"loss_scale": others}) for x in scalers_of(self.state)]
        return dataclasses.replace(self, state=_with_scalers(self.state, scalers)).with_scaler(scaler)

    def state_with(self, scaler: ScalerState) -> PyTree:
        """Returns the state with another scaler in place of the one that is checked."""
        scalers = scalers_of(self.state)
        scalers[self.position] = scaler
        return _with_scalers(self.state, scalers)

    def with_scaler(self, scaler: ScalerState) -> Run:
        state = self.state_with(scaler)
        after = jax.block_until_ready(self.step(state))  # queued steps on simulated devices may wait for each other
        check_copies(after, "")
        pairs = zip(_gated_leaves(state, self.ignored), _gated_leaves(after, self.ignored), strict=True)
        leaves = [(path, was, now) for (path, was), (_, now) in pairs]
        new = scalers_of(after)
        skips = [int(b.total_skips) - int(a.total_skips) for a, b in zip(scalers_of(state), new, strict=True)]
        return Run(scaler, new[self.position], after, leaves, skips, self.recomputed)

    @property
    def exponents(self) -> list[int]:
        """The exponents of loss scales that the scaler can take, from its own one to smaller ones."""
        config, largest = self.scaler.config, round(math.log2(self.scaler.loss_scale))
        smallest = math.ceil(math.log2(config.min_scale)) if config.mode == "dynamic" else largest
        return list(dict.fromkeys([*range(largest, smallest, -8), smallest]))

    def first_applied(self, exponents: Iterable[int]) -> Run | None:
        """Returns the first run that is not skipped."""
        return next((run for k in exponents if not (run := self.at(2.0**k)).skips), None)

    def check_skipped(
        self, run: Run, applied: Run, reset: Mapping[str, Any] = MappingProxyType({}), numbers: str = ""
    ) -> None:
        """Raises if a skipped step has changed any bit, unless a leaf counts calls as it does in an applied step.

        A leaf may also return to its value in `reset`, as sums do. Leaves that are recomputed do not count: in a state
        that no step has returned, they need not be what a step computes.
        """
        optimizers = find_optimizer_states(self.state)
        counted = {path: now for path, _, now in applied.leaves}
        for path, was, now in run.leaves:
            if path in self.recomputed or is_equal(was, now) or is_equal(reset.get(path, was), now):
                continue
            kind = kind_of_count(was, now, counted[path])
            if kind and not is_named(path, optimizers):
                self.counts[path] = kind
                continue
            self._raise_for_change(path, was, now, numbers)

    def check_recomputed(self, run: Run) -> None:
        """Raises if a skipped step, from a state that a step has returned, has changed a leaf that is recomputed."""
        for path, was, now in run.leaves:
            if path in self.recomputed and not is_equal(was, now):
                self._raise_for_change(path, was, now)

    def _raise_for_change(self, path: str, was: Any, now: Any, numbers: str = "") -> NoReturn:
        old, new, place = first_difference(was, now)
        raise AssertionError(
            f"the skipped step changed {path}{numbers}: {old} before, {new} after{place}. {self._begin_of_remedy()} it "
            "with apply_if by step_applied or all_finite(grads), unless it counts calls or batches, is a random key or "
            "the state of an environment, describes the scaler, or has a gate of its own: then pass "
            f"ignore={path!r}. If it is a sum of gradients, reset it after a skip, too."
        )

    def _begin_of_remedy(self) -> str:
        if not states_beside_wrapper(self.state):
            return "Gate"
        return (
            "If a transformation beside with_loss_scaling in optax.chain makes this change, place it inside: "
            "with_loss_scaling(optax.chain(...)). Otherwise, gate"
        )


def scalers_of(tree: PyTree) -> list[ScalerState]:
    """Returns the scalers of a state, unwrapped; one of a batch of copies, as each device has one in `jax.pmap`."""
    return [_common_scaler(find_scaler(x, "state", allow_batch=True)) for x in find_instances(tree, ScalerState)]


def _common_scaler(batch: ScalerState) -> ScalerState:
    if not np.ndim(batch.loss_scale):
        return batch
    for field, x in zip(ARRAY_FIELDS, map(np.asarray, batch), strict=False):
        if (x != x.ravel()[0]).any():
            raise ValueError(
                f"state must contain one scaler, or copies of it for several devices, got a batch with {field} "
                f"{truncate(x)}. If jax.vmap maps the step over several members, call check_step for one of them."
            )
    return jax.tree.map(lambda x: x.ravel()[0], batch)


def _with_scalers(tree: PyTree, scalers: list[ScalerState]) -> PyTree:
    new = iter(scalers)
    return jax.tree.map(lambda x: _replaced(x, next(new)) if is_scaler(x) else x, tree, is_leaf=is_scaler)


def _replaced(old: ScalerState, scaler: ScalerState) -> ScalerState:
    """Returns a scaler, or a batch of copies of it, in place of another one."""
    arrays, structure = jax.tree.flatten(old)
    copies = [_place_like(np.full_like(x, y), x) for x, y in zip(arrays, scaler[:-1], strict=True)]
    return jax.tree.unflatten(structure, copies)


def _with_fields(scaler: ScalerState, values: Mapping[str, float]) -> ScalerState:
    arrays = {name: getattr(scaler, name) for name in values}
    return scaler._replace(**{name: _place_like(np.full_like(x, values[name]), x) for name, x in arrays.items()})


def _change(was: Any, now: Any, *, is_from_old: bool) -> np.ndarray:
    dtype = np.complex128 if np.iscomplexobj(was) else np.float64
    old, new = (np.asarray(x).astype(dtype) for x in (was, now))
    known = np.isfinite(old)  # such as a mask of -inf, or a best loss of infinity, is not
    return np.where(known, new - np.where(known & is_from_old, old, 0), 0)


def is_equal(was: Any, now: Any) -> bool:
    """Tests whether two leaves are equal bit for bit, in the dtype of the first one; a Python number has none.

    In float32, a copy of a wider leaf is not rounded, as it is in the state.
    """
    dtype = getattr(was, "dtype", getattr(now, "dtype", None))
    if dtype is not None:
        was, now = (x if getattr(x, "dtype", None) == dtype else np.asarray(x).astype(dtype) for x in (was, now))
    return bit_pattern(was) == bit_pattern(now)


def _place_like(new: np.ndarray, array: Any) -> Any:
    """Returns an array of the kind of another one, on its devices if these are fixed."""
    if not isinstance(array, jax.Array):
        return new
    # NumPy promotes bfloat16 by other rules, so a JAX array must remain one.
    return jax.device_put(new, array.sharding if array.committed else None)


def _gated_leaves(state: PyTree, ignored: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the leaves that a skipped step must not change, with their paths."""
    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaler)
    wrapped = find_instances(state, WithLossScalingState)
    norms = {id(x) for x in jax.tree.leaves([x.grad_norm for x in wrapped])}
    leaves = [(jax.tree_util.keystr(path), x) for path, x in entries if not is_scaler(x) and id(x) not in norms]
    return [(path, x) for path, x in leaves if not is_named(path, ignored)]
