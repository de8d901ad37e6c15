"""To which layer of a model an operation belongs: its named scopes, and the parameters that it reads.

Modules of Flax Linen and Haiku, and `jax.named_scope`, name the scopes of their operations. Other models show by the
data flow which of their parameters an operation reads.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jmpscale._diagnosis.trace.operations import keeps_values, moves_values
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs import flow
from jmpscale._programs.interpret import operations
from jmpscale._programs.jaxpr import Caller, Key, type_of
from jmpscale._programs.source import SCALING, user_lines

Names = frozenset[str]


class Place(NamedTuple):
    """What shows the layer of an operation."""

    scopes: tuple[str, ...] = ()  # such as `("Model", "Block_7", "Dense_0")`
    # The arguments that it reads, moved or in another dtype; or else those that an operation reads together with its
    # result, or of which it makes the gradient.
    read: Names = flow.NONE
    # The arguments that were read last, in the order of the forward pass, by an operation from which it is computed.
    before: Names = flow.NONE
    code: Any = None  # the position in the code that has made it: operations of several calls of a line have the same


class _Argument(NamedTuple):
    """An argument that is moved, or converted to another dtype."""

    name: str
    is_whole: bool = True  # whether no value has moved


class _Read(NamedTuple):
    """The result of an operation after which no argument is read."""

    position: int  # of the operation, in the order of the program
    names: Names


def find_places(program: Program, gradients: Sequence[str]) -> dict[Key, Place]:
    """Returns the places of the operations of a program whose outputs are the loss, some gradients, and others."""
    read, before = _follow(program)
    joined = _follow_back(program.jaxpr, gradients, read)
    return {
        (key := caller.key_of(eqn)): Place(
            caller.scopes_of(eqn),
            read.get(key) or joined.get(key, flow.NONE),
            before.get(key, flow.NONE),
            eqn.source_info.traceback,
        )
        for eqn, caller in operations(program.jaxpr)
    }


def _follow(program: Program) -> tuple[dict[Key, Names], dict[Key, Names]]:
    """Returns which arguments each operation reads, and which are read last before it."""
    read: dict[Key, Names] = {}
    before: dict[Key, Names] = {}
    positions: dict[Key, int] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        key, found = caller.key_of(eqn), flow.union(operands)
        names = frozenset(x.name for x in found if isinstance(x, _Argument))
        last = max((x for x in found if isinstance(x, _Read)), key=lambda x: x.position, default=None)
        read[key] = read.get(key, flow.NONE) | names
        before[key] = before.get(key, flow.NONE) | (last.names if last else flow.NONE)
        if keeps_values(eqn):
            return [_moved(eqn, found)] * len(eqn.outvars)
        # A cotangent is computed from the parameters of all later layers.
        if caller.is_backward(eqn) and not caller.is_recomputed(eqn):
            return [flow.NONE] * len(eqn.outvars)
        if names:
            last = _Read(positions.setdefault(key, len(positions)), names)
        return [frozenset([last]) if last else flow.NONE] * len(eqn.outvars)

    constants = [frozenset([_Argument(name)]) if name else flow.NONE for name in program.names]
    flow.follow(program.jaxpr, rule, constants=constants)
    return read, before


def _moved(eqn: core.JaxprEqn, found: flow.Labels) -> flow.Labels:
    """Returns the labels of values that are moved: an index of the first axis is part of a name, as in `w[3]`."""
    if not moves_values(eqn):
        return found
    index = _index(eqn)

    def moved(x: _Argument) -> _Argument:
        return _Argument(f"{x.name}[{index}]" if x.is_whole and index is not None else x.name, is_whole=False)

    return frozenset(moved(x) if isinstance(x, _Argument) else x for x in found)


def _index(eqn: core.JaxprEqn) -> int | None:
    """Returns the position along the first axis of a slice with one position; None for any other operation."""
    if eqn.primitive.name != "slice" or not type_of(eqn.invars[0]).shape:
        return None
    first, end = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
    return first if end - first == 1 < type_of(eqn.invars[0]).shape[0] else None


def _follow_back(jaxpr: core.Jaxpr, gradients: Sequence[str], read: dict[Key, Names]) -> dict[Key, Names]:
    """Returns the arguments of which an operation makes the gradient, or which are read together with its result."""
    joined: dict[Key, Names] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, results: list[flow.Labels]) -> list[flow.Labels]:
        key, found = caller.key_of(eqn), flow.union(results)
        joined[key] = joined.get(key, flow.NONE) | found
        is_same = keeps_values(eqn) or (found and SCALING in user_lines(eqn))
        return [found if is_same else read.get(key, flow.NONE)] * len(eqn.invars)

    others = len(jaxpr.outvars) - 1 - len(gradients)
    flow.follow_back(jaxpr, [flow.NONE, *(frozenset([x]) for x in gradients), *[flow.NONE] * others], rule)
    return joined


def without_common(found: Sequence[Names]) -> list[Names]:
    """Returns sets of names without those that all of several sets have, such as a mask that all layers read."""
    common = frozenset.intersection(*found) if len(found) > 1 else flow.NONE
    return [x - common for x in found]


def first_name(names: Names, preferred: Collection[str]) -> str:
    """Returns the first of some names, of those that are `preferred` if there are any; empty if there is none."""
    return min(names, key=lambda x: (x not in preferred, x), default="")
