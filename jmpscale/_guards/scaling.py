"""Guards of `scale` and `unscale`."""

import jax

from jmpscale._base.marks import Mark, has_mark, mark
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_no_refs, first_leaf, is_real, is_traced
from jmpscale._base.types import needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import check_no_partial_sums, warn_about_narrow_loss
from jmpscale._state import ScalerState


def scale_called(state: ScalerState, tree: PyTree) -> None:
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return
    if found := first_leaf(tree, lambda leaf: not is_real(leaf)):
        path, leaf = found
        raise TypeError(f"scale takes floating-point losses, got {describe(leaf)} at tree{path}. Pass only the losses.")
    if found := first_leaf(tree, lambda leaf: is_traced(leaf) and needs_wider_gradient(leaf)):
        warn_about_narrow_loss(found[1])


def scaled(losses: PyTree) -> None:
    mark(Mark.SCALED, losses)


def unscale_called(state: ScalerState, tree: PyTree) -> None:
    if state.config.mode != "disabled" and (has_mark(Mark.GRADIENT, tree) or has_mark(Mark.LOSS, tree)):
        warn_user(
            "the gradients are unscaled twice: value_and_grad and scaled_backward unscale them. Remove this call."
        )


def unscaling(state: ScalerState, tree: PyTree) -> None:
    check_no_refs(tree)
    if state.config.mode != "disabled":
        check_no_partial_sums(tree)


def unscaled(grads: PyTree, loss_scale: jax.Array) -> None:
    mark(Mark.GRADIENT, grads, loss_scale)
