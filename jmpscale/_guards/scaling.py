"""Guards of `scale` and `unscale`."""

import jax

from jmpscale._base.compat import is_differentiated
from jmpscale._base.marks import Mark, has_mark, mark, mark_scale, source_of
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_no_refs, first_leaf, is_real, is_traced
from jmpscale._base.types import needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import check_no_partial_sums, warn_about_narrow_loss
from jmpscale._state import ScalerState, scale_of


def scale_called(state: ScalerState, tree: PyTree) -> None:
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return
    if found := first_leaf(tree, lambda leaf: not is_real(leaf)):
        path, leaf = found
        raise TypeError(f"scale takes floating-point losses, got {describe(leaf)} at tree{path}. Pass only the losses.")
    if found := first_leaf(tree, lambda leaf: is_traced(leaf) and needs_wider_gradient(leaf)):
        warn_about_narrow_loss(found[1])


def scaled(state: ScalerState, losses: PyTree, scaled_losses: PyTree) -> None:
    mark(Mark.SCALED, scaled_losses)
    # A scaled constant is the loss scale, by which the user may unscale.
    is_loss = any(map(is_differentiated, jax.tree.leaves(losses)))
    mark_scale(Mark.LOSS_SCALE if is_loss else Mark.READ_SCALE, scale_of(state))


def unscale_called(state: ScalerState, tree: PyTree) -> None:
    _warn_if_scaler_is_new(state)
    if state.config.mode != "disabled" and (has_mark(Mark.GRADIENT, tree) or has_mark(Mark.LOSS, tree)):
        warn_user(
            "the gradients are unscaled twice: value_and_grad and scaled_backward unscale them. Remove this call."
        )


def _warn_if_scaler_is_new(state: ScalerState) -> None:
    """Warns if the scaler from before the last step has scaled a loss, and has unscaled nothing, unlike this one."""
    new = scale_of(state)
    old = source_of(Mark.ADAPTED_SCALE, new)
    is_unused = has_mark(Mark.UNREAD_SCALE, old) and not has_mark(Mark.UNSCALING_SCALE, old)
    if is_unused and not has_mark(Mark.LOSS_SCALE, new):
        warn_user(
            "the gradients are unscaled by the scaler that update has returned, but the loss was scaled by the scaler "
            "from before this update, whose scale may differ. Call unscale before update, with the same scaler."
        )


def unscaling(state: ScalerState, tree: PyTree) -> None:
    check_no_refs(tree)
    if state.config.mode != "disabled":
        check_no_partial_sums(tree)


def unscaled(grads: PyTree, loss_scale: jax.Array) -> None:
    mark(Mark.GRADIENT, grads, loss_scale)
    mark(Mark.UNSCALING_SCALE, loss_scale)
