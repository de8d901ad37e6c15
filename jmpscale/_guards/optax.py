"""Guards of `with_loss_scaling`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jmpscale._base.arguments import check_count, check_in_range
from jmpscale._base.axes import AxisName
from jmpscale._base.frameworks import known_decays
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, check_no_refs, find_instances, first_leaf, is_inexact, is_traced
from jmpscale._base.types import is_narrow, needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import (
    check_no_partial_sums,
    check_no_scaler,
    check_not_wrapped,
    check_params,
    check_same_structure,
    check_same_types,
    check_scaler,
    check_transformation,
    in_compiled_step,
    mark_adapted,
    mark_unread_scale,
    warn_if_averages_are_narrow,
    warn_if_constant,
    warn_if_gated,
    warn_if_gradients_are_narrow,
    warn_if_loss_is_pair,
    warn_if_never_unscaled,
    warn_if_nothing_is_scaled,
    warn_if_unsynchronized,
)
from jmpscale._guards.checks import initializing as initializing  # a guard of both wrappers
from jmpscale._state import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScalerState,
    WithLossScalingState,
    WithMasterParamsState,
    scale_of,
)


def created(inner: object, scaler: ScalerState | None, max_norm: object, warn_after_skips: object) -> None:
    remedy = "Pass one, such as optax.adam(1e-3). A framework's optimizer goes around with_loss_scaling, not inside it."
    comes_first = "The optimizer comes first: with_loss_scaling(inner, scaler)."
    check_transformation(inner, "inner", comes_first if isinstance(inner, ScalerState) else remedy)
    if scaler is not None:
        check_scaler(scaler)
    if max_norm is not None:
        check_in_range("max_norm", max_norm, SMALLEST_SCALE, LARGEST_SCALE, "Omit it to clip nothing.")
    if warn_after_skips is not None:
        check_count("warn_after_skips", warn_after_skips)


def initialized(params: PyTree, state: WithLossScalingState) -> None:
    check_not_wrapped(state.inner_state, "inner", "Wrap the whole optimizer once.")
    if state.grad_norm is not None:
        _warn_if_micro_batches_are_clipped(state.inner_state)
    if state.scaler.config.mode != "disabled":
        _check_beside_copies(state.inner_state)
        _warn_if_narrow(params, state.inner_state)


def called(
    grads: PyTree,
    state: object,
    params: PyTree,
    others: tuple[object, ...],
    extra_args: Mapping[str, object],
    max_norm: float | None,
) -> None:
    if others or has_mark(Mark.LOSS, grads):
        got = "another value by position" if others else "the loss in place of the gradients"
        raise TypeError(f"the arguments are tx.update(grads, state, params, value=loss), got {got}.")
    if "loss" in extra_args:  # a name that is passed on would be ignored, and the step applied
        raise TypeError("the arguments are tx.update(grads, state, params, value=loss), got loss=. Write value=.")
    if isinstance(grads, WithLossScalingState):
        raise TypeError("the arguments are tx.update(grads, state, params), got the state first.")
    if not isinstance(state, WithLossScalingState):
        raise TypeError(
            f"state must be a WithLossScalingState, got {type_name(state)}. The arguments are (grads, state, params). "
            "Use the state of an unwrapped optimizer as tx.init(params)._replace(inner_state=...)."
        )
    check_scaler(state.scaler, "state.scaler")
    _check_norm_of_state(state, max_norm)
    check_no_refs(grads, "updates")
    check_no_partial_sums(grads, "updates")
    check_no_scaler(grads)
    check_params(params)
    loss = extra_args.get("value")
    if has_mark(Mark.GRADIENT, loss) and any(map(jnp.ndim, jax.tree.leaves(loss))):  # unscale returns losses, too
        warn_user("the loss must be the unscaled loss, got gradients. Pass value=loss.")


def deciding(
    grads: PyTree, params: PyTree, scaler: ScalerState, loss: PyTree, axis_name: AxisName, norm_axis_name: AxisName
) -> None:
    if not has_mark(Mark.GRADIENT, grads):
        warn_if_never_unscaled(scaler, "tx.update")
    mark_unread_scale(scaler)
    warn_if_unsynchronized(axis_name, norm_axis_name)
    warn_if_gated("with_loss_scaling", "The wrapper skips steps itself: call tx.update without apply_if.")
    if loss is not None or in_compiled_step(grads):  # examples pass gradients alone
        warn_if_nothing_is_scaled(scaler)
    warn_if_gradients_are_narrow(grads)
    _warn_if_unscaled_by_another(grads, scaler)
    check_no_partial_sums(loss, "value")
    # value_and_grad has warned; or the program is a whole training run, which starts from constant parameters.
    if not has_mark(Mark.KNOWN_SCALE, (grads, loss)) and not _are_constants(params):
        warn_if_constant(scaler, grads, "optimizer state")
    warn_if_loss_is_pair(loss)


def inner_returned(grads: PyTree, state: PyTree, updates: PyTree, new_state: PyTree) -> None:
    check_same_structure(grads, updates, "updates", "inner", "Gate optax_step(inner, grads) with apply_if.")
    check_same_types(state, new_state, "state", "inner", "Place a transformation that only records values outside.")


def adapted(scaler: ScalerState, new: ScalerState, grads: PyTree) -> None:
    mark_adapted(scaler, new, jax.tree.leaves(grads)[:1])


def _are_constants(params: PyTree) -> bool:
    leaves = jax.tree.leaves(params)
    return bool(leaves) and not any(map(is_traced, leaves))


def _check_norm_of_state(state: WithLossScalingState, max_norm: float | None) -> None:
    """Raises if the state is from a wrapper with `max_norm` and the wrapper is without it, or the reverse."""
    has_norm = bool(jax.tree.leaves(state.grad_norm))
    if has_norm != (max_norm is not None):
        expected, rule, got = ("None", "not set", "an array") if has_norm else ("an array", "set", "None")
        raise ValueError(
            f"state.grad_norm must be {expected} because max_norm is {rule}, got {got}. After restoring the state of a "
            "wrapper with another max_norm, call state._replace(grad_norm=tx.init(params).grad_norm)."
        )


def _warn_if_unscaled_by_another(grads: PyTree, scaler: ScalerState) -> None:
    """Warns if the gradients come from a scaler that another optimizer has adapted already, not from this one.

    Any other difference proves nothing: this scaler may be a copy, on another device for example.
    """
    start = source_of(Mark.NEW_SCALE, scale_of(scaler))
    scales = [source_of(Mark.GRADIENT, x) for x in jax.tree.leaves(grads)]
    adapted = [x for x in scales if has_mark(Mark.OLD_SCALE, x)]
    if scaler.config.mode == "dynamic" and any(source_of(Mark.NEW_SCALE, x) is not start for x in adapted):
        warn_user(
            "the gradients were unscaled by another scaler, so the scaler in state does not adapt to their overflows. "
            "Pass one state to jmpscale.value_and_grad and tx.update; for several optimizers, wrap one optax.partition."
        )


def _warn_if_narrow(params: PyTree, inner_state: PyTree) -> None:
    """Warns if all parameters are float16, or if averages of gradients are."""
    arrays = list(filter(is_inexact, jax.tree.leaves(params)))
    has_copies = bool(find_instances(inner_state, WithMasterParamsState))
    # A float16 parameter among others may be frozen.
    if arrays and all(map(needs_wider_gradient, arrays)) and not has_copies:
        warn_user(
            "the parameters are float16, in which small updates are rounded away. Keep them in float32, and use "
            "jmpscale.autocast or convert them in the loss function; or wrap the optimizer in with_master_params."
        )
    warn_if_averages_are_narrow(inner_state)
    _warn_if_averages_stop(inner_state)


def _check_beside_copies(inner_state: PyTree) -> None:
    """Raises if a transformation beside `with_master_params`, which sees float16 parameters, has a float16 state."""

    def has_copies(x: object) -> bool:
        return isinstance(x, WithMasterParamsState)

    beside = jax.tree.map(lambda x: None if has_copies(x) else x, inner_state, is_leaf=has_copies)
    if find_instances(inner_state, WithMasterParamsState) and (found := first_leaf(beside, needs_wider_gradient)):
        path, x = found
        raise TypeError(
            f"inner has {describe(x)} in its state{path}, beside the copies of with_master_params, but its gradients "
            "are float32. Place with_master_params outside: with_master_params(with_loss_scaling(inner))."
        )


def _warn_if_averages_stop(inner_state: PyTree) -> None:
    """Warns if a decay rounds to 1, or if the dtype of an average cannot hold what its decay changes.

    Decays are known only from the state of `optax.inject_hyperparams`, outside of a compiled function. For parameters
    in bfloat16, the learning rate decides whether updates are rounded away, so `check_step` says it, after a run.
    """
    for name, decay, averages in known_decays(inner_state):
        if is_traced(decay) or not getattr(decay, "is_fully_addressable", True):
            continue
        value, narrow = float(decay), [x for x in averages if is_narrow(x)]
        if value == 1 and is_narrow(decay):
            warn_user(
                f"the hyperparameter {name} is 1 in {decay.dtype}, so its average never changes, and its correction "
                "divides by 0. Pass hyperparam_dtype=jnp.float32 to optax.inject_hyperparams."
            )
        elif any(0 < 1 - value < jnp.finfo(x.dtype).eps / 4 for x in narrow):
            warn_user(
                f"an average with the decay {name}={value:.6g} is {narrow[0].dtype}, in which it never becomes "
                "smaller: a step changes it by less than its rounding. Use parameters in float32, or another optimizer."
            )


def _warn_if_micro_batches_are_clipped(inner_state: PyTree) -> None:
    if find_instances(inner_state, optax.MultiStepsState):
        warn_user(
            "max_norm clips the gradients of each micro-batch, because inner contains optax.MultiSteps. To clip their "
            "mean, place the clip inside: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), tx), k)."
        )
