"""The operations of a training step: their lines, and what reads their results."""

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base import cotangents
from jmpscale._base.types import is_below_half, is_narrow
from jmpscale._diagnosis.trace.passes import Pass, Passes
from jmpscale._programs import flow
from jmpscale._programs.float32 import keeps_dtype
from jmpscale._programs.interpret import operations
from jmpscale._programs.jaxpr import MATMULS, PROGRAM, UNKNOWN_LINE, Caller, Key, type_of

Path = tuple[str, ...]  # the user's lines that lead to an operation, outermost first, so that two calls differ
_OUTPUTS: Path = ()  # stands for the outputs of the program
_COTANGENT, _LOSS = frozenset(["cotangent"]), frozenset(["loss"])

# The results of these primitives consist of values that exist already, so they neither round nor overflow.
_MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "device_put", "dynamic_slice"}
_MOVES |= {"dynamic_update_slice", "gather", "layout_constraint", "mesh_cast", "name", "optimization_barrier", "pad"}
_MOVES |= {"pbroadcast", "pcast", "ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n"}
_MOVES |= {"sharding_constraint", "slice", "sort", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose"}
_MOVES |= {"unstack", cotangents.NAME}
_CAST = "convert_element_type"
_FLOAT32 = jnp.finfo(np.float32)
_SUM = "add_any"  # the sum of the cotangents of a value with several uses


class Operation(NamedTuple):
    """An operation of a step, in one of its calls."""

    eqn: core.JaxprEqn
    caller: Caller
    paths: tuple[Path, ...]  # of the lines of which one must change, if the operation is to compute in another dtype
    pass_: Pass
    as_written: bool = False  # whether it computes as it is written, whatever its mode is
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
        return self.backward and not self.caller.is_recomputed(self.eqn)

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
        if self.as_written:
            return [None] * len(self.eqn.outvars)
        if self.is_transposed and self.reads_cotangent and _is_cast(self.eqn, to_narrow=False):
            return [narrow_dtype(self.eqn.invars[0])]
        return rounding_dtypes(self.eqn)


def rounding_dtypes(eqn: core.JaxprEqn) -> list[np.dtype | None]:
    """Returns the narrow dtype to which an operation rounds each result; None for a result that it does not round."""
    if moves_values(eqn):
        return [None] * len(eqn.outvars)
    if eqn.primitive.name == "reduce_precision" and eqn.params["mantissa_bits"] < _FLOAT32.nmant:
        return [np.dtype(jnp.bfloat16) if eqn.params["exponent_bits"] == _FLOAT32.nexp else np.dtype(np.float16)]
    return list(map(narrow_dtype, eqn.outvars))


def narrow_dtype(x: Any) -> np.dtype | None:
    """Returns the dtype of a variable if it has floating-point numbers of fewer bits than float32."""
    return type_of(x).dtype if is_narrow(type_of(x)) else None


def moves_values(eqn: core.JaxprEqn) -> bool:
    """Tests whether the results consist of values that exist already."""
    return eqn.primitive.name in _MOVES or keeps_dtype(eqn)


def keeps_values(eqn: core.JaxprEqn) -> bool:
    """Tests whether the results are the operands, moved, converted to another dtype, or added up as cotangents."""
    return moves_values(eqn) or eqn.primitive.name in (_CAST, _SUM)


def of_moved(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
    """Returns the labels of the operands, as a rule of a data flow, if the results consist of their values."""
    return flow.of_operands(eqn, caller, operands if moves_values(eqn) else [])


def program_operations(jaxpr: core.Jaxpr, count: int) -> list[Operation]:
    """Returns the operations of a step, in the order of the program; its first outputs are the loss and the gradients.

    A cotangent has the dtype of its value. So the operations that give it this dtype, which are the transpose of an
    up-cast and the sum over the uses of the value, belong to the line that made the value: if this line computes in
    float32, they are not in the program. It is the line of the backward pass that reads the cotangent. The
    branches of a condition are several lines that make one value, which is in float32 if one of them computes in it.
    """
    passes = Passes(jaxpr, count)
    found = [
        Operation(eqn, x, (x.path_of(eqn) or (UNKNOWN_LINE,),), passes.of(eqn, x), x.runs_as_written(eqn))
        for eqn, x in operations(jaxpr)
    ]
    for depth in (1, 2):
        found = _with_deeper_lines(found, jaxpr, depth)
    up_casts = {x.line for x in found if not x.is_transposed and _is_cast(x.eqn, to_narrow=False)}
    readers = _readers(jaxpr, {x.key: x.paths[0] for x in found})
    read_cotangents = _readers_of_cotangents(jaxpr, {x.key for x in found if x.is_transposed})

    def located(x: Operation) -> Operation:
        x = x._replace(reads_cotangent=x.key in read_cotangents)
        found_readers = readers.get(x.key, flow.NONE)
        if not found_readers:
            return x._replace(reaches_outputs=False)
        lines = found_readers - {_OUTPUTS}
        is_of_a_value = x.eqn.primitive.name == _SUM or (
            x.is_transposed and _is_cast(x.eqn, to_narrow=True) and x.line in up_casts
        )
        return x._replace(paths=tuple(sorted(lines))) if is_of_a_value and lines else x

    return list(map(located, found))


def operations_of_loss(jaxpr: core.Jaxpr) -> set[Key]:
    """Returns the operations of a step on which its first output, the loss, depends."""
    found: set[Key] = set()

    def rule(eqn: core.JaxprEqn, caller: Caller, results: list[flow.Labels]) -> list[flow.Labels]:
        if any(results):
            found.add(caller.key_of(eqn))
        return [flow.union(results)] * len(eqn.invars)

    flow.follow_back(jaxpr, [_LOSS, *[flow.NONE] * (len(jaxpr.outvars) - 1)], rule)
    return found


def autocast_lines(found: Iterable[Operation]) -> set[Path]:
    """Returns the lines on which `autocast` converts a matmul: its conversions have the source of the matmul.

    So do conversions to float8, which `autocast` does not make, if a derivative rule has both.
    """
    casts = [x for x in found if _is_cast(x.eqn, to_narrow=True) and not x.backward]
    casts = [x for x in casts if not is_below_half(type_of(x.eqn.outvars[0]))]
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
    # Below the line: JAX forgets its callers in some passes through a function with `jax.checkpoint`.
    several = {_below(x.paths[0], crowded) for x in replaced if depth == 1 or x.eqn.primitive.name in MATMULS}
    return deeper if len(several) > 1 else found


def _below(path: Path, line: str) -> Path:
    """Returns the part of a path below a line."""
    return path[path.index(line) + 1 :] if line in path else path


def _is_cast(eqn: core.JaxprEqn, *, to_narrow: bool) -> bool:
    """Tests whether an operation converts a wide value to a narrow one, or a narrow value to a wide one."""
    if eqn.primitive.name != _CAST:
        return False
    before, after = narrow_dtype(eqn.invars[0]), narrow_dtype(eqn.outvars[0])
    return (before is None) == to_narrow and (after is not None) == to_narrow


def _readers(jaxpr: core.Jaxpr, paths: Mapping[Key, Path]) -> dict[Key, frozenset[Path]]:
    """Returns the lines whose transposed operations read the result of an operation, if it reaches the outputs.

    They include `_OUTPUTS`, unless it does not.
    """
    found: dict[Key, frozenset[Path]] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, results: list[flow.Labels]) -> list[flow.Labels]:
        key, readers = caller.key_of(eqn), flow.union(results)
        found[key] = found.get(key, flow.NONE) | readers
        if moves_values(eqn) or eqn.primitive.name == _SUM or not (readers or eqn.effects):
            return [readers] * len(eqn.invars)
        # What follows the gradients reads no cotangents.
        return [frozenset([_OUTPUTS, paths[key]] if caller.is_backward(eqn) else [_OUTPUTS])] * len(eqn.invars)

    flow.follow_back(jaxpr, [frozenset([_OUTPUTS])] * len(jaxpr.outvars), rule)
    return found


def _readers_of_cotangents(jaxpr: core.Jaxpr, transposed: Collection[Key]) -> set[Key]:
    """Returns the operations that read a cotangent, which is a value that a transposed operation has computed."""
    found: set[Key] = set()

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        key, read = caller.key_of(eqn), flow.union(operands)
        if read:
            found.add(key)
        # What only moves values of the forward pass, in a derivative rule, makes no cotangent of them.
        moves = moves_values(eqn) and not all(isinstance(x, core.Literal) for x in eqn.invars)
        labels = read if moves else _COTANGENT if key in transposed else flow.NONE
        return [labels] * len(eqn.outvars)

    flow.follow(jaxpr, rule)
    return found
