"""Guards of `all_finite`."""

import jax

from jmpscale._base.axes import AxisName
from jmpscale._base.marks import Mark, has_mark, mark
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_no_refs
from jmpscale._guards.checks import check_no_partial_sums, warn_if_unsynchronized


def called(tree: PyTree) -> None:
    check_no_refs(tree)
    if jax.tree_util.all_leaves([tree]) and (callable(tree) or isinstance(tree, str)):
        raise TypeError(f"tree must be a pytree of arrays, got {describe(tree)}. Pass the gradients.")


def computing(tree: PyTree, axis_name: AxisName) -> None:
    check_no_partial_sums(tree)
    warn_if_unsynchronized(axis_name)


def computed(finite: jax.Array, tree: PyTree) -> None:
    leaves = jax.tree.leaves(tree)
    grads = [x for x in leaves if has_mark(Mark.GRADIENT, x)]
    mark(Mark.CHECKED, finite, *(grads or leaves)[:1])
    if grads:
        mark(Mark.FINITE, finite)
    else:
        mark(Mark.IN_A_CHECK, leaves, finite)
    if has_mark(Mark.LOSS, tree) and len(leaves) == 1:
        mark(Mark.FINITE_LOSS, finite)
