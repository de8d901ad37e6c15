"""A check of a whole training step, by running it at several loss scales."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmpscale._base.text import describe, format_number, truncate
from jmpscale._base.tree import (
    PyTree,
    Tree,
    bit_pattern,
    check_no_nnx_objects,
    find_instances,
    is_inexact,
    named_leaves,
)
from jmpscale._gate import check_same_types, is_numeric
from jmpscale._scaler_of_tree import find_scaler, get_scaler, is_scaler, replace_scaler
from jmpscale._state import LARGEST_SCALE, ScalerState, SkipReason, WithLossScalingState
from jmpscale._testing.replicated import check_copies
from jmpscale._update import update

_RETURNED = (
    "it returned the scaler that it received. Call update, or tx.update, in every step, and return its result; carry "
    "it through jax.lax.scan; do not put back the old state. If the step accumulates gradients over several calls, "
    "check them as one step."
)
_UNSCALED = (
    "the gradients do not depend on the scaler of the state. Take them with jmpscale.value_and_grad(loss_fn)(scaler, "
    "params, batch)."
)
_HIDDEN = (
    "its result is wrong. Something replaces infinity and NaN before the check, such as a clip, jnp.nan_to_num or a "
    "choice of micro-batches; or the flag is not about all gradients. Check the gradients of the loss first."
)
_SKIPPED = (
    "the step was skipped at every loss scale. jmpscale.diagnose names the line, unless the flag for update is "
    "inverted: it must be true if the gradients are finite."
)

_ZERO_SCALES = (2.0**-60, 2.0**-62, 2.0**-64)  # at which half-precision gradients are zero


def check_step(step: Callable[[Tree], Tree], state: Tree, *, ignore: str | Sequence[str] = ()) -> None:
    """Runs a training step at several loss scales, and raises if it treats an overflow or the scale wrongly.

    At a loss scale of 2^126, gradients overflow in float16. The step must be skipped, reduce a dynamic scale, and
    change nothing else. If nothing overflows, as in float32, this must hold at an infinite scale. At the smallest scale
    at which the step is skipped, the loss must be finite, and a loop of steps must not skip all of them; just below it,
    no change may be missing, or much larger than at a smaller scale. No change may be proportional to the scale, its
    inverse or their squares, or depend on whether the scale grows after the step. Devices must agree, as for
    `assert_replicated`. Gradients that are rounded to float16 after the unscaling are not found.

    Args:
      step: function of the training state that returns the new state, such as
        `lambda state: train_step(*state, batch)[:2]`, with a fixed batch. It runs about 30 times. If gradients are
        accumulated by hand over several calls, it makes all of these calls.
      state: pytree of all that a step changes: parameters, optimizer state, averages, batch statistics, and exactly one
        scaler. It is copied, so the step may donate its argument. This process must hold all of its arrays.
      ignore: the leaves that a skipped step may change, such as `(".step", ".rng")`: their paths in the notation of
        `jax.tree_util.keystr`, or the paths of nodes that contain them. The scaler, and the `grad_norm` of
        `with_loss_scaling`, are always ignored.

    Raises:
      AssertionError: the step is not skipped, or changes the state although it is skipped, or depends on the scale; or
        devices differ. The message names the likely mistakes.
      TypeError: `step` is not a function, or changes the structure or the types of the state; or the state contains a
        Flax NNX object.
      ValueError: the state does not contain exactly one scaler; the scaler is disabled; or `ignore` names no leaf.

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
    remedy = "Pass (nnx.state(model), optimizer.opt_state); step puts them into the objects, and returns them again."
    check_no_nnx_objects(state, "state", remedy)
    scaler = find_scaler(state, "state")
    if scaler.config.mode == "disabled":
        raise ValueError("state must contain a scaler that checks gradients, got a disabled one. Use another one.")
    ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    paths = [path for path, _ in named_leaves(state)]
    if unknown := [part for part in ignored if not any(_is_inside(path, part) for path in paths)]:
        raise ValueError(f"ignore must name leaves of the state, got {unknown}. The paths are {paths[:20]}.")
    exponent = round(math.log2(scaler.loss_scale))
    runs = _Runs(step, jax.tree.map(_copy, state), ignored)  # a step can change variables of Flax NNX in place
    usual = runs.first_applied(exponent)
    _check_applied(usual, usual, usual)
    check_copies(usual.after, "state")
    _check_units(usual, runs.at(usual.scale / 4), runs.at(usual.scale / 16), share=1 / 3)
    # Gradients of zero do not hide a term of the loss that is not scaled.
    _check_units(*map(runs.at, _ZERO_SCALES), share=0)
    growing = runs.at(usual.scale, finite_steps=scaler.config.growth_interval - 1)
    _check_growth(growing, usual, runs.at(usual.scale / scaler.config.growth_factor))
    # In the state after a step, averages that were zero, and copies of parameters, are different.
    runs = _Runs(step, usual.after, ignored)
    _check_overflow(runs, runs.first_applied(exponent))


@dataclasses.dataclass(frozen=True)
class _Run:
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
        return all(map(_is_equal, self.old[:-1], self.new[:-1]))

    @property
    def keeps_scale(self) -> bool:
        """Whether it does not reduce the scale although gradients overflow."""
        overflows = self.skips > 0 and int(self.new.last_skip_reason) != SkipReason.LOSS
        return overflows and float(self.new.loss_scale) == self.scale > float(update(self.old, False).loss_scale)

    @property
    def name(self) -> str:
        """The loss scale, in messages."""
        return format_number(self.scale)

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        return {path: now for path, _, now in self.leaves}

    @functools.cached_property
    def changes(self) -> dict[str, float]:
        """The largest change of each leaf of floating-point or complex numbers, NaN if a finite number becomes NaN."""
        return {path: _largest_change(was, now) for path, was, now in self.leaves if is_inexact(was)}

    def check_skipped(self) -> None:
        """Raises if a skipped step has changed any bit."""
        for path, was, now in self.leaves:
            if not _is_equal(was, now):
                raise AssertionError(
                    f"the skipped step changed state{path}: {truncate(was)} before, {truncate(now)} after. Gate it "
                    "with apply_if, unless it counts calls or batches, is a random key, describes the scaler, or has a "
                    f"gate of its own: then pass ignore={path!r}."
                )


class _Runs:
    """Runs of a step from one state, with other fields of the scaler."""

    def __init__(self, step: Callable[[Any], Any], state: PyTree, ignored: tuple[str, ...]) -> None:
        self._step, self._state, self._ignored = step, state, ignored

    def at(self, scale: float, **fields: int) -> _Run:
        old = get_scaler(self._state)
        old = old._replace(loss_scale=_with_value(old.loss_scale, scale))
        old = old._replace(**{name: _with_value(getattr(old, name), value) for name, value in fields.items()})
        state = replace_scaler(self._state, old)
        after = self._step(jax.tree.map(_copy, state))
        check_same_types(state, after, "state", "step", "Return the state alone: lambda s: train_step(*s, batch)[:2].")
        after = jax.tree.map(_copy, after)
        pairs = zip(_gated_leaves(state, self._ignored), _gated_leaves(after, self._ignored), strict=True)
        leaves = [(path, was, now) for (path, was), (_, now) in pairs]
        return _Run(old, get_scaler(after), leaves, after)

    def first_applied(self, exponent: int) -> _Run:
        """Returns the first run that is not skipped, from a power of two to smaller ones."""
        for k in range(exponent, -110, -8):
            if not (run := self.at(2.0**k)).skips:
                return run
        raise AssertionError(_SKIPPED)


def _check_overflow(runs: _Runs, usual: _Run) -> None:
    """Raises if an overflow is applied, or if a skipped step changes the state."""
    largest = runs.at(LARGEST_SCALE)
    # Either nothing overflows, or the scale of several steps backs off from an overflow of the first one.
    if not (largest.is_skipped or _larger_change(largest, usual)):
        largest = runs.at(math.inf)
    if not largest.is_skipped:
        is_wrong = _larger_change(largest, usual) or _larger_change(usual, largest)
        why = _RETURNED if largest.returns_scaler else _HIDDEN if is_wrong else _UNSCALED
        raise AssertionError(f"the step was not skipped at a loss scale of {largest.name}: {why}")
    largest.check_skipped()
    check_copies(largest.after, "state")
    if largest.scale == LARGEST_SCALE:
        _check_limit(runs, usual)


def _check_limit(runs: _Runs, usual: _Run) -> None:
    """Compares runs just below and above the scale from which a step is skipped.

    There gradients are infinite, which a clip makes finite; at the largest scales, they are NaN.
    """
    exponents = range(round(math.log2(usual.scale)), 127)
    last = exponents[bisect.bisect_left(exponents, True, 1, key=lambda k: runs.at(2.0**k).skips > 0) - 1]
    applied, skipped = (runs.at(2.0**k) for k in (last, last + 1))
    for run in (applied, skipped):  # gradients may overflow on one device alone
        check_copies(run.after, "state")
    _check_applied(applied, runs.at(2.0 ** (last - 8)), runs.at(_ZERO_SCALES[0]))
    _check_all_applied(applied, [runs.at(2.0 ** (last - k)) for k in range(8, 41, 8)])
    if skipped.is_skipped:
        skipped.check_skipped()
        _check_backoff(skipped, applied)


def _check_backoff(skipped: _Run, applied: _Run) -> None:
    """Raises if a skip does not lead to the next smaller scale, at which the step is applied."""
    at, applied_at = f"at a loss scale of {skipped.name}", f"at {applied.name}"
    if skipped.keeps_scale:
        raise AssertionError(f"the skipped step did not reduce the scale {at}. Do not put back the old scale.")
    if skipped.new.last_skip_reason == SkipReason.LOSS:
        raise AssertionError(
            f"the loss for update is finite {applied_at}, but not {at}: pass it alone, unscaled, without statistics of "
            "the gradients."
        )
    if skipped.new.loss_scale <= applied.scale / 4:
        raise AssertionError(
            f"{skipped.skips} steps were skipped {at}, and none {applied_at}: after a skip, the next step does not use "
            "the smaller scale. Take the gradients with the scaler that the loop carries, and update it once in each "
            "step."
        )


def _check_applied(one: _Run, other: _Run, zero: _Run) -> None:
    """Raises if a step that was not skipped has a larger change than at a smaller scale, or one that is not finite.

    A leaf of `other` that equals the leaf of `zero` is not compared, because its gradient underflows.
    """
    if path := _larger_change(one, other, zero):
        raise AssertionError(
            f"the step was not skipped at a loss scale of {one.name}, where it changes state{path} by "
            f"{one.changes[path]:.3g}, and by {other.changes[path]:.3g} at {other.name}: {_HIDDEN}"
        )


def _check_all_applied(run: _Run, smaller: list[_Run]) -> None:
    """Raises if a step that was not skipped has no change where it has the same change at two smaller scales.

    Subnormal rounding, as in an average that has converged, changes a leaf by another amount at each scale.
    """
    for path in (path for path, change in run.changes.items() if not change):
        sizes = [other.changes[path] for other in smaller if other.changes[path]]
        if any(math.isclose(one, other, rel_tol=0.01) for one, other in itertools.pairwise(sizes)):
            raise AssertionError(
                f"the step counts as applied at a loss scale of {run.name}, where it does not change state{path}: its "
                "gradients overflow. Pass a flag about all gradients to update, such as finite_a & finite_b."
            )


def _check_units(*runs: _Run, share: float) -> None:
    """Raises if results depend on a power of the scale: at three scales, each a quarter of the one before.

    The rounding of subnormal numbers does as well, but by less than half of a change, unless this is rounding noise,
    as it may be in a small `share` of the numbers that a step changes.
    """
    changes = {path: change for path, change in runs[0].changes.items() if change}
    sizes = {path: np.size(runs[0].results[path]) for path in changes}

    def depends_on_scale(path: str) -> bool:
        first, second, third = (run.results[path] for run in runs)
        one, other = _largest_change(first, second), _largest_change(second, third)
        is_power = other > 0 and any(math.isclose(one / other, 4.0**n, rel_tol=0.01) for n in (-2, -1, 1, 2))
        return is_power and one >= changes[path] / 2

    wrong = list(filter(depends_on_scale, changes))
    if wrong and sum(sizes[path] for path in wrong) >= share * sum(sizes.values()):
        path = wrong[0]
        raise AssertionError(
            f"the change of state{path} depends on the loss scale: it is {changes[path]:.3g} at {runs[0].name}, and "
            f"{runs[1].changes[path]:.3g} at {runs[1].name}. Scale every term of the loss, unscale the gradients once, "
            "as jmpscale.value_and_grad does, and clip them only then. If it describes the scaler, pass "
            f"ignore={path!r}."
        )


def _check_growth(growing: _Run, usual: _Run, smaller: _Run) -> None:
    """Raises if the result of a step depends on whether the scale grows after it.

    It is rounding noise, as in the gradient of a bias before a normalization, if it depends on the scale as well.
    """
    for path, change in usual.changes.items():
        noise, difference = (_largest_change(usual.results[path], x.results[path]) for x in (smaller, growing))
        if difference > max(0.1 * change, 2 * noise) and not growing.skips:
            raise AssertionError(
                f"the change of state{path} is another one if the scale grows after the step. Unscale the gradients by "
                "the scaler from before update, and do not count steps by its finite_steps. If it describes the "
                f"scaler, pass ignore={path!r}."
            )


def _larger_change(one: _Run, other: _Run, zero: _Run | None = None) -> str | None:
    """Returns the path of a change that is not finite, or larger than subnormal rounding can explain."""
    for path, change in one.changes.items():
        is_larger = change > 2.5 * other.changes[path] > 0
        if not math.isfinite(change):
            return path
        if is_larger and not (zero and _is_equal(other.results[path], zero.results[path])):
            return path
    return None


def _largest_change(was: Any, now: Any) -> float:
    dtype = np.complex128 if np.iscomplexobj(was) else np.float64
    old, new = (np.asarray(x).astype(dtype) for x in (was, now))
    known = np.isfinite(old)  # such as a mask of -inf, or a best loss of infinity, is not
    return float(np.abs(new[known] - old[known]).max(initial=0))


def _is_equal(was: Any, now: Any) -> bool:
    """Tests whether two leaves are equal bit for bit. A Python number equals its array."""
    if not (is_numeric(was) and is_numeric(now)) or (hasattr(was, "dtype") and hasattr(now, "dtype")):
        return bit_pattern(was) == bit_pattern(now)
    dtype = getattr(was, "dtype", getattr(now, "dtype", None))
    return np.array_equal(np.asarray(was, dtype), np.asarray(now, dtype), equal_nan=True)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _with_value(array: Any, value: float) -> Any:
    """Returns an array with the dtype and the sharding of a scalar array."""
    new = np.full_like(array, value)
    return jax.device_put(new, array.sharding) if isinstance(array, jax.Array) and array.committed else new


def _is_inside(path: str, part: str) -> bool:
    return path == part or path.startswith((f"{part}.", f"{part}["))


def _gated_leaves(state: PyTree, ignored: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the leaves that a skipped step must not change, with their paths."""
    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaler)
    wrapped = find_instances(state, WithLossScalingState)
    norms = {id(x) for x in jax.tree.leaves([x.grad_norm for x in wrapped])}
    leaves = [(jax.tree_util.keystr(path), x) for path, x in entries if not is_scaler(x) and id(x) not in norms]
    return [(path, x) for path, x in leaves if not any(_is_inside(path, part) for part in ignored)]
