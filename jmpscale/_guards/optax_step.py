"""Guards of `optax_step`."""

import jax

from jmpscale._base.marks import Mark, mark, source_of
from jmpscale._base.tree import PyTree, first_leaf, structure
from jmpscale._base.types import needs_wider_gradient
from jmpscale._guards.checks import (
    check_no_scaler,
    check_not_wrapped,
    check_transformation,
    warn_if_averages_are_narrow,
    warn_if_gradients_are_narrow,
)


def created(tx: object, grads: PyTree) -> None:
    check_transformation(tx, "tx", "Call optax_step(tx, grads), with the optimizer, not its update.")
    check_no_scaler(grads)


def called(grads: PyTree, carry: tuple[PyTree, ...]) -> None:
    is_swapped = len(carry) == 2 and structure(carry[1]) == structure(grads) != structure(carry[0])
    if len(carry) != 2 or is_swapped:
        got = "them in the opposite order" if is_swapped else len(carry)
        raise TypeError(
            f"carry must be two values, the parameters and then the optimizer state, got {got}. Call "
            "apply_if(finite, optax_step(tx, grads), params, opt_state)."
        )
    params, opt_state = carry
    mark(Mark.APPLIED, [source_of(Mark.IN_A_CHECK, x) for x in jax.tree.leaves(grads)])
    check_not_wrapped(opt_state, "tx", "Pass the inner optimizer, or call tx.update without apply_if.")
    if not first_leaf(params, needs_wider_gradient):  # with disabled(), their gradients are float16 as well
        warn_if_gradients_are_narrow(grads, "grads")
        warn_if_averages_are_narrow(opt_state)
