"""The rule that adjusts the loss scale."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._algorithm.finite import all_finite_here
from jmpscale._base.arguments import COUNTER_LIMIT
from jmpscale._base.axes import AxisName, all_reduce_and, as_axes, untyped_axes
from jmpscale._base.memory import to_memory_of
from jmpscale._base.options import requires_names
from jmpscale._base.tree import PyTree
from jmpscale._guards import update as guards
from jmpscale._state import ScalerState, SkipReason, register_with_flax


@requires_names
def update(scaler: ScalerState, finite: ArrayLike, *, loss: PyTree = None, axis_name: AxisName = None) -> ScalerState:
    """Adjusts the loss scale and the counters after a step.

    This is the rule of a dynamic scaler. With `hysteresis=1` it is the rule of `torch.amp.GradScaler`, with limits:

    ```text
    total_steps += 1
    if finite:
        consecutive_skips = 0
        finite_steps += 1
        if hysteresis_reset == "finite":
            hysteresis_left = hysteresis
        if finite_steps >= growth_interval:
            finite_steps = 0
            hysteresis_left = hysteresis
            loss_scale = min(loss_scale * growth_factor, max_scale)
    else:
        total_skips += 1
        consecutive_skips += 1
        if the loss is given and not finite:
            last_skip_reason = LOSS
        else:
            last_skip_reason = MIN_SCALE if loss_scale <= min_scale else GRADIENTS
            finite_steps = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                loss_scale = max(loss_scale * backoff_factor, min_scale)
    ```

    With `hysteresis=1`, `hysteresis_left` stays 1. The scale and the hysteresis of a static scaler do not change.

    Args:
      scaler: the scaler from before the step.
      finite: bool[], whether the step was applied: whether its loss and gradients are finite, from
        `all_finite((loss, grads))`. Any other condition in it, such as a limit of the norm, counts as an overflow, and
        reduces the scale: use it in `apply_if` alone.
      loss: the unscaled loss, of any shape, or a pytree of unscaled losses. A skipped step whose loss is not finite
        does not change the scale. The loss does not make a step skipped; `finite` and `apply_if` do.
      axis_name: the mapped axes over which to combine `finite` and the finiteness of the loss, as in `all_finite`. If
        it omits an axis that JAX's types do not show, the loss is ignored, because it may differ between devices.

    Returns:
      The scaler for the next step, with the structure, dtypes, weak types and shardings of `scaler`.

    Raises:
      TypeError: `scaler` is not a `ScalerState`, `finite` is not a boolean, or `loss` is a partial sum.
      ValueError: `scaler` is a batch outside `jax.vmap`, `finite` is not a scalar, or an axis is not mapped here.

    Warns:
      UserWarning: the scaler is a constant of a compiled program or was already updated; no loss has been scaled yet;
        gradients that nothing has unscaled were applied; `finite` is about the loss alone; `loss` is a pair with
        auxiliary data; or the call is inside `apply_if`.

    >>> import jmpscale
    >>> scaler = jmpscale.update(jmpscale.dynamic(1024.0), False)
    >>> float(scaler.loss_scale), int(scaler.total_skips)
    (512.0, 1)
    """
    guards.called(scaler, finite, loss, axis_name)
    register_with_flax()
    if scaler.config.mode == "disabled":
        return scaler
    new = adapt(scaler, *all_reduce_outcome(jnp.asarray(finite), loss, axis_name))
    guards.computed(scaler, new, finite)
    return new


def all_reduce_outcome(finite: jax.Array, loss: PyTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array | None]:
    """Returns whether the gradients and the loss are finite on all devices; None for a loss that is not used."""
    # Along an axis that is not named, the gradients are equal, after a psum for example, but the loss may differ.
    loss_may_differ = axis_name is not None and not untyped_axes() <= set(as_axes(axis_name))
    if loss is None or loss_may_differ:
        return all_reduce_and(finite, axis_name=axis_name)[0], None
    finite, loss_finite = all_reduce_and(finite, all_finite_here(loss), axis_name=axis_name)
    return finite, loss_finite


# On a GPU each scalar that changes costs a kernel, unless one kernel also computes another scalar that depends on it:
# total_skips depends on total_steps, and the reason on consecutive_skips.
@jax.jit
def adapt(scaler: ScalerState, finite: jax.Array, loss_finite: jax.Array | None) -> ScalerState:
    """Applies the rule of `update` to flags that are equal on all devices; the loss may be unknown."""
    total_steps = _increment(scaler.total_steps)
    is_counted = ~finite & (total_steps < COUNTER_LIMIT)
    consecutive = jnp.where(finite, jnp.zeros_like(scaler.consecutive_skips), _increment(scaler.consecutive_skips))
    reason = jnp.where(consecutive == 0, scaler.last_skip_reason, _reason_of_skip(scaler, loss_finite))
    # The reason depends on the scale, and the new scale depends on the reason. XLA on GPUs would compute both from the
    # old scale, in two kernels in any order, and copy the old scale first. The barrier orders them.
    reason = jax.lax.optimization_barrier(reason)
    counted = scaler._replace(
        total_steps=total_steps,
        total_skips=jnp.where(is_counted, _increment(scaler.total_skips), scaler.total_skips),
        consecutive_skips=consecutive,
        last_skip_reason=reason,
    )
    applied = counted._replace(finite_steps=_increment(scaler.finite_steps))
    overflowed = counted._replace(finite_steps=jnp.zeros_like(scaler.finite_steps))
    if scaler.config.mode == "dynamic":
        applied, overflowed = _grow(applied), _back_off(overflowed)
    if loss_finite is not None:
        overflowed = _select(reason == int(SkipReason.LOSS), counted, overflowed)
    return jax.tree.map(to_memory_of, scaler, _select(finite, applied, overflowed))


def _reason_of_skip(scaler: ScalerState, loss_finite: jax.Array | None) -> jax.Array:
    # The first reason is computed from the state: JAX 0.7 cannot select one of two constants by a sharded flag.
    reason = scaler.last_skip_reason * 0 + int(SkipReason.GRADIENTS)
    if scaler.config.mode == "dynamic":
        reason = jnp.where(scaler.loss_scale <= scaler.config.min_scale, int(SkipReason.MIN_SCALE), reason)
    return reason if loss_finite is None else jnp.where(loss_finite, reason, int(SkipReason.LOSS))


def _select(flag: jax.Array, if_true: ScalerState, if_false: ScalerState) -> ScalerState:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(flag, a, b), if_true, if_false)


# With a hysteresis of 1 the rule does not depend on the count. On GPUs each scalar that changes costs a kernel.
def _grow(scaler: ScalerState) -> ScalerState:
    config = scaler.config
    is_due = scaler.finite_steps >= config.growth_interval
    if config.hysteresis > 1:
        reset = True if config.hysteresis_reset == "finite" else is_due
        scaler = scaler._replace(hysteresis_left=jnp.where(reset, config.hysteresis, scaler.hysteresis_left))
    grown = jnp.minimum(scaler.loss_scale * config.growth_factor, config.max_scale)
    return scaler._replace(
        loss_scale=jnp.where(is_due, grown, scaler.loss_scale), finite_steps=jnp.where(is_due, 0, scaler.finite_steps)
    )


def _back_off(scaler: ScalerState) -> ScalerState:
    config = scaler.config
    reduced = jnp.maximum(scaler.loss_scale * config.backoff_factor, config.min_scale)
    if config.hysteresis > 1:
        hysteresis_left = jnp.maximum(scaler.hysteresis_left - 1, 0)
        reduced = jnp.where(hysteresis_left == 0, reduced, scaler.loss_scale)
        scaler = scaler._replace(hysteresis_left=hysteresis_left)
    return scaler._replace(loss_scale=reduced)


def _increment(counter: jax.Array) -> jax.Array:
    return jnp.where(counter < COUNTER_LIMIT, counter + 1, counter)
