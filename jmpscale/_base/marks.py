"""Marks on arrays, by which a function notices that an array is not what it should be.

An array has a mark only as the very object that a function of this package returned: whatever is computed from it has
none. So a mark is never wrong, and costs nothing in a compiled program.
"""

import enum
import weakref

import jax

from jmpscale._base.tree import PyTree


class Mark(enum.Enum):
    """What an array is."""

    GRADIENT = "a gradient in true units"
    LOSS = "a loss that value_and_grad returned"
    SCALED = "a loss that scale returned"
    FINITE_LOSS = "whether the loss is finite"


_marked = {kind: weakref.WeakValueDictionary[int, jax.Array]() for kind in Mark}  # by id


def mark(kind: Mark, tree: PyTree) -> None:
    _marked[kind].update((id(x), x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def has_mark(kind: Mark, tree: PyTree) -> bool:
    return any(_marked[kind].get(id(x)) is x for x in jax.tree.leaves(tree))
