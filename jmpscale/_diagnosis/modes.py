"""A training step whose operations compute as they are written, in float32, or otherwise, as an array of modes says.

With all operations as written it is the step; with all of them in float32 it is the reference. So a search over the
modes finds the lines that must compute in float32 by changing them.
"""

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import UNKNOWN_LINE, Caller, type_of
from jmpscale._diagnosis.errors import severity
from jmpscale._diagnosis.float32 import run_as_written, run_in_float32, runs_only_as_written
from jmpscale._diagnosis.interpret import Interpreter, is_narrow, operations, widen
from jmpscale._diagnosis.step import Step, compiled

Path = tuple[str, ...]  # the user's lines that lead to an operation, outermost first, so that two calls differ

# The results of these primitives consist of values that exist already, so they neither round nor overflow.
_MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "device_put", "dynamic_slice"}
_MOVES |= {"dynamic_update_slice", "gather", "mesh_cast", "name", "optimization_barrier", "pad", "pbroadcast", "pcast"}
_MOVES |= {"ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n", "sharding_constraint", "slice"}
_MOVES |= {"sort", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose", "unstack"}


class Mode(enum.IntEnum):
    """How an operation computes."""

    AS_WRITTEN = 0
    RANGE = 1  # with the precision as written, and the range of float32
    FLOAT32 = 2
    REPAIRED = 3  # in float32, with zeros in place of infinities and NaN


class Part(NamedTuple):
    """A line in one pass."""

    path: Path
    backward: bool


class Site(NamedTuple):
    """One kind of operation of a part, which has one mode."""

    part: Part
    operation: str  # the name of JAX's primitive
    dtype: np.dtype  # of the results

    @property
    def limit(self) -> float:
        """The largest number of the dtype."""
        return float(jnp.finfo(self.dtype).max)


class Statistics(NamedTuple):
    """The results of an operation in float32, as numbers of the dtype that is written."""

    max_abs: float  # the largest finite magnitude
    overflow: float  # the fraction of finite values that are not finite as written
    underflow: float  # the fraction of values that are below the smallest normal number, and not zero


class Modal(NamedTuple):
    """How operations with modes compute. The argument of the interpreter is the array of modes."""

    applies: Callable[[core.JaxprEqn, Any], bool]  # whether an operation has a mode for a result of a type
    run: Callable[[Interpreter, core.JaxprEqn, list[Any], int], list[Any]]  # also takes the index of its mode
    columns: int = 0  # of the records


def _is_half(eqn: core.JaxprEqn, aval: Any) -> bool:
    """Tests whether an operation computes a result of fewer bits than float32."""
    return eqn.primitive.name not in _MOVES and is_narrow(aval)


def _choose_precision(run: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], site: int) -> list[Any]:
    """Chooses the precision and the range of results."""

    def choose(in_float32: jax.Array, written: jax.Array, aval: Any) -> jax.Array:
        if not is_narrow(aval):
            return written
        rounded = jax.lax.reduce_precision(in_float32, exponent_bits=8, mantissa_bits=jnp.finfo(aval.dtype).nmant)
        return jax.lax.select_n(run.argument[site], written, rounded, in_float32)

    in_float32, written = run_in_float32(eqn, inputs), run_as_written(eqn, inputs)
    return list(map(choose, in_float32, written, map(type_of, eqn.outvars)))


def _record(run: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], site: int) -> list[Any]:
    """Computes in float32, and records `Statistics`."""
    outputs, written = run_in_float32(eqn, inputs), run_as_written(eqn, inputs)
    for x, y, aval in zip(outputs, written, map(type_of, eqn.outvars), strict=True):
        if is_narrow(aval):
            run.record(site, _statistics(x, y, float(jnp.finfo(aval.dtype).smallest_normal)))
    return outputs


def _statistics(in_float32: jax.Array, written: jax.Array, smallest_normal: float) -> jax.Array:
    finite = jnp.isfinite(in_float32)
    magnitude = jnp.where(finite, jnp.abs(in_float32), 0)
    overflows = finite & ~jnp.isfinite(written)  # also inside of an operation, such as a sum
    underflows = (magnitude > 0) & (magnitude < smallest_normal)
    # One reduction with three operands compiles in a third of the time of three reductions.
    largest, *counts = jax.lax.reduce(
        (magnitude, overflows.astype(np.float32), underflows.astype(np.float32)),
        (np.float32(0),) * 3,
        lambda x, y: (jnp.maximum(x[0], y[0]), x[1] + y[1], x[2] + y[2]),
        range(magnitude.ndim),
    )
    return jnp.stack([largest, *(count / max(magnitude.size, 1) for count in counts)])


def _repair(run: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], site: int) -> list[Any]:
    """Replaces infinities and NaN in float32, and records which operations make them.

    The first column shows whether the results are infinite or NaN although the operands are not; the second one,
    whether they are infinite or NaN.
    """
    outputs = run_in_float32(eqn, inputs)
    before, after = (severity(list(filter(_is_inexact, arrays))) for arrays in (inputs, outputs))
    run.record(site, jnp.stack([after > before, after > 0]).astype(np.float32))
    is_repaired = run.argument[site] == Mode.REPAIRED
    return [jnp.where(is_repaired & ~jnp.isfinite(x), 0, x) if _is_inexact(x) else x for x in outputs]


PRECISION = Modal(_is_half, _choose_precision)
RECORD = Modal(_is_half, _record, columns=3)
REPAIR = Modal(lambda _, aval: _is_inexact(aval), _repair, columns=2)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


class ModalStep:
    """A step whose operations have modes. Its sites, parts and paths are in the order of the program."""

    def __init__(self, step: Step, modal: Modal) -> None:
        self.consts = [widen(jnp.asarray(x)) for x in step.consts]
        everything = [(eqn, x, x.path_of(eqn) or (UNKNOWN_LINE,)) for eqn, x in operations(step.jaxpr)]
        kernels = [(eqn, path) for eqn, _, path in everything if runs_only_as_written(eqn)]
        # The operations that run as written whatever the modes are, such as kernels.
        self.not_entered = list(dict.fromkeys(f"{path[-1]}: {eqn.primitive.name}" for eqn, path in kernels))
        # An operation such as a reduction may have several results, of which some are integers.
        types = [[aval for aval in map(type_of, eqn.outvars) if modal.applies(eqn, aval)] for eqn, _, _ in everything]
        found = [(*x, avals[0].dtype) for x, avals in zip(everything, types, strict=True) if avals]
        shortest = _shortest({path for _, _, path, _ in found})
        sites: dict[tuple[int, Caller], Site] = {}
        for eqn, caller, path, dtype in found:
            part = Part(shortest[path], caller.inside(eqn).backward)
            sites[id(eqn), caller] = Site(part, eqn.primitive.name, dtype)
        self.sites = list(dict.fromkeys(sites.values()))
        self.parts = list(dict.fromkeys(site.part for site in self.sites))
        # A line whose forward pass has no such result, such as an index, is also in the order of the forward pass.
        self.paths = list(dict.fromkeys(shortest[path] for _, _, path in everything if path in shortest))
        index = {site: i for i, site in enumerate(self.sites)}

        def rule(interpreter: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
            site = sites.get((id(eqn), caller))
            return modal.run(interpreter, eqn, inputs, index[site]) if site else run_in_float32(eqn, inputs)

        def run(consts: list[Any], scale: jax.Array, modes: jax.Array) -> tuple[list[Any], Any]:
            records = {i: jnp.zeros(modal.columns, np.float32) for i in index.values() if modal.columns}
            return Interpreter(rule, modes, records).evaluate(core.ClosedJaxpr(step.jaxpr, consts), [scale])

        self._run = compiled(run)

    def run(
        self, scale: float, modes: Mapping[Site, Mode], default: Mode, consts: list[Any] | None = None
    ) -> tuple[list[Any], dict[Site, Any]]:
        """Returns the loss and the gradients, and what was recorded for each site.

        `modes` are the modes of some sites, `default` is the mode of all others, and `consts` replaces `self.consts`.
        """
        array = np.array([modes.get(site, default) for site in self.sites], np.int32)
        outputs, records = self._run(self.consts if consts is None else consts, np.float32(scale), array)
        return outputs, {self.sites[i]: x.tolist() for i, x in jax.device_get(records).items()}


def _shortest(paths: Collection[Path]) -> dict[Path, Path]:
    """Returns for each path the shortest end of it that is a path, too.

    In the forward pass, JAX forgets the callers of a function with `jax.checkpoint`; in the backward pass it does not.
    """
    return {path: next(end for end in (path[-n:] for n in range(1, len(path) + 1)) if end in paths) for path in paths}
