"""Monitoring: values to log, and an error or a warning for a run that is stuck.

Nothing here changes a state.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import check_count
from jmpscale._base.frameworks import multi_steps_sums
from jmpscale._base.text import format_number
from jmpscale._base.tree import PyTree, find_instances, is_inexact, is_traced
from jmpscale._find_scaler import find_scaler
from jmpscale._finite import all_finite_here
from jmpscale._state import ARRAY_FIELDS, LARGEST_SCALE, ScalerState, SkipReason, WithLossScalingState

_STUCK = "{run} consecutive steps were skipped ({total} in total); the loss scale is {scale}. "
_OVERFLOW = f"{_STUCK}In the most recent skip the loss, if given, was finite, but the gradients were not. "
_CAUSES = (  # in the order of _possible_causes
    f"{_STUCK}The loss scale is invalid: the state was corrupted, in storage or by hand. Restore an older checkpoint.",
    f"{_STUCK}In the most recent skip the loss itself was not finite, before any scaling. A loss scale cannot "
    "prevent that. Look for invalid data, or for an overflow in the forward pass; jmpscale.diagnose names the "
    "line.",
    f"{_STUCK}The gradients that optax.MultiSteps has accumulated can never become finite again: it resets them "
    "by multiplying them by zero, and 0 * inf is NaN. Place with_loss_scaling outside: "
    "with_loss_scaling(optax.MultiSteps(tx, k)).",
    "{total} steps were skipped, and the loss scale has fallen to {scale}, its lower limit, at which steps are still "
    "skipped, although not consecutive ones. Some batches have no finite gradients at any scale. Common causes are "
    "invalid data, and a softmax over a row in which a mask hides every value. jmpscale.diagnose with such a batch "
    "names the line. Correct these batches or the lines that make them NaN; the scale then grows again.",
    f"{_OVERFLOW}The scale cannot back off any further: the gradients overflow at every allowed scale, or they are "
    "NaN, or they were scaled by a different scaler. A step has one scaler: if the optimizer is wrapped in "
    "with_loss_scaling, pass its state to jmpscale.value_and_grad. jmpscale.diagnose with the same batch names the "
    "line: correct it or keep it in float32. If smaller scales fit, decrease min_scale.",
    f"{_OVERFLOW}The scale is static and does not back off. If the gradients of the same batch are finite in float32, "
    "decrease the scale of the backward pass: the number given to loss_scaled(fun, number) if the loss function is "
    "wrapped by it, and otherwise the number given to static. jmpscale.diagnose prints the scales that fit.",
    f"{_OVERFLOW}These are the first skips of this run: the scale is still backing off from its initial value. Allow "
    "more skips, or call jmpscale.diagnose: it prints the scales that fit, for init_scale, or names the line if there "
    "are none.",
    f"{_OVERFLOW}The scale is still backing off. Allow more skips, or look for a change in the data or the model: "
    "jmpscale.diagnose names the line.",
)


def metrics(scaler: PyTree) -> dict[str, jax.Array]:
    """Returns the values of a scaler that are worth logging.

    Args:
      scaler: a scaler, a batch of scalers, or any pytree that contains exactly one, such as the optimizer state of
        `with_loss_scaling`.

    Returns:
      A dict of the arrays of the `ScalerState`, by the names of its fields. If the loss function is wrapped by
      `loss_scaled(fun, number)`, the scale of the backward pass is this number, and `loss_scale` is only the scaler's
      own. For an optimizer state of `with_loss_scaling(max_norm=...)` the dict also contains `grad_norm`, f32[], the
      global norm before clipping. The values are the arrays of the state itself, so read or copy them before the state
      is donated.

    Raises:
      ValueError: `scaler` contains no scaler, or more than one.

    >>> import jmpscale
    >>> {name: float(value) for name, value in jmpscale.metrics(jmpscale.dynamic(8.0)).items() if "scale" in name}
    {'loss_scale': 8.0}
    """
    found = find_scaler(scaler, allow_batch=True)
    values = {name: getattr(found, name) for name in ARRAY_FIELDS}
    for state in find_instances(scaler, WithLossScalingState):
        norm = jax.tree.leaves(state.grad_norm)  # an optimizer of Flax NNX wraps it; without max_norm it is None
        values |= {"grad_norm": norm[0]} if norm else {}
    return values


def raise_if_stuck(scaler: PyTree, *, max_consecutive_skips: int) -> None:
    """Raises if too many steps were skipped; call it between steps.

    It raises if more than `max_consecutive_skips` consecutive steps were skipped; or if more steps were skipped in
    total, the scale of a dynamic scaler is `min_scale`, and the most recent overflow happened at this scale.

    It waits for one scalar from the device, so call it every hundred steps, for example. In a compiled program it is a
    check of `jax.experimental.checkify`: transform the program with `checkify.checkify`, and throw the error that the
    program returns.

    Args:
      scaler: a `ScalerState`, or any pytree that contains exactly one. In a whole optimizer state, sums of
        `optax.MultiSteps` that an overflow has made NaN are recognized as well.
      max_consecutive_skips: the number of consecutive skips that is acceptable, at least 1. The initial backoff skips
        some steps: from a scale of 2^16 to 1, it skips 16.

    Raises:
      FloatingPointError: the limit was exceeded. The message states the scale, the cause and the remedy.
        Under `checkify` it is a `checkify.JaxRuntimeError`.
      TypeError: `max_consecutive_skips` is not an integer.
      ValueError: `scaler` contains no scaler, more than one, or a batch of scalers; or `max_consecutive_skips` is below
        1; or the call is under `jax.jit` without `checkify`.

    >>> import jmpscale
    >>> jmpscale.raise_if_stuck(jmpscale.dynamic(), max_consecutive_skips=20)
    """
    state = find_scaler(scaler)
    limit = check_count("max_consecutive_skips", max_consecutive_skips)
    if any(map(is_traced, jax.tree.leaves(state))):
        _check_in_program(state, scaler, limit)
        return
    state = jax.tree.map(np.asarray, state)  # under a transformation JAX would trace operations on known arrays
    if _is_stuck(state, limit):
        raise FloatingPointError(_describe_skips(state, scaler, limit))


def warn_if_skipped(scaler: ScalerState, count: int) -> ScalerState:
    """Warns if exactly `count` consecutive steps have been skipped, even from inside a compiled program.

    Returns:
      The scaler, unchanged. In a compiled program its count of consecutive skips depends on the callback, so the
      compiler cannot remove the callback. A `jax.debug.callback` needs no result, but slows down every call of a
      small program on CPU, even if it is never reached.
    """

    def warn(scaler: ScalerState) -> np.ndarray:
        state = jax.tree.map(np.asarray, scaler)
        if state.consecutive_skips == count:  # under jax.vmap the callback runs for every scaler
            warnings.warn(_describe_skips(state, state, count - 1), stacklevel=2)
        return state.consecutive_skips

    def warn_from_program(scaler: ScalerState) -> jax.Array:
        skips = scaler.consecutive_skips
        result = jax.ShapeDtypeStruct(skips.shape, skips.dtype)
        return jax.pure_callback(warn, result, scaler, vmap_method="sequential")

    if not any(map(is_traced, jax.tree.leaves(scaler))):
        warn(scaler)
        return scaler
    is_due = scaler.consecutive_skips == count
    known = jax.lax.stop_gradient(scaler)
    skips = jax.lax.cond(is_due, warn_from_program, lambda scaler: scaler.consecutive_skips, known)
    return scaler._replace(consecutive_skips=skips)


def _describe_skips(state: ScalerState, tree: PyTree, limit: int) -> str:
    """Returns the message about the skipped steps of a state on the host."""
    text = next(text for holds, text in _possible_causes(state, tree, limit) if holds)
    scale = format_number(np.float32(state.loss_scale))
    return text.format(scale=scale, run=state.consecutive_skips, total=state.total_skips)


def _check_in_program(state: ScalerState, tree: PyTree, limit: int) -> None:
    from jax.experimental import checkify

    stuck = _is_stuck(state, limit)
    numbers = {"scale": state.loss_scale, "run": state.consecutive_skips, "total": state.total_skips}
    for holds, text in _possible_causes(state, tree, limit):  # checkify reports the first check that fails
        checkify.check(jnp.logical_not(stuck & holds), text.replace("{scale}", "{scale:g}"), debug=False, **numbers)


def _is_stuck(state: ScalerState, limit: int) -> jax.Array:
    return (state.consecutive_skips > limit) | _skips_at_min_scale(state, limit)


def _skips_at_min_scale(state: ScalerState, limit: int) -> jax.Array:
    """Tests whether a dynamic scale has fallen to its lower limit and steps are still skipped there.

    A run whose scale touches the limit and recovers has no skip at the limit, or few skips in total.
    """
    return _is_at_limit(state) & (state.last_skip_reason == SkipReason.MIN_SCALE) & (state.total_skips > limit)


def _is_at_limit(state: ScalerState) -> jax.Array:
    return (state.loss_scale <= np.float32(state.config.min_scale)) & (state.config.mode == "dynamic")


def _possible_causes(state: ScalerState, tree: PyTree, limit: int) -> list[tuple[jax.Array | bool, str]]:
    """Returns the text of each cause with a flag: whether it applies. The first cause that applies is reported."""
    scale, config = state.loss_scale, state.config
    corrupted = ~((scale > 0) & (scale <= LARGEST_SCALE))  # also NaN
    applies = (
        corrupted,
        state.last_skip_reason == SkipReason.LOSS,
        _has_nonfinite_sums(tree),
        _skips_at_min_scale(state, limit) & (state.consecutive_skips <= limit),
        _is_at_limit(state),
        config.mode == "static",
        state.consecutive_skips == state.total_skips,
        True,
    )
    return list(zip(applies, _CAUSES, strict=True))


def _has_nonfinite_sums(tree: PyTree) -> jax.Array | bool:
    """Tests whether gradients that `optax.MultiSteps` has accumulated are not finite, on this process's devices."""
    sums = [leaf for leaf in multi_steps_sums(tree) if is_inexact(leaf)]
    if any(map(is_traced, sums)):
        return jnp.logical_not(all_finite_here(sums))
    # Each process tests its own shards: it cannot read others, and other processes may not have called this function.
    shards = [shard.data for leaf in sums for shard in getattr(leaf, "addressable_shards", ())]
    return not all(np.isfinite(shard).all() for shard in shards)
