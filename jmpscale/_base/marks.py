"""Marks on arrays, by which a function notices that an array is not what it should be.

An array has a mark only as the very object that a function of this package returned: whatever is computed from it has
none. So a mark is never wrong, and costs nothing in a compiled program.
"""

import enum
import weakref
from typing import Any

import jax
import numpy as np

from jmpscale._base.tree import PyTree, is_traced


class Mark(enum.Enum):
    """What an array is."""

    GRADIENT = "an unscaled gradient"  # its source is the loss scale
    LOSS = "a loss that value_and_grad returned"
    SCALED = "a loss that scale returned"
    SCALED_BACKWARD = "a loss that scaled_backward returned"
    KNOWN_SCALE = "a loss or a gradient that value_and_grad computed with a scale that is not traced"
    CHECKED = "whether a tree is finite"  # its source is the first gradient of the tree, or the first leaf
    IN_A_CHECK = "a leaf of a checked tree without unscaled gradients"  # its source is the flag
    APPLIED = "whether a tree is finite whose arrays optax_step has applied as gradients"
    ADAPTED = "a flag or a gradient by which a scale was adapted"  # its source is the new scale
    FINITE = "whether unscaled gradients are finite"  # its source may be the loss scale after this step
    FINITE_LOSS = "whether the loss is finite"
    LOSS_SCALE = "a loss scale by which a loss was multiplied that is differentiated"
    READ_SCALE = "a loss scale that was read, perhaps to unscale gradients by it"
    UNSCALING_SCALE = "a loss scale by which gradients were unscaled"
    UNREAD_SCALE = "a loss scale that had scaled a loss and was not read before a step adapted it"
    OLD_SCALE = "a loss scale that a step has adapted"
    NEW_SCALE = "a loss scale from after a step"  # its source is the scale from before the first step of the program
    ADAPTED_SCALE = "a loss scale from after a step"  # its source is the scale from before this step


_used: set[Mark] = set()  # all kinds of values that the process has had
_marked = {kind: weakref.WeakValueDictionary[int, jax.Array]() for kind in Mark}  # by id
_sources = {kind: weakref.WeakValueDictionary[int, jax.Array]() for kind in Mark}  # by id of the marked array


def mark(kind: Mark, tree: PyTree, source: object = None) -> None:
    """Marks the arrays of a tree; a traced `source`, the value that they come from, is what `source_of` returns."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            remember(kind)
            _marked[kind][id(x)] = x
            _sources[kind][id(x)] = source if is_traced(source) else x


def mark_scale(kind: Mark, loss_scale: Any) -> None:
    """Marks a loss scale that is traced, perhaps in a variable of Flax NNX.

    It must be fast for any other scale, because every call of a compiled function flattens a state.
    """
    if is_traced(loss_scale):
        mark(kind, loss_scale)
    elif not isinstance(loss_scale, (jax.Array, np.ndarray, np.generic)):
        mark(kind, [x for x in jax.tree.leaves(loss_scale) if is_traced(x)])


def source_of(kind: Mark, x: Any) -> Any:
    """Returns the source of a marked array; any other value itself."""
    return _sources[kind].get(id(x), x) if has_mark(kind, x) else x


def has_mark(kind: Mark, tree: PyTree) -> bool:
    return any(_marked[kind].get(id(x)) is x for x in jax.tree.leaves(tree))


def remember(kind: Mark) -> None:
    """Records that this process has values of a kind; no other memory of earlier calls exists."""
    _used.add(kind)


def was_used(*kinds: Mark) -> bool:
    """Tests whether this process has ever had values of one of these kinds."""
    return not _used.isdisjoint(kinds)
