"""Guards of `with_loss_scaling`, and checks of optimizers and gradients."""

import itertools
from collections.abc import Mapping
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmpscale._base.arguments import check_count, check_in_range
from jmpscale._base.axes import AxisName
from jmpscale._base.frameworks import averages_of_gradients, known_decays
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, check_no_refs, find_instances, first_leaf, is_inexact, is_traced
from jmpscale._base.types import is_narrow, needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._guards.axes import check_no_partial_sums, warn_if_unsynchronized
from jmpscale._guards.gate import check_same_structure, check_same_types, warn_if_gated
from jmpscale._guards.scaler import check_scaler, in_compiled_step, warn_if_constant, warn_if_nothing_is_scaled
from jmpscale._guards.update import mark_adapted, warn_if_loss_is_pair
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, ScalerState, WithLossScalingState

_MULTI_STEPS = (  # its sum of gradients is reset by a multiplication by zero, and 0 * inf is NaN
    "with_loss_scaling is inside optax.MultiSteps: after one overflow its accumulated gradients stay NaN, and every "
    "later step is skipped. Place it outside: with_loss_scaling(optax.MultiSteps(tx, k)). If a training loop adds "
    "MultiSteps itself, turn its gradient accumulation off."
)
_APPLY_IF_FINITE = (
    "with_loss_scaling is inside optax.apply_if_finite, whose skips do not adjust the scale. Remove apply_if_finite: "
    "the wrapper skips steps itself."
)
_MASKED = (
    "with_loss_scaling is inside optax.masked or optax.partition: it neither checks nor skips the updates of the other "
    "parameters. Place it outside: with_loss_scaling(optax.masked(tx, mask))."
)
# The states of transformations that keep the wrapper from its work. The state of optax.partition has MaskedStates.
_OUTER = {optax.MultiStepsState: _MULTI_STEPS, optax.ApplyIfFiniteState: _APPLY_IF_FINITE, optax.MaskedState: _MASKED}


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
    if not isinstance(state, WithLossScalingState):
        raise TypeError(
            f"state must be a WithLossScalingState, got {type_name(state)}. The arguments are (grads, state, params). "
            "Use the state of an unwrapped optimizer as tx.init(params)._replace(inner_state=...)."
        )
    check_scaler(state.scaler, "state.scaler")
    _check_norm_of_state(state, max_norm)
    check_no_refs(grads, "updates")
    check_no_partial_sums(grads)
    check_no_scaler(grads)
    arrays = jax.tree.leaves(params)
    if arrays and all(has_mark(Mark.GRADIENT, x) for x in arrays):
        raise TypeError("params must be the parameters, got gradients. The arguments are (grads, state, params).")
    loss = extra_args.get("value")
    if has_mark(Mark.GRADIENT, loss) and any(map(jnp.ndim, jax.tree.leaves(loss))):  # unscale returns losses, too
        warn_user("the loss must be the unscaled loss, got gradients. Pass value=loss.")


def deciding(grads: PyTree, scaler: ScalerState, loss: PyTree, axis_name: AxisName, norm_axis_name: AxisName) -> None:
    warn_if_unsynchronized(axis_name, norm_axis_name)
    warn_if_gated("with_loss_scaling", "The wrapper skips steps itself: call tx.update without apply_if.")
    if loss is not None or in_compiled_step(grads):  # examples pass gradients alone
        warn_if_nothing_is_scaled(scaler)
    warn_if_gradients_are_narrow(grads)
    _warn_if_unscaled_by_another(grads, scaler)
    if not has_mark(Mark.KNOWN_SCALE, (grads, loss)):  # value_and_grad has warned
        warn_if_constant(scaler, grads, "optimizer state")
    warn_if_loss_is_pair(loss)


def inner_returned(grads: PyTree, state: PyTree, updates: PyTree, new_state: PyTree) -> None:
    check_same_structure(grads, updates, "updates", "inner", "Gate optax_step(inner, grads) with apply_if.")
    check_same_types(state, new_state, "state", "inner", "Place a transformation that only records values outside.")


def adapted(scaler: ScalerState, new: ScalerState, grads: PyTree) -> None:
    mark_adapted(scaler, new, jax.tree.leaves(grads)[:1])


def check_transformation(tx: object, name: str, remedy: str) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"{name} must be an optax.GradientTransformation, got {type_name(tx)}. {remedy}")


def check_not_wrapped(state: PyTree, name: str, remedy: str) -> None:
    """Raises if an optimizer has loss scaling already: a step has one scaler."""
    if find_instances(state, WithLossScalingState):
        raise TypeError(f"{name} must not contain with_loss_scaling, got a wrapped optimizer. {remedy}")


def check_no_scaler(grads: PyTree) -> None:
    """Raises if the gradients contain the gradient of a scale: the optimizer would change the scale as well."""
    if any(is_inexact(scaler.loss_scale) for scaler in find_instances(grads, ScalerState)):
        raise TypeError("the gradients contain a ScalerState, which the optimizer would change. Keep it out of params.")


def warn_if_inside_another(state: PyTree) -> None:
    """Warns if an optimizer state shows that the wrapper is inside a transformation that keeps it from its work."""
    found = find_instances(state, tuple(_OUTER))

    def is_masked(x: object) -> TypeGuard[optax.MaskedState]:
        return isinstance(x, optax.MaskedState)

    has_wrapper = [bool(find_instances(tuple(x), WithLossScalingState)) for x in found]
    masked_states = [x.inner_state for x, outer in zip(found, has_wrapper, strict=True) if is_masked(x) and not outer]
    # The other parameters may be frozen, by optax.set_to_zero, which keeps no state.
    are_frozen = bool(masked_states) and all(isinstance(inner, optax.EmptyState) for inner in masked_states)
    for x in itertools.compress(found, has_wrapper):
        if not (are_frozen and is_masked(x)):
            warn_user(_OUTER[type(x)])


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
    start = source_of(Mark.NEW_SCALE, scaler.loss_scale)
    scales = [source_of(Mark.GRADIENT, x) for x in jax.tree.leaves(grads)]
    adapted = [x for x in scales if has_mark(Mark.OLD_SCALE, x)]
    if scaler.config.mode == "dynamic" and any(source_of(Mark.NEW_SCALE, x) is not start for x in adapted):
        warn_user(
            "the gradients were unscaled by another scaler, so the scaler in state does not adapt to their overflows. "
            "Pass one state to jmpscale.value_and_grad and tx.update; for several optimizers, wrap one optax.partition."
        )


def warn_if_gradients_are_narrow(grads: PyTree, name: str = "updates") -> None:
    """Warns about gradients in float16, in which true units underflow."""
    if found := first_leaf(grads, needs_wider_gradient):
        path, x = found
        warn_user(
            f"the gradients must be float32, got {describe(x)} at {name}{path}: in true units they underflow. They "
            "were converted after the unscaling, or do not come from jmpscale.value_and_grad, which returns float32."
        )


def _warn_if_narrow(params: PyTree, inner_state: PyTree) -> None:
    """Warns if all parameters are float16, or if averages of gradients are."""
    arrays = list(filter(is_inexact, jax.tree.leaves(params)))
    if arrays and all(map(needs_wider_gradient, arrays)):  # a float16 parameter among others may be frozen
        warn_user(
            "the parameters are float16, in which small updates are rounded away. Keep them in float32, and use "
            "jmpscale.autocast or convert them in the loss function, unless the optimizer keeps float32 copies."
        )
    warn_if_averages_are_narrow(inner_state)
    _warn_if_averages_stop(inner_state)


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


def warn_if_averages_are_narrow(inner_state: PyTree) -> None:
    """Warns if an optimizer keeps averages of gradients in float16, in which small gradients underflow."""
    averages = filter(is_inexact, averages_of_gradients(inner_state))
    if any(jnp.result_type(x) == np.float16 for x in averages):
        warn_user("averages of gradients in float16 underflow. Change mu_dtype or accumulator_dtype to bfloat16.")


def _warn_if_micro_batches_are_clipped(inner_state: PyTree) -> None:
    if find_instances(inner_state, optax.MultiStepsState):
        warn_user(
            "max_norm clips the gradients of each micro-batch, because inner contains optax.MultiSteps. To clip their "
            "mean, place the clip inside: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), tx), k)."
        )
