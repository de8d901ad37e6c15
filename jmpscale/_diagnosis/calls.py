"""Tells which call of a line an operation belongs to, such as a layer of a loop in Python, if it is certain."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jmpscale._base.jaxpr import MATMULS, Key
from jmpscale._base.source import expression_of, is_in_cast
from jmpscale._diagnosis.operations import Operation, Path

_CAST = "convert_element_type"
Numbered = Sequence[tuple[int, Operation]]  # operations with their positions in the program


class Numbering(NamedTuple):
    """The calls of a line that some of its operations belong to."""

    of_operations: tuple[int, ...]  # the call of each operation, from 0, in the order of the forward pass
    total: int  # of the calls
    inputs: tuple[int, ...] = ()  # for a line that casts inputs of the program: the input that each call casts


class Calls:
    """The calls of the lines of a program, given the line of each operation in the forward pass.

    `inputs` are the inputs of the program that operations read as their first operand.
    """

    def __init__(self, operations: Iterable[tuple[Operation, Path]], inputs: Mapping[Key, int]) -> None:
        self._inputs = inputs
        self._positions: dict[Key, int] = {}
        forward: dict[Path, list[Operation]] = collections.defaultdict(list)
        for position, (x, path) in enumerate(operations):
            self._positions[x.key] = position
            if not x.backward and not is_in_cast(x.eqn):
                forward[path].append(x)
        self._counts = {path: _count_calls(found) for path, found in forward.items()}

    def number(self, path: Path, operations: Sequence[Operation]) -> Numbering | None:
        """Returns the calls that operations of one kind in a line belong to; None if it is not certain."""
        inputs = tuple(self._inputs.get(x.key, -1) for x in operations)
        if operations[0].eqn.primitive.name == _CAST and min(inputs) >= 0:
            return Numbering(tuple(range(len(inputs))), len(inputs), inputs)
        count = self._counts.get(path, 1)
        if count == 1 or any(is_in_cast(x.eqn) or (x.backward and not x.is_transposed) for x in operations):
            return None  # operations that are computed again run in another order than the backward pass
        called = _calls_in_order([(self._positions[x.key], x) for x in operations], count)
        if called is None:
            return None
        is_reversed = operations[0].backward
        numbers = [called[self._positions[x.key]] for x in operations]
        return Numbering(tuple(count - 1 - i if is_reversed else i for i in numbers), count)


def _count_calls(operations: Sequence[Operation]) -> int:
    """Returns how often a line is called; 1 if its calls differ in what they evaluate."""
    counted: list[tuple[int, Operation]] = []
    for group in _by_expression(list(enumerate(operations))).values():
        # autocast converts the operands and the result of a matmul, so its other operations are not counted.
        matmuls = [(i, x) for i, x in group if x.eqn.primitive.name in MATMULS]
        counted += matmuls or group
    counts = set(collections.Counter((expression_of(x.eqn), x.eqn.primitive) for _, x in counted).values())
    if len(counts) != 1:
        return 1
    (count,) = counts
    return count if _calls_in_order(counted, count) else 1


def _calls_in_order(operations: Numbered, count: int) -> dict[int, int] | None:
    """Returns the call of each operation by its position, if all calls have equally many and follow each other."""
    found: dict[int, int] = {}
    for group in _by_expression(operations).values():
        size, rest = divmod(len(group), count)
        if rest:
            return None
        found |= {position: i // size for i, (position, _) in enumerate(group)}
    calls = [found[position] for position in sorted(found)]
    return found if calls == sorted(calls) else None


def _by_expression(operations: Numbered) -> Mapping[Any, Numbered]:
    groups: dict[Any, list[tuple[int, Operation]]] = collections.defaultdict(list)
    for position, x in operations:
        groups[expression_of(x.eqn)].append((position, x))
    return groups
