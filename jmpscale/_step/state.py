"""Which results of a training step are the new values of its arguments: the state of the training.

The state is what the step returns with the structure and the types of an argument, in the order of the arguments, and
the objects of Flax NNX among the arguments:

    call = StepCall(step, args, kwargs)
    out, program = call.trace()
    for match in match_state(call, out, StepDependence(call, out, program)):
        old, new = [arguments[i] for i in match.old], [results[i] for i in match.new]

where `arguments` and `results` are the leaves of `call.arguments` and of `out`.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from jmpscale._base.tree import PyTree
from jmpscale._step.call import StepCall
from jmpscale._step.dependence import StepDependence
from jmpscale._step.objects import match_objects
from jmpscale._step.parts import Match, Part, elements_of


def match_state(call: StepCall, out: PyTree, dependence: StepDependence) -> list[Match]:
    """Returns the parts of the arguments of a step that it returns, in the order of the arguments.

    A part is an argument that comes back as a whole; or an element of a tuple, a list, a dict or a named tuple that
    does not, except of the states of optax. In the result, the elements of these containers count, too, and so do the
    fields of a dataclass that is the whole result. An object of Flax NNX is a part if the step changes it, or if the
    step returns its new state. A lone array, unless it is the first argument, is a part only if it is computed from its
    old value.

    `dependence` is of the program that `call.trace` returned with `out`, and distinguishes parameters from gradients: a
    new value that depends on the result of a backward pass must also depend on its old value without the detour through
    a backward pass, or stand between the new values of the neighbors of its old value. If several parts have the same
    types, such as the parameters and their average, each takes a result that depends on it; and if several results do,
    such as gradients with a penalty, one that is near its value.

    Returns:
      The matches; none if no argument comes back.
    """
    result, after = out
    objects, values = _arguments(call)
    matches = match_objects(objects, Part("", result, 0), after, dependence)
    results, parts = _divided(result, values)
    first = [part for part in values if not part.start]
    pairs = _pairs(parts, results, first, dependence)
    trained = [i for match in matches for i in match.new]
    trained += [i for old, new in pairs for i in new.leaves if _is_trained(old, new, first, dependence)]
    certain = [old for old, new in pairs if _is_state(old, new, first, trained, dependence)]
    data = [part for part in parts if part not in certain and part.has_data and dependence.has_influence(part, trained)]
    for old, new in pairs:
        # A step has data apart from its state. A lone array may still be one of its batch.
        is_certain = old in certain or (not old.is_lone and data not in ([], [old]))
        matches.append(Match(old.name, old.tree, tuple(old.leaves), tuple(new.leaves), is_certain))
    return sorted(matches, key=lambda match: match.old)


def changed_types(
    call: StepCall, out: PyTree, matches: Sequence[Match], dependence: StepDependence
) -> Iterator[tuple[str, PyTree, PyTree]]:
    """Yields the arguments that come back with their structure and shapes, but with other dtypes, so nothing matches.

    Each is a name, the argument, and its new value, which depends on it if the program is known. Results with other
    shapes are results, such as a loss and a norm beside a batch `(x, y)`.
    """
    matched = {position for match in matches for position in match.old}
    taken = {position for match in matches for position in match.new}  # the new values of other arguments
    for old in _arguments(call)[1]:
        if old.is_lone or not old.leaves or matched.intersection(old.leaves):
            continue
        for new in Part("", out[0], 0, is_result=True).nested():
            if taken.intersection(new.leaves):
                continue
            if _has_shapes(new, old) and (not dependence.is_known or dependence.depends(new.leaves, old.leaves)):
                yield old.name, old.tree, new.tree
                break


def _has_shapes(new: Part, old: Part) -> bool:
    """Tests for equal structures and shapes."""
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(part.tree)] for part in (new, old)]
    return new.types[0] == old.types[0] and shapes[0] == shapes[1]


def _arguments(call: StepCall) -> tuple[list[Part], list[Part]]:
    """Returns the arguments that contain objects of Flax NNX, and all other ones."""
    pairs = list(zip(elements_of(call.names, call.arguments, 0), call.is_nnx, strict=True))
    return [part for part, is_nnx in pairs if is_nnx], [part for part, is_nnx in pairs if not is_nnx]


def _divided(result: PyTree, values: list[Part]) -> tuple[list[Part], list[Part]]:
    """Returns the parts of the result and of the arguments that may correspond."""
    known = [nested.types for value in values for nested in value.nested()]
    results = Part("", result, 0, is_result=True).divided(known)
    return results, [part for value in values for part in value.divided([new.types for new in results])]


def _pairs(
    olds: list[Part], news: list[Part], first: Sequence[Part], dependence: StepDependence
) -> list[tuple[Part, Part]]:
    """Returns parts of the arguments, each with the part of the result that is its new value."""
    olds = [old for old in olds if old.leaves]
    same = {old: [new for new in news if new.types == old.types] for old in olds}
    pairs = _by_dependence(same, dependence)
    for old in olds:  # a new value may also be the earlier value of another part, or a constant
        if old not in pairs and (old in first or not old.is_lone):
            free = (new for new in same[old] if new not in pairs.values() and not dependence.is_backward(new))
            if new := next(free, None):
                pairs[old] = new
    for position, old in enumerate(olds):
        new = _between_neighbors(olds, position, news, pairs)
        if old not in pairs and not old.is_lone and new in same[old] and new not in pairs.values():
            pairs[old] = new
    return list(pairs.items())


def _by_dependence(same: Mapping[Part, list[Part]], dependence: StepDependence) -> dict[Part, Part]:
    """Returns parts with results of the same types that are computed from them.

    Where other results are computed from a part as well, near ones come first, and then those in the order of the
    arguments.
    """
    choices = {old: [new for new in news if dependence.depends(new.leaves, old.leaves)] for old, news in same.items()}
    pairs = _largest_matching(choices)
    taken = set(pairs.values())
    ambiguous = [old for old, news in choices.items() if not taken.issuperset(news) and not old.is_lone]
    if not ambiguous:
        return pairs
    for old in ambiguous:
        place = [other for other in same if other.types == old.types].index(old)
        are_near = dependence.are_near(choices[old], old)
        ranks = [
            (not is_near, abs(same[old].index(new) - place))
            for new, is_near in zip(choices[old], are_near, strict=True)
        ]
        choices[old] = [new for _, new in sorted(zip(ranks, choices[old], strict=True), key=operator.itemgetter(0))]
    return _largest_matching(choices)


def _between_neighbors(olds: list[Part], position: int, news: list[Part], pairs: Mapping[Part, Part]) -> Part | None:
    """Returns the result between the new values of the parts before and after a part, or next to the only one."""
    before = pairs.get(olds[position - 1]) if position else None
    after = pairs.get(olds[position + 1]) if position + 1 < len(olds) else None
    found = {news.index(before) + 1} if before else set[int]()
    found |= {news.index(after) - 1} if after else set()
    index = found.pop() if len(found) == 1 else -1
    return news[index] if 0 <= index < len(news) else None


def _is_trained(old: Part, new: Part, first: Sequence[Part], dependence: StepDependence) -> bool:
    """Tests whether gradients change a part of the arguments, or decide whether it changes."""
    # A lone array may come back as a product, such as a learning rate as the norm of an update.
    return (old in first or not old.is_lone) and dependence.is_influenced_by_gradients(new)


def _is_state(old: Part, new: Part, first: Sequence[Part], trained: Sequence[int], dependence: StepDependence) -> bool:
    """Tests whether a part that comes back is state for certain, given the positions of what gradients change.

    Data, such as a batch or a learning rate, have an influence on that, and no gradient changes them.
    """
    if old.is_count_or_key or old.has_library_state or _is_trained(old, new, first, dependence):
        return True
    return not dependence.has_influence(old, [i for i in trained if i not in new.leaves])


def _largest_matching(choices: dict[Part, list[Part]]) -> dict[Part, Part]:
    """Returns one choice for as many keys as possible, no choice twice, the first ones where there are several."""
    owners: dict[Part, Part] = {}

    def assign(key: Part, tried: set[Part]) -> bool:
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
