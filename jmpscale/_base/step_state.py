"""Which results of a training step are the new values of its arguments: the state of the training.

The state is what the step returns with the structure and the types of an argument, in the order of the arguments, and
the objects of Flax NNX among the arguments:

    call = StepCall(step, args, kwargs)
    out, program = call.trace()
    for match in match_state(call, out, program):
        old, new = [arguments[i] for i in match.old], [results[i] for i in match.new]

where `arguments` and `results` are the leaves of `call.arguments` and of `out`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.dependence import Dependence
from jmpscale._base.step_call import StepCall, is_array_type
from jmpscale._base.tree import PyTree, is_named_tuple, named_leaves
from jmpscale._base.types import is_numeric

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


def match_state(call: StepCall, out: PyTree, program: core.ClosedJaxpr | None) -> list[Match]:
    """Returns the parts of the arguments of a step that it returns, in the order of the arguments.

    A part is an argument that comes back as a whole; or an element of a tuple, a list, a dict or a named tuple that
    does not, except of the states of optax. In the result, the elements of these containers count, too, and so do the
    fields of a dataclass that is the whole result. A lone array is a part if it is the first argument. Any other one is
    a part only if it holds integers or a key, and depends on its old value, because an image may look like its
    reconstruction, and a learning rate like a loss.

    `program`, which `call.trace` returned with `out`, distinguishes parameters from gradients: a new value that depends
    on the result of a backward pass must also depend on its old value without the detour through a backward pass. It is
    None for a step that JAX cannot trace. If
    several parts have the same types, such as the parameters and their average, each takes a result that depends on it.

    Returns:
      The matches; none if no argument comes back.
    """
    result, after = out
    objects, values = _arguments(call)
    results, parts = _divided(result, values)
    pairs = _pairs(parts, results, [part for part in values if not part.start], _PartDependence(call, out, program))
    matches = [Match(old.name, old.tree, tuple(old.leaves), tuple(new.leaves)) for old, new in pairs]
    new_objects = _elements([part.name for part in objects], after, len(jax.tree.leaves(result)))
    matches += map(_match_object, objects, new_objects)
    return sorted(matches, key=lambda match: match.old)


def changed_types(
    call: StepCall, out: PyTree, matches: Sequence[Match], program: core.ClosedJaxpr | None
) -> Iterator[tuple[str, PyTree, PyTree]]:
    """Yields the arguments that come back with their structure, but with other shapes or dtypes, so nothing matches.

    Each is a name, the argument, and its new value, which depends on it if `program` is given.
    """
    dependence = _PartDependence(call, out, program)
    matched = {position for match in matches for position in match.old}
    taken = {position for match in matches for position in match.new}  # the new values of other arguments
    for old in _arguments(call)[1]:
        if old.is_lone or not old.leaves or matched.intersection(old.leaves):
            continue
        for new in _Part("", out[0], 0, is_result=True).nested():
            if taken.intersection(new.leaves):
                continue
            if new.types[0] == old.types[0] and (not program or dependence.depends(new, old)):
                yield old.name, old.tree, new.tree
                break


def _arguments(call: StepCall) -> tuple[list["_Part"], list["_Part"]]:
    """Returns the arguments that contain objects of Flax NNX, and all other ones."""
    pairs = list(zip(_elements(call.names, call.arguments, 0), call.is_nnx, strict=True))
    return [part for part, is_nnx in pairs if is_nnx], [part for part, is_nnx in pairs if not is_nnx]


def _divided(result: PyTree, values: list["_Part"]) -> tuple[list["_Part"], list["_Part"]]:
    """Returns the parts of the result and of the arguments that may correspond."""
    known = [nested.types for value in values for nested in value.nested()]
    results = _Part("", result, 0, is_result=True).divided(known)
    return results, [part for value in values for part in value.divided([new.types for new in results])]


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
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
        return structure, *map(_type, leaves)

    @property
    def is_lone(self) -> bool:
        return jax.tree_util.all_leaves([self.tree])

    @property
    def is_discrete(self) -> bool:
        """Whether it holds integers or random keys only."""
        return all(is_array_type(x) and not jnp.issubdtype(x.dtype, np.inexact) for x in jax.tree.leaves(self.tree))

    def elements(self) -> list["_Part"]:
        """Returns the elements of a container of the user; none if the part is anything else."""
        is_container = type(self.tree) in {tuple, list, dict} or is_named_tuple(self.tree)
        is_container |= self.is_result and dataclasses.is_dataclass(self.tree)  # as of the trainer of Levanter
        if not is_container or type(self.tree).__module__.partition(".")[0] in _LIBRARIES:
            return []
        entries = jax.tree_util.tree_leaves_with_path(self.tree, is_leaf=lambda x: x is not self.tree)
        names = [self.name + jax.tree_util.keystr(path) for path, _ in entries]
        return _elements(names, [element for _, element in entries], self.start)

    def nested(self) -> Iterator["_Part"]:
        """Yields the part, its elements, and theirs."""
        yield self
        for element in self.elements():
            yield from element.nested()

    def divided(self, known: Sequence[tuple[object, ...]]) -> list["_Part"]:
        """Returns the largest parts of it that have known types, and the smallest ones that have not."""
        elements = [] if self.types in known else self.elements()
        return [part for element in elements for part in element.divided(known)] or [self]


def _elements(names: Sequence[str], trees: Sequence[PyTree], start: int) -> list[_Part]:
    """Returns parts whose leaves follow one another."""
    parts = []
    for name, tree in zip(names, trees, strict=True):
        parts.append(_Part(name, tree, start))
        start = parts[-1].leaves.stop
    return parts


class _PartDependence:
    """Which parts of a result depend on which parts of the arguments; nothing is known without a program."""

    def __init__(self, call: StepCall, out: PyTree, program: core.ClosedJaxpr | None) -> None:
        self._known = Dependence(program) if program else None
        # The program takes and returns arrays only.
        self._inputs, self._outputs = _numbered(call.arguments), _numbered(out)

    def depends(self, new: _Part, old: _Part) -> bool:
        """Tests whether a leaf of a result depends on its old value, without the detour through a backward pass."""
        pairs = [(self._outputs.get(i), self._inputs.get(k)) for i, k in zip(new.leaves, old.leaves, strict=True)]
        known = self._known
        return known is not None and any(known.depends(i, k) for i, k in pairs if i is not None and k is not None)

    def is_backward(self, new: _Part) -> bool:
        """Tests whether a result depends on the result of a backward pass."""
        known = self._known
        return known is not None and any(known.is_backward(self._outputs[i]) for i in new.leaves if i in self._outputs)


def _numbered(tree: PyTree) -> dict[int, int]:
    """Returns the number of each array among the arrays of a tree, by its position among the leaves."""
    positions = [i for i, leaf in enumerate(jax.tree.leaves(tree)) if is_array_type(leaf)]
    return {position: number for number, position in enumerate(positions)}


def _pairs(
    olds: list[_Part], news: list[_Part], first: Sequence[_Part], dependence: _PartDependence
) -> list[tuple[_Part, _Part]]:
    """Returns parts of the arguments, each with the part of the result that is its new value."""
    olds = [old for old in olds if old.leaves and (old in first or not old.is_lone or old.is_discrete)]
    same = {old: [new for new in news if new.types == old.types] for old in olds}
    pairs = _largest_matching({old: [new for new in same[old] if dependence.depends(new, old)] for old in olds})
    for old in olds:  # a new value may also be the earlier value of another part, or a constant
        if old not in pairs and (old in first or not old.is_lone):
            free = (new for new in same[old] if new not in pairs.values() and not dependence.is_backward(new))
            if new := next(free, None):
                pairs[old] = new
    return list(pairs.items())


def _largest_matching(choices: dict[_Part, list[_Part]]) -> dict[_Part, _Part]:
    """Returns one choice for as many keys as possible, no choice twice, the first ones where there are several."""
    owners: dict[_Part, _Part] = {}

    def assign(key: _Part, tried: set[_Part]) -> bool:
        for choice in choices[key]:
            if choice not in owners:
                owners[choice] = key
                return True
        for choice in choices[key]:
            if choice in tried:
                continue
            tried.add(choice)
            if assign(owners[choice], tried):
                owners[choice] = key
                return True
        return False

    for key in choices:
        assign(key, set())
    return {key: choice for choice, key in owners.items()}


def _match_object(old: _Part, new: _Part) -> Match:
    """Returns the variables of objects of Flax NNX that exist before and after the step."""
    news = {path: new.start + i for i, (path, _) in enumerate(named_leaves(new.tree))}
    positions = {path: old.start + i for i, (path, _) in enumerate(named_leaves(old.tree)) if path in news}

    def kept(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if jax.tree_util.keystr(path) in news else None

    tree = jax.tree_util.tree_map_with_path(kept, old.tree)
    return Match(old.name, tree, tuple(positions.values()), tuple(news[path] for path in positions))


def _type(leaf: Any) -> object:
    """Returns the shape and the dtype of an array or of a number; any other leaf must be the same before and after."""
    if is_array_type(leaf) or is_numeric(leaf):
        return np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    return leaf
