"""The new values of objects of Flax NNX in a training step."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jmpscale._base.tree import PyTree
from jmpscale._step.dependence import StepDependence
from jmpscale._step.parts import Match, Part, elements_of, names_of, positions_of, type_of_leaf


def match_objects(objects: Sequence[Part], result: Part, after: PyTree, dependence: StepDependence) -> list[Match]:
    """Returns the new values of objects: their own values after the step, or the state of them that it returns.

    An object that comes back unchanged, and of which the step returns no new state, has no new value.
    """
    news = elements_of([part.name for part in objects], after, result.leaves.stop)
    pairs = list(zip(objects, news, strict=True))
    changed = [pair for pair in pairs if dependence.is_changed(*pair)]
    unchanged = [old for old, new in pairs if (old, new) not in changed]
    matches = [_match_object(old, positions_of(new)) for old, new in changed]
    return matches + _match_returned_states(unchanged, result, dependence)


def _match_object(old: Part, news: Mapping[tuple[str, ...], int]) -> Match:
    """Returns the variables of an object of Flax NNX that have a new value, given the positions of the new values."""
    positions = {path: position for path, position in positions_of(old).items() if path in news}

    def kept(path: Any, leaf: Any) -> Any:
        return leaf if names_of(path) in news else None

    tree = jax.tree_util.tree_map_with_path(kept, old.tree)
    return Match(old.name, tree, tuple(positions.values()), tuple(news[path] for path in positions))


def _match_returned_states(objects: Sequence[Part], result: Part, dependence: StepDependence) -> list[Match]:
    """Returns the variables of objects of Flax NNX whose new values the step returns, as `nnx.state` does.

    Under `jax.jit`, a step changes copies of its objects, so the objects themselves come back unchanged.
    """
    types = list(map(type_of_leaf, jax.tree.leaves(result.tree)))
    nodes: dict[tuple[str, ...], dict[tuple[str, ...], int]] = {}  # the leaves inside of each node of the result
    for path, position in positions_of(result).items():
        for depth in range(len(path)):
            nodes.setdefault(path[:depth], {})[path[depth:]] = position
    taken: set[int] = set()
    matches = []
    for old in objects:
        of_old = positions_of(old)
        old_types = dict(zip(of_old, map(type_of_leaf, jax.tree.leaves(old.tree)), strict=True))
        found = [
            node
            for node in nodes.values()
            if all(path in of_old and old_types[path] == types[position] for path, position in node.items())
            and taken.isdisjoint(node.values())
            and dependence.depends(node.values(), [of_old[path] for path in node])
        ]
        if found:
            matches.append(_match_object(old, max(found, key=len)))
            taken.update(matches[-1].new)
    return matches
