"""A check of a whole training step, by running it at several loss scales."""

import bisect
import math
from collections.abc import Callable, Sequence

import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.text import describe
from jmpscale._base.tree import Tree, check_no_nnx_objects, named_leaves
from jmpscale._scaler_of_tree import find_scaler
from jmpscale._state import LARGEST_SCALE, SkipReason
from jmpscale._testing.precision import check_precision
from jmpscale._testing.replicated import check_copies
from jmpscale._testing.runs import Run, Runs, is_inside, largest_change

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

_ZERO_SCALES = (2.0**-60, 2.0**-62, 2.0**-64)  # at which half-precision gradients are zero


def check_step(step: Callable[[Tree], Tree], state: Tree, *, ignore: str | Sequence[str] = ()) -> None:
    """Runs a training step at several loss scales, and raises if it treats an overflow or the scale wrongly.

    At a loss scale of 2^126, gradients overflow in float16. The step must be skipped, reduce a dynamic scale, and
    change nothing else. If nothing overflows, as in float32, this must hold at an infinite scale. At the smallest scale
    at which the step is skipped, the loss must be finite, and a loop of steps must not skip all of them. Just below it,
    no change may differ from the change in float32 by more than half, unless rounding can be the reason; for this, JAX
    must be able to trace the step. No change may be proportional to the scale, its inverse or their squares, or depend
    on whether the scale grows after the step. Devices must agree, as for `assert_replicated`.

    Args:
      step: function of the training state that returns the new state, such as
        `lambda state: train_step(*state, batch)[:2]`, with a fixed batch. It runs more than 20 times. If gradients are
        accumulated by hand over several calls, it makes all of these calls.
      state: pytree of all that a step changes: parameters, optimizer state, averages, batch statistics, and exactly one
        scaler. It is copied, so the step may donate its argument. This process must hold all of its arrays.
      ignore: the leaves that a skipped step may change, such as `(".step", ".rng")`: their paths in the notation of
        `jax.tree_util.keystr`, or the paths of nodes that contain them. The scaler, and the `grad_norm` of
        `with_loss_scaling`, are always ignored.

    Raises:
      AssertionError: the step is not skipped, changes the state although it is skipped, depends on the scale, or
        differs from float32; or devices differ. The message names the likely mistakes.
      TypeError: `step` is not a function, or changes the structure or the types of the state; or the state contains a
        Flax NNX object.
      ValueError: the state does not contain exactly one scaler; the scaler is disabled; or `ignore` names no leaf.

    Warns:
      UserWarning: JAX cannot trace the step, so it is not compared with float32; or `update` does not receive the loss,
        so a loss that is NaN reduces a dynamic scale.

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
    remedy = "Pass (nnx.state(model), optimizer.opt_state); step puts them into nnx.clone((model, optimizer))."
    check_no_nnx_objects(state, "state", remedy)
    scaler = find_scaler(state, "state")
    if scaler.config.mode == "disabled":
        raise ValueError("state must contain a scaler that checks gradients, got a disabled one. Use another one.")
    ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    paths = [path for path, _ in named_leaves(state)]
    if unknown := [part for part in ignored if not any(is_inside(path, part) for path in paths)]:
        raise ValueError(f"ignore must name leaves of the state, got {unknown}. The paths are {paths[:20]}.")
    exponent = round(math.log2(scaler.loss_scale))
    runs = Runs(step, state, ignored)
    usual = runs.first_applied(exponent)
    if path := next((path for path, change in usual.changes.items() if not math.isfinite(change)), None):
        raise AssertionError(
            f"the step was not skipped at a loss scale of {usual.name}, where state{path} becomes infinite or NaN: "
            f"{_HIDDEN}"
        )
    check_copies(usual.after, "state")
    _check_units(usual, runs.at(usual.scale / 4), runs.at(usual.scale / 16), share=1 / 3)
    # Gradients of zero do not hide a term of the loss that is not scaled.
    _check_units(*map(runs.at, _ZERO_SCALES), share=0)
    growing = runs.at(usual.scale, finite_steps=scaler.config.growth_interval - 1)
    _check_growth(growing, usual, runs.at(usual.scale / scaler.config.growth_factor))
    # In the state after a step, averages that were zero, and copies of parameters, are different.
    later = runs.from_state(usual.after)
    limit = _check_overflow(later, later.first_applied(exponent))
    check_precision(runs, runs.first_applied(round(math.log2(limit.scale))))
    invalid = runs.with_numbers(lambda x: np.full_like(x, np.nan)).at(usual.scale)
    if scaler.config.mode == "dynamic" and invalid.skips and invalid.new.last_skip_reason != SkipReason.LOSS:
        warn_user(
            "a loss that is NaN reduces the loss scale, because update does not receive the loss: pass it unscaled, as "
            "value= to tx.update or as loss= to jmpscale.update, and name all mapped axes in axis_name."
        )


def _check_overflow(runs: Runs, usual: Run) -> Run:
    """Raises if an overflow is applied, or if a skipped step changes the state.

    Returns the run just below the scale from which the step is skipped; if nothing overflows, the usual one.
    """
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
    return _check_limit(runs, usual) if largest.scale == LARGEST_SCALE else usual


def _check_limit(runs: Runs, usual: Run) -> Run:
    """Checks the runs just below and above the scale from which a step is skipped, and returns the run below."""
    exponents = range(round(math.log2(usual.scale)), 127)
    last = exponents[bisect.bisect_left(exponents, True, 1, key=lambda k: runs.at(2.0**k).skips > 0) - 1]
    applied, skipped = (runs.at(2.0**k) for k in (last, last + 1))
    for run in (applied, skipped):  # gradients may overflow on one device alone
        check_copies(run.after, "state")
    if skipped.is_skipped:
        skipped.check_skipped()
        _check_backoff(skipped, applied)
    return applied


def _check_backoff(skipped: Run, applied: Run) -> None:
    """Raises if a skip does not lead to the next smaller scale, at which the step is applied."""
    at, applied_at = f"at a loss scale of {skipped.name}", f"at {applied.name}"
    if skipped.keeps_scale:
        raise AssertionError(f"the skipped step did not reduce the scale {at}. Do not put back the old scale.")
    if skipped.new.last_skip_reason == SkipReason.LOSS:
        raise AssertionError(
            f"the loss passed to update is finite {applied_at}, but not {at}: pass it alone, unscaled, without "
            "statistics of the gradients."
        )
    if skipped.new.loss_scale <= applied.scale / 4:
        raise AssertionError(
            f"{skipped.skips} steps were skipped {at}, and none {applied_at}: after a skip, the next step does not use "
            "the smaller scale. Take the gradients with the scaler that the loop carries, and update it once in each "
            "step."
        )


def _check_units(*runs: Run, share: float) -> None:
    """Raises if results depend on a power of the scale: at three scales, each a quarter of the one before.

    The rounding of subnormal numbers does as well, but by less than half of a change, unless this is rounding noise,
    as it may be in a small `share` of the numbers that a step changes.
    """
    changes = {path: change for path, change in runs[0].changes.items() if change}
    sizes = {path: np.size(runs[0].results[path]) for path in changes}

    def depends_on_scale(path: str) -> bool:
        first, second, third = (run.results[path] for run in runs)
        one, other = largest_change(first, second), largest_change(second, third)
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


def _check_growth(growing: Run, usual: Run, smaller: Run) -> None:
    """Raises if the result of a step depends on whether the scale grows after it.

    It is rounding noise, as in the gradient of a bias before a normalization, if it depends on the scale as well.
    """
    for path, change in usual.changes.items():
        noise, difference = (largest_change(usual.results[path], x.results[path]) for x in (smaller, growing))
        if change and difference > max(0.1 * change, 10 * noise) and not growing.skips:
            raise AssertionError(
                f"the change of state{path} differs if the scale grows after the step. Unscale the gradients by "
                "the scaler from before update, and do not count steps by its finite_steps. If it describes the "
                f"scaler, pass ignore={path!r}."
            )


def _larger_change(one: Run, other: Run) -> str | None:
    """Returns the path of a change that is not finite, or larger than subnormal rounding can explain."""
    for path, change in one.changes.items():
        if not math.isfinite(change) or change > 2.5 * other.changes[path] > 0:
            return path
    return None
