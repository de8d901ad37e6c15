"""Parts of the arguments and of the result of a training step."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import PyTree, is_key, is_named_tuple
from jmpscale._base.types import is_numeric
from jmpscale._step.call import is_array_type

_LIBRARIES = {"jmpscale", "optax"}  # whose named tuples are parts as a whole


class Match(NamedTuple):
    """A part of the arguments of a step, and the part of its result that is its new value.

    `old` has the positions of its leaves among `jax.tree.leaves(call.arguments)`, and `new` the positions of their new
    values among `jax.tree.leaves(out)`, where `out` is what `call.run` or `call.trace` returned.
    """

    name: str  # such as `params` or `state['params']`
    tree: PyTree  # the part of the arguments; of an object of Flax NNX, without variables that the step removes
    old: tuple[int, ...]
    new: tuple[int, ...]
    # Whether it is state for certain. Otherwise gradients depend on it and do not change it, as they depend on data,
    # and the step has no other data: it may be a batch that looks like its reconstruction, or a recurrent state.
    is_certain: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of the arguments, or of the result, of a step."""

    name: str
    tree: PyTree
    start: int  # the position of its first leaf
    is_result: bool = False  # whether it is all that the step returns

    @functools.cached_property
    def leaves(self) -> range:
        return range(self.start, self.start + len(jax.tree.leaves(self.tree)))

    @functools.cached_property
    def types(self) -> tuple[object, ...]:
        """The structure and the types of the leaves, which a value and its new value have in common."""
        leaves, structure = jax.tree.flatten(self.tree)
        return structure, *map(type_of_leaf, leaves)

    @property
    def is_lone(self) -> bool:
        return jax.tree_util.all_leaves([self.tree])

    @property
    def is_count_or_key(self) -> bool:
        """Whether it is an integer or a random key."""
        x = self.tree
        return is_key(x) or (is_array_type(x) and x.shape == () and not jnp.issubdtype(x.dtype, np.inexact))

    @property
    def has_data(self) -> bool:
        """Whether it contains an array of numbers, as a batch does; a learning rate is none."""
        return any(is_array_type(x) and x.ndim and not is_key(x) for x in jax.tree.leaves(self.tree))

    @property
    def has_library_state(self) -> bool:
        """Whether it contains a scaler, or the state of an optimizer."""
        return any(map(_is_library_state, jax.tree.leaves(self.tree, is_leaf=_is_library_state)))

    def elements(self) -> list["Part"]:
        """Returns the elements of a container of the user; none if the part is anything else."""
        is_container = type(self.tree) in {tuple, list, dict} or is_named_tuple(self.tree)
        is_container |= self.is_result and dataclasses.is_dataclass(self.tree)  # as of the trainer of Levanter
        if not is_container or _is_library_state(self.tree):
            return []
        entries = jax.tree_util.tree_leaves_with_path(self.tree, is_leaf=lambda x: x is not self.tree)
        names = [self.name + jax.tree_util.keystr(path) for path, _ in entries]
        return elements_of(names, [element for _, element in entries], self.start)

    def nested(self) -> Iterator["Part"]:
        """Yields the part, its elements, and theirs."""
        yield self
        for element in self.elements():
            yield from element.nested()

    def divided(self, known: Sequence[tuple[object, ...]]) -> list["Part"]:
        """Returns the largest parts of it that have known types, and the smallest ones that have not."""
        elements = [] if self.types in known else self.elements()
        return [part for element in elements for part in element.divided(known)] or [self]


def _is_library_state(node: object) -> bool:
    return type(node).__module__.partition(".")[0] in _LIBRARIES


def elements_of(names: Sequence[str], trees: Sequence[PyTree], start: int) -> list[Part]:
    """Returns parts whose leaves follow one another."""
    parts = []
    for name, tree in zip(names, trees, strict=True):
        parts.append(Part(name, tree, start))
        start = parts[-1].leaves.stop
    return parts


def positions_of(part: Part) -> dict[tuple[str, ...], int]:
    """Returns the position of each leaf of a part, by its path."""
    entries = jax.tree_util.tree_leaves_with_path(part.tree)
    return {names_of(path): part.start + i for i, (path, _) in enumerate(entries)}


def names_of(path: Any) -> tuple[str, ...]:
    """Returns the names in a path, which are the same for the attributes of an object and the keys of its state."""
    names = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))) for key in path]
    is_variable = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return tuple(names[:-1] if is_variable else names)


def type_of_leaf(leaf: Any) -> object:
    """Returns the shape and the dtype of an array or of a number; any other leaf must be the same before and after."""
    if is_array_type(leaf) or is_numeric(leaf):
        return np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    return leaf
