"""Guards of `update`."""

from jax.typing import ArrayLike

from jmpscale._base.arguments import check_flag
from jmpscale._base.axes import AxisName
from jmpscale._base.marks import Mark, has_mark, mark, source_of
from jmpscale._base.tree import PyTree, is_real_scalar
from jmpscale._base.warn import warn_user
from jmpscale._guards.axes import warn_if_unsynchronized
from jmpscale._guards.gate import warn_if_gated
from jmpscale._guards.scaler import check_scaler, warn_if_constant, warn_if_nothing_is_scaled
from jmpscale._state import ScalerState


def called(scaler: ScalerState, finite: ArrayLike, loss: PyTree, axis_name: AxisName) -> None:
    if isinstance(finite, ScalerState) and not isinstance(scaler, ScalerState):
        raise TypeError("the arguments are update(scaler, finite), got them in the opposite order.")
    check_scaler(scaler)
    check_flag(finite)
    if scaler.config.mode == "disabled":
        return
    if not has_mark(Mark.KNOWN_SCALE, (loss, source_of(Mark.CHECKED, finite))):  # value_and_grad has warned
        warn_if_constant(scaler, finite)
    if has_mark(Mark.CHECKED, finite):  # examples pass True or False
        warn_if_nothing_is_scaled(scaler)
    warn_if_gated("jmpscale.update", "Call update after apply_if, with the same flag.")
    if has_mark(Mark.FINITE_LOSS, finite):
        warn_user("finite must be about the gradients, got all_finite(loss). Pass all_finite(grads).")
    if loss is not None:
        warn_if_unsynchronized(axis_name)
        warn_if_loss_is_pair(loss)
    if source_of(Mark.ADAPTED, source_of(Mark.CHECKED, finite)) is scaler.loss_scale:
        warn_user("the scaler is updated twice in a step. Remove this call: with_loss_scaling updates its own scaler.")


def computed(scaler: ScalerState, new: ScalerState, finite: ArrayLike) -> None:
    mark_adapted(scaler, new, source_of(Mark.CHECKED, finite))


def mark_adapted(scaler: ScalerState, new: ScalerState, checked: object) -> None:
    """Marks the scales; for `checked`, a flag or the first gradient, `update` must not adapt the scale again."""
    if scaler.config.mode == "dynamic":
        mark(Mark.ADAPTED, checked, new.loss_scale)
        mark(Mark.OLD_SCALE, scaler.loss_scale)
        mark(Mark.NEW_SCALE, new.loss_scale, source_of(Mark.NEW_SCALE, scaler.loss_scale))


def warn_if_loss_is_pair(loss: PyTree) -> None:
    if isinstance(loss, tuple) and len(loss) == 2 and has_mark(Mark.LOSS, loss[0]) and not is_real_scalar(loss[1]):
        warn_user("the loss must be given alone, got a pair of the loss and auxiliary data. Pass the first value.")
