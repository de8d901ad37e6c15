"""The operations of a training step: their lines, and what reads their results."""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jmpscale._base import cotangents
from jmpscale._base.jaxpr import (
    CALLS,
    MATMULS,
    PROGRAM,
    UNKNOWN_LINE,
    Caller,
    Key,
    called_jaxpr,
    split_scan_inputs,
    type_of,
)
from jmpscale._base.source import is_backward, is_recomputed
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.passes import Pass, Passes
from jmpscale._interpreter.float32 import keeps_dtype
from jmpscale._interpreter.interpret import operations

Path = tuple[str, ...]  # the user's lines that lead to an operation, outermost first, so that two calls differ
Readers = frozenset[Path] | None  # the lines whose operations read a value; None if it does not reach the outputs

# The results of these primitives consist of values that exist already, so they neither round nor overflow.
_MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "device_put", "dynamic_slice"}
_MOVES |= {"dynamic_update_slice", "gather", "layout_constraint", "mesh_cast", "name", "optimization_barrier", "pad"}
_MOVES |= {"pbroadcast", "pcast", "ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n"}
_MOVES |= {"sharding_constraint", "slice", "sort", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose"}
_MOVES |= {"unstack", cotangents.NAME}
_SUM = "add_any"  # the sum of the cotangents of a value with several uses


class Operation(NamedTuple):
    """An operation of a step, in one of its calls."""

    eqn: core.JaxprEqn
    caller: Caller
    paths: tuple[Path, ...]  # of the lines of which one must change, if the operation is to compute in another dtype
    pass_: Pass
    reaches_outputs: bool = True
    reads_cotangent: bool = False

    @property
    def key(self) -> Key:
        return self.caller.key_of(self.eqn)

    @property
    def backward(self) -> bool:
        return self.pass_ is Pass.BACKWARD

    @property
    def is_transposed(self) -> bool:
        """Whether it is an operation on cotangents."""
        return self.backward and not (self.caller.recomputed or is_recomputed(self.eqn))

    @property
    def name(self) -> str:
        return f"{self.eqn.primitive.name} at {self.line}"

    @property
    def line(self) -> str:
        return self.paths[0][-1]

    @property
    def dtypes(self) -> list[np.dtype | None]:
        """The dtype of each result that has fewer bits than float32, and is not a value that exists already.

        The transpose of a cast to a narrow dtype reads a cotangent of this dtype, though its result is wide. A
        derivative rule may also cast a value of the forward pass up, which rounds nothing.
        """
        if moves_values(self.eqn):
            return [None] * len(self.eqn.outvars)
        if self.is_transposed and self.reads_cotangent and _is_cast(self.eqn, to_narrow=False):
            return [narrow_dtype(self.eqn.invars[0])]
        return list(map(narrow_dtype, self.eqn.outvars))


def narrow_dtype(x: Any) -> np.dtype | None:
    """Returns the dtype of a variable if it has floating-point numbers of fewer bits than float32."""
    return type_of(x).dtype if is_narrow(type_of(x)) else None


def moves_values(eqn: core.JaxprEqn) -> bool:
    """Tests whether the results consist of values that exist already."""
    return eqn.primitive.name in _MOVES or keeps_dtype(eqn)


def program_operations(jaxpr: core.Jaxpr, count: int) -> list[Operation]:
    """Returns the operations of a step, in the order of the program; its first outputs are the loss and the gradients.

    A cotangent has the dtype of its value. So the operations that give it this dtype, which are the transpose of an
    up-cast and the sum over the uses of the value, belong to the line that made the value: if this line computes in
    float32, they are not in the program. It is the line of the backward pass that reads the cotangent. The
    branches of a condition are several lines that make one value, which is in float32 if one of them computes in it.
    """
    passes = Passes(jaxpr, count)
    found = [Operation(eqn, x, (x.path_of(eqn) or (UNKNOWN_LINE,),), passes.of(eqn, x)) for eqn, x in operations(jaxpr)]
    for depth in (1, 2):
        found = _with_deeper_lines(found, jaxpr, depth)
    up_casts = {x.line for x in found if not x.is_transposed and _is_cast(x.eqn, to_narrow=False)}
    readers = _readers(jaxpr, {x.key: x.paths[0] for x in found})
    read_cotangents = _readers_of_cotangents(jaxpr, {x.key for x in found if x.is_transposed})

    def located(x: Operation) -> Operation:
        x = x._replace(reads_cotangent=x.key in read_cotangents)
        lines = readers.get(x.key)
        if lines is None:
            return x._replace(reaches_outputs=False)
        is_of_a_value = x.eqn.primitive.name == _SUM or (
            x.is_transposed and _is_cast(x.eqn, to_narrow=True) and x.line in up_casts
        )
        return x._replace(paths=tuple(sorted(lines))) if is_of_a_value and lines else x

    return list(map(located, found))


def autocast_lines(found: Iterable[Operation]) -> set[Path]:
    """Returns the lines on which `autocast` converts a matmul: its conversions have the source of the matmul."""
    casts = [x for x in found if _is_cast(x.eqn, to_narrow=True) and not x.backward]
    matmuls = {_source(x.eqn) for x in found if x.eqn.primitive.name in MATMULS}
    return {path for x in casts if _source(x.eqn) in matmuls for path in x.paths}


def _source(eqn: core.JaxprEqn) -> Any:
    return eqn.source_info.traceback


def _with_deeper_lines(found: list[Operation], jaxpr: core.Jaxpr, depth: int) -> list[Operation]:
    """Replaces a line that holds most matmuls by the lines that it calls in installed packages, if they are several.

    A model in an installed package is one line of its caller, which would be the answer to every question. A single
    layer of a library is not replaced.
    """
    matmuls = collections.Counter(x.line for x in found if x.eqn.primitive.name in MATMULS and not x.backward)
    [(crowded, count)] = matmuls.most_common(1) or [("", 0)]
    if 2 * count <= matmuls.total():
        return found
    paths = [caller.path_of(eqn) for eqn, caller in operations(jaxpr, PROGRAM._replace(depth=depth))]
    pairs = zip(found, paths, strict=True)
    deeper = [x._replace(paths=(path,)) if x.line == crowded and path else x for x, path in pairs]
    replaced = [y for x, y in zip(found, deeper, strict=True) if x.line == crowded]
    several = {x.paths for x in replaced if depth == 1 or x.eqn.primitive.name in MATMULS}
    return deeper if len(several) > 1 else found


def _is_cast(eqn: core.JaxprEqn, *, to_narrow: bool) -> bool:
    """Tests whether an operation converts a wide value to a narrow one, or a narrow value to a wide one."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = narrow_dtype(eqn.invars[0]), narrow_dtype(eqn.outvars[0])
    return (before is None) == to_narrow and (after is not None) == to_narrow


def _readers(jaxpr: core.Jaxpr, paths: Mapping[Key, Path]) -> dict[Key, Readers]:
    """Returns the readers of the results of all operations that reach the outputs of a program."""
    flow = _Flow(paths)
    flow.visit(jaxpr, PROGRAM, [frozenset()] * len(jaxpr.outvars))
    return flow.found


class _Flow:
    """Follows values from the outputs of a program back to the operations that make them."""

    def __init__(self, paths: Mapping[Key, Path]) -> None:
        self._paths = paths
        self.found: dict[Key, Readers] = {}  # of the results of the operations

    def visit(self, jaxpr: core.Jaxpr, caller: Caller, outputs: Sequence[Readers]) -> list[Readers]:
        """Returns the readers of the inputs of a jaxpr, given the readers of its outputs."""
        readers: dict[Any, Readers] = {}

        def add(variables: Sequence[Any], found: Sequence[Readers]) -> None:
            for x, lines in zip(variables, found, strict=True):
                if not isinstance(x, core.Literal):
                    readers[x] = _union([readers.get(x), lines])

        add(jaxpr.outvars, outputs)
        for eqn in reversed(jaxpr.eqns):
            results = [readers.get(x) for x in eqn.outvars]
            if _union(results) is not None or eqn.effects:
                add(eqn.invars, self._equation(eqn, caller, results))
        return [readers.get(x) for x in jaxpr.invars]

    def _equation(self, eqn: core.JaxprEqn, caller: Caller, results: list[Readers]) -> list[Readers]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.visit(called_jaxpr(eqn).jaxpr, caller.inside(eqn), results)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in special:
            return special[name](eqn, caller.inside(eqn), results)
        key = caller.key_of(eqn)
        self.found[key] = _union([self.found.get(key), *results])
        if moves_values(eqn) or name == _SUM:
            return [_union(results)] * len(eqn.invars)
        # What follows the gradients reads no cotangents.
        is_transposed = caller.backward or is_backward(eqn)
        return [frozenset([self._paths[key]] if is_transposed else [])] * len(eqn.invars)

    def _scan(self, eqn: core.JaxprEqn, inside: Caller, results: list[Readers]) -> list[Readers]:
        body = eqn.params["jaxpr"].jaxpr
        consts, carry, xs = map(len, split_scan_inputs(eqn, eqn.invars))
        inputs: list[Readers] = [None] * (consts + carry + xs)
        while True:
            again = inputs[consts : consts + carry]  # an iteration reads the carry of the one before
            outputs = [*map(_union, zip(results[:carry], again, strict=True)), *results[carry:]]
            if (new := self.visit(body, inside, outputs)) == inputs:
                return inputs
            inputs = new

    def _while(self, eqn: core.JaxprEqn, inside: Caller, results: list[Readers]) -> list[Readers]:
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        tested = self.visit(cond, inside, [frozenset()])
        carry = list(map(_union, zip(results, tested[first:], strict=True)))
        while True:
            inputs = self.visit(body, inside, carry)
            new = list(map(_union, zip(carry, inputs[last - first :], strict=True)))
            if new == carry:
                return [*tested[:first], *inputs[: last - first], *carry]
            carry = new

    def _cond(self, eqn: core.JaxprEqn, inside: Caller, results: list[Readers]) -> list[Readers]:
        branches = [self.visit(branch.jaxpr, inside, results) for branch in eqn.params["branches"]]
        return [frozenset(), *map(_union, zip(*branches, strict=True))]


def _readers_of_cotangents(jaxpr: core.Jaxpr, transposed: Collection[Key]) -> set[Key]:
    """Returns the operations that read a cotangent, which is a value that a transposed operation has computed."""
    flow = _Cotangents(transposed)
    flow.visit(jaxpr, PROGRAM, [False] * len(jaxpr.invars))
    return flow.readers


class _Cotangents:
    """Follows cotangents from the transposed operations that compute them to the operations that read them."""

    def __init__(self, transposed: Collection[Key]) -> None:
        self._transposed = transposed
        self.readers: set[Key] = set()

    def visit(self, jaxpr: core.Jaxpr, caller: Caller, inputs: Sequence[bool]) -> list[bool]:
        """Returns which outputs of a jaxpr are cotangents, given which of its inputs are."""
        found = {x for x, is_cotangent in zip(jaxpr.invars, inputs, strict=True) if is_cotangent}

        def are_cotangents(variables: Sequence[Any]) -> list[bool]:
            return [not isinstance(x, core.Literal) and x in found for x in variables]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, caller, are_cotangents(eqn.invars))
            found |= {x for x, is_cotangent in zip(eqn.outvars, results, strict=True) if is_cotangent}
        return are_cotangents(jaxpr.outvars)

    def _equation(self, eqn: core.JaxprEqn, caller: Caller, operands: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.visit(called_jaxpr(eqn).jaxpr, caller.inside(eqn), operands)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in special:
            return special[name](eqn, caller.inside(eqn), operands)
        key = caller.key_of(eqn)
        if any(operands):
            self.readers.add(key)
        # What only moves values of the forward pass, in a derivative rule, makes no cotangent of them.
        reads_values = not all(isinstance(x, core.Literal) for x in eqn.invars)
        is_cotangent = any(operands) if moves_values(eqn) and reads_values else key in self._transposed
        return [is_cotangent] * len(eqn.outvars)

    def _scan(self, eqn: core.JaxprEqn, inside: Caller, operands: list[bool]) -> list[bool]:
        consts, carry, xs = split_scan_inputs(eqn, operands)
        while True:
            outputs = self.visit(eqn.params["jaxpr"].jaxpr, inside, [*consts, *carry, *xs])
            if (new := [x or y for x, y in zip(carry, outputs, strict=False)]) == carry:
                return outputs
            carry = new

    def _while(self, eqn: core.JaxprEqn, inside: Caller, operands: list[bool]) -> list[bool]:
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry = operands[last:]
        while True:
            self.visit(eqn.params["cond_jaxpr"].jaxpr, inside, [*operands[:first], *carry])
            outputs = self.visit(eqn.params["body_jaxpr"].jaxpr, inside, [*operands[first:last], *carry])
            if (new := [x or y for x, y in zip(carry, outputs, strict=True)]) == carry:
                return carry
            carry = new

    def _cond(self, eqn: core.JaxprEqn, inside: Caller, operands: list[bool]) -> list[bool]:
        branches = [self.visit(branch.jaxpr, inside, operands[1:]) for branch in eqn.params["branches"]]
        return list(map(any, zip(*branches, strict=True)))


def _union(readers: Iterable[Readers]) -> Readers:
    found = [lines for lines in readers if lines is not None]
    return frozenset().union(*found) if found else None
