"""Splits a program into blocks of consecutive equations, of which equal ones are compiled once.

JAX and XLA compile each layer of a loop in Python, and a diagnosis compiles several operations in place of each one of
the program. Where a block begins depends on the equations around that place alone, so equal layers have equal blocks.
"""

import itertools
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jmpscale._programs.interpret import operations
from jmpscale._programs.jaxpr import CALLS, ENTERED, PROGRAM, Caller, Key, called_jaxpr, held_jaxprs, type_of

_INLINED = CALLS - {"shard_map"}
# A block begins in each window of so many consecutive equations. Of 12 transformer layers, windows of half and of twice
# the size take more time to compile and run.
WINDOW = 128

Value = int | core.Literal  # the number of a value, or a literal


class Equation(NamedTuple):
    """An equation in one of its calls, with the values that it reads and defines."""

    eqn: core.JaxprEqn
    caller: Caller
    inputs: list[Value]
    outputs: list[int]


class Block(NamedTuple):
    """Consecutive equations of a program."""

    equations: list[Equation]
    inputs: list[int]  # the values that it reads from elsewhere
    outputs: list[int]  # the values that are read elsewhere
    last_read: list[int]  # the inputs that are not read afterwards

    def operations(self) -> Iterator[tuple[core.JaxprEqn, Caller]]:
        """Yields the equations that an interpreter runs by its rule."""
        for eqn, caller, *_ in self.equations:
            if eqn.primitive.name not in ENTERED:
                yield eqn, caller
                continue
            for held in held_jaxprs(eqn):
                yield from operations(held, caller.inside(eqn))

    def key(self) -> Hashable:
        """Returns a key that is equal for blocks that compute the same function."""
        numbers: dict[Any, int] = {}
        equations = tuple(_equation_key(x.eqn, x.inputs, x.outputs, numbers) for x in self.equations)
        return equations, tuple(numbers[x] for x in self.inputs), tuple(numbers[x] for x in self.outputs)


class BlockProgram:
    """A program as blocks, in which calls of functions are replaced by their equations, and each value has a number."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.constants: dict[int, Any] = {}  # of the functions that it calls
        self._equations: list[Equation] = []
        self._count = 0
        self.inputs = self._new_values(len(jaxpr.constvars) + len(jaxpr.invars))
        self.outputs = self._inline(jaxpr, self.inputs, PROGRAM)
        self.blocks = _split(self._equations, self.outputs)

    def read_inputs(self, count: int) -> dict[Key, int]:
        """Returns the equations whose first operand is one of the first inputs of the program, and this input."""
        equations = (x for block in self.blocks for x in block.equations if x.inputs)
        return {
            x.caller.key_of(x.eqn): x.inputs[0]
            for x in equations
            if isinstance(x.inputs[0], int) and x.inputs[0] < count
        }

    def _new_values(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def _inline(self, jaxpr: core.Jaxpr, inputs: Sequence[Value], caller: Caller) -> list[Value]:
        """Appends the equations of a jaxpr, and of the functions that it calls; returns its outputs."""
        values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(x: Any) -> Value:
            return x if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if eqn.primitive.name in _INLINED:
                called = called_jaxpr(eqn)
                constants = self._new_values(len(called.consts))
                self.constants.update(zip(constants, called.consts, strict=True))
                results: Sequence[Value] = self._inline(called.jaxpr, [*constants, *operands], caller.inside(eqn))
            else:
                defined = self._new_values(len(eqn.outvars))
                self._equations.append(Equation(eqn, caller, operands, defined))
                results = defined
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))


def _split(equations: Sequence[Equation], outputs: Sequence[Value]) -> list[Block]:
    starts = first_equations(list(map(_digest, equations)), WINDOW)
    groups = [equations[start:end] for start, end in itertools.pairwise([*starts, len(equations)])]
    last = {x: i for i, group in enumerate(groups) for equation in group for x in _numbers(equation.inputs)}
    last |= dict.fromkeys(_numbers(outputs), len(groups))

    def block(i: int) -> Block:
        made = dict.fromkeys(x for equation in groups[i] for x in equation.outputs)
        read = dict.fromkeys(x for equation in groups[i] for x in _numbers(equation.inputs))
        inputs = [x for x in read if x not in made]
        read_later = [x for x in made if last.get(x, i) > i]
        return Block(list(groups[i]), inputs, read_later, [x for x in inputs if last[x] == i])

    return list(map(block, range(len(groups))))


def _numbers(values: Iterable[Value]) -> list[int]:
    return [x for x in values if isinstance(x, int)]


def first_equations(digests: Sequence[int], window: int) -> list[int]:
    """Returns where blocks begin: at the smallest digest of each window, and at the first equation.

    If several are the smallest, it is the last of them.
    """
    found = [(digest, -i) for i, digest in enumerate(digests)]
    last = len(found) - window
    return sorted({-min(found[i : i + window])[1] for i in range(last + 1)} | ({0} if found else set()))


def _digest(equation: Equation) -> int:
    """Returns a number that depends on an equation, and is the same in all processes of a program."""
    types = [str(type_of(x)) for x in (*equation.eqn.invars, *equation.eqn.outvars)]
    return zlib.crc32(repr((equation.eqn.primitive.name, types)).encode())


def _equation_key(
    eqn: core.JaxprEqn, inputs: Iterable[Any], outputs: Iterable[Any], numbers: dict[Any, int]
) -> Hashable:
    """Returns a key of an equation, and adds the values that it reads and defines to `numbers`."""
    operands = tuple(_value_key(x, numbers) for x in inputs)
    results = tuple(_value_key(x, numbers) for x in outputs)
    types = tuple(map(type_of, (*eqn.invars, *eqn.outvars)))
    return eqn.primitive, _parameter_key(eqn.params), eqn.ctx, operands, results, types


def _value_key(x: Any, numbers: dict[Any, int]) -> Hashable:
    return np.asarray(x.val).tobytes() if isinstance(x, core.Literal) else numbers.setdefault(x, len(numbers))


def _parameter_key(value: Any) -> Hashable:
    if isinstance(value, core.ClosedJaxpr):
        return _jaxpr_key(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, core.Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, dict):
        return tuple((str(name), _parameter_key(x)) for name, x in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_parameter_key, value))
    if isinstance(value, float):
        return repr(value)  # -0.0 equals 0.0
    # Equations keep their parameters alive, so that their ids differ.
    return value if isinstance(value, Hashable) and _has_hash(value) else id(value)


def _has_hash(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:  # a value that it holds has none
        return False
    return True


def _jaxpr_key(jaxpr: core.Jaxpr) -> Hashable:
    variables = (*jaxpr.constvars, *jaxpr.invars)
    numbers = {x: i for i, x in enumerate(variables)}
    eqns = tuple(_equation_key(x, x.invars, x.outvars, numbers) for x in jaxpr.eqns)
    outputs = tuple(_value_key(x, numbers) for x in jaxpr.outvars)
    return eqns, tuple(map(type_of, variables)), outputs, tuple(map(type_of, jaxpr.outvars))
