"""Guards of `update`."""

from jax.typing import ArrayLike

from jmpscale._base.arguments import check_flag
from jmpscale._base.axes import AxisName
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.tree import PyTree
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import (
    check_no_partial_sums,
    check_scaler,
    mark_adapted,
    mark_unread_scale,
    warn_if_constant,
    warn_if_gated,
    warn_if_loss_is_pair,
    warn_if_never_unscaled,
    warn_if_nothing_is_scaled,
    warn_if_unsynchronized,
)
from jmpscale._state import ScalerState, WithLossScalingState, scale_of


def called(scaler: ScalerState, finite: ArrayLike, loss: PyTree, axis_name: AxisName) -> None:
    if isinstance(finite, ScalerState) and not isinstance(scaler, ScalerState):
        raise TypeError("the arguments are update(scaler, finite), got them in the opposite order.")
    if isinstance(scaler, WithLossScalingState):
        raise TypeError(
            "scaler must be a ScalerState, got the state of with_loss_scaling, whose scaler tx.update adjusts. Remove "
            "this call."
        )
    check_scaler(scaler)
    check_flag(finite)
    if scaler.config.mode == "disabled":
        return
    if not has_mark(Mark.KNOWN_SCALE, (loss, source_of(Mark.CHECKED, finite))):  # value_and_grad has warned
        warn_if_constant(scaler, finite)
    if has_mark(Mark.CHECKED, finite):  # examples pass True or False
        warn_if_nothing_is_scaled(scaler)
    warn_if_gated("jmpscale.update", "Call update after apply_if, with the same flag.")
    mark_unread_scale(scaler)
    if has_mark(Mark.APPLIED, finite):
        warn_if_never_unscaled(scaler, "optax_step")
    if has_mark(Mark.FINITE_LOSS, finite):
        warn_user("finite must be about the gradients, got all_finite(loss). Pass all_finite(grads).")
    if loss is not None:
        check_no_partial_sums(loss, "loss")
        warn_if_unsynchronized(axis_name)
        warn_if_loss_is_pair(loss)
    if source_of(Mark.ADAPTED, source_of(Mark.CHECKED, finite)) is scale_of(scaler):
        warn_user("the scaler is updated twice in a step. Remove this call: with_loss_scaling updates its own scaler.")


def computed(scaler: ScalerState, new: ScalerState, finite: ArrayLike) -> None:
    mark_adapted(scaler, new, source_of(Mark.CHECKED, finite))
