"""A training step whose operations compute as they are written, in float32, or otherwise, as an array of modes says.

It is compiled once. With all operations as written it is the step; with all of them in float32 it is the reference. So
a search over the modes finds the lines that must compute in float32 by changing them.
"""

import enum
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._autocast.rules import MATMULS
from jmpscale._base.jaxpr import UNKNOWN_LINE, type_of
from jmpscale._diagnosis.compile import compile_lazily
from jmpscale._diagnosis.float32 import InFloat32, run_as_written, runs_only_as_written
from jmpscale._diagnosis.interpret import Place, is_narrow, operations, widen
from jmpscale._diagnosis.measure import severity
from jmpscale._diagnosis.step import Step

Path = tuple[str, ...]  # the user's lines that lead to an operation, outermost first, so that two calls differ

# The results of these primitives consist of values that exist already, so they neither round nor overflow.
_MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "device_put", "dynamic_slice"}
_MOVES |= {"dynamic_update_slice", "gather", "mesh_cast", "name", "optimization_barrier", "pad", "pbroadcast", "pcast"}
_MOVES |= {"ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n", "sharding_constraint", "slice"}
_MOVES |= {"split", "squeeze", "stop_gradient", "tile", "transpose", "unstack"}
_ARITHMETIC = {"add", "div", "mul", "sub"}


class Mode(enum.IntEnum):
    """How an operation computes."""

    AS_WRITTEN = 0
    RANGE = 1  # with the precision as written, and the range of float32
    FLOAT32 = 2
    TIGHT = 3  # as written, with 3 bits less of range
    REPAIRED = 4  # in float32, with zeros in place of infinities and NaN
    REPLACED = 5  # in float32, with the nearest number in place of a constant that is zero or infinite


class Part(NamedTuple):
    """A line in one pass."""

    path: Path
    backward: bool


class Site(NamedTuple):
    """The results of one kind of operation of a part, which have one mode."""

    part: Part
    operation: str  # the name of JAX's primitive
    dtype: np.dtype


class Statistics(NamedTuple):
    """The results of an operation in float32, as numbers of the dtype that is written."""

    max_abs: float  # the largest finite magnitude
    overflow: float  # the fraction of finite values that are not finite as written
    underflow: float  # the fraction of values that are below the smallest normal number, and not zero


class _Rule(InFloat32):
    """Computes the operations that have modes.

    Attributes:
      sites: the sites of the results of each operation that has modes.
      index: the positions of the sites in the arrays of modes and of records.
    """

    columns = 0  # of the records

    def __init__(self, modes: jax.Array, sites: dict[tuple[int, Place], list[Site]], index: dict[Site, int]) -> None:
        super().__init__(modes, jnp.zeros((len(index), self.columns), np.float32) if self.columns else None)
        self._sites, self._index = sites, index

    def operation(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place) -> list[Any]:
        sites = self._sites.get((id(eqn), place))
        if sites is None:
            return super().operation(eqn, inputs, place)
        return self.choose(eqn, inputs, place, [self._index[site] for site in sites])

    def choose(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place, sites: list[int]) -> list[Any]:
        """Returns the results of an operation with modes."""
        raise NotImplementedError


class Precision(_Rule):
    """Chooses the precision and the range of results."""

    @staticmethod
    def applies(eqn: core.JaxprEqn) -> bool:
        """Tests whether an operation computes results of fewer bits than float32."""
        return eqn.primitive.name not in _MOVES and any(is_narrow(type_of(x)) for x in eqn.outvars)

    def choose(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place, sites: list[int]) -> list[Any]:
        """Returns the results of an operation with modes."""
        in_float32, written = InFloat32.operation(self, eqn, inputs, place), run_as_written(eqn, inputs)
        types = map(type_of, eqn.outvars)
        return list(map(self._choose, in_float32, written, types, sites))

    def _choose(self, in_float32: jax.Array, written: jax.Array, aval: Any, site: int) -> jax.Array:
        if not is_narrow(aval):
            return written
        info = jnp.finfo(aval.dtype)
        rounded = jax.lax.reduce_precision(in_float32, exponent_bits=8, mantissa_bits=info.nmant)
        tight = jnp.where(jnp.abs(written) > float(info.max) / 8, jnp.sign(written) * np.inf, written)
        return jax.lax.select_n(self.argument[site], written, rounded, in_float32, tight)


class Record(_Rule):
    """Computes in float32, and records `Statistics`."""

    columns = 3
    applies = Precision.applies

    def choose(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place, sites: list[int]) -> list[Any]:
        """Returns the results of an operation in float32."""
        outputs, written = InFloat32.operation(self, eqn, inputs, place), run_as_written(eqn, inputs)
        for x, y, aval, site in zip(outputs, written, map(type_of, eqn.outvars), sites, strict=True):
            if is_narrow(aval):
                self.record(site, _statistics(x, y, float(jnp.finfo(aval.dtype).smallest_normal)))
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


class Repair(_Rule):
    """Replaces infinities, NaN and constants in float32, and records which operations make infinities or NaN.

    The first column shows whether the results are infinite or NaN although the operands are not; the second one,
    whether they are infinite or NaN.
    """

    columns = 2

    @staticmethod
    def applies(eqn: core.JaxprEqn) -> bool:
        """Tests whether an operation has results that can be infinite."""
        return any(_is_inexact(type_of(x)) for x in eqn.outvars)

    def choose(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place, sites: list[int]) -> list[Any]:
        """Returns the results of an operation with modes."""
        mode = self.argument[sites[0]]
        for i, x in enumerate(eqn.invars):
            if (constant := harmful_constant(eqn, x)) is not None:
                info = jnp.finfo(type_of(x).dtype)
                nearest = math.copysign(info.max if constant else info.smallest_subnormal, constant)
                inputs = [
                    *inputs[:i],
                    jnp.where(mode == Mode.REPLACED, np.float32(nearest), inputs[i]),
                    *inputs[i + 1 :],
                ]
        outputs = InFloat32.operation(self, eqn, inputs, place)
        before, after = (severity(list(filter(_is_inexact, arrays))) for arrays in (inputs, outputs))
        self.record(sites[0], jnp.stack([after > before, after > 0]).astype(np.float32))
        is_repaired = mode == Mode.REPAIRED
        return [jnp.where(is_repaired & ~jnp.isfinite(x), 0, x) if _is_inexact(x) else x for x in outputs]


def harmful_constant(eqn: core.JaxprEqn, x: Any) -> float | None:
    """Returns an operand of an operation if it is a constant of zero or infinity in half precision."""
    if eqn.primitive.name not in _ARITHMETIC or not isinstance(x, core.Literal) or np.ndim(x.val) > 0:
        return None
    is_harmful = is_narrow(type_of(x)) and (float(x.val) == 0 or math.isinf(x.val))
    return float(x.val) if is_harmful else None


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


class ModalStep:
    """A step whose operations have modes.

    Attributes:
      consts: the arrays that the step depends on.
      sites: the results with modes, in program order.
      parts: the lines and passes of the sites, in program order.
      paths: their lines, in program order.
      constants: the sites with a constant that half precision holds as zero or infinity, by line, operation and value.
      not_entered: the operations that run as written whatever the modes are, such as kernels.
    """

    def __init__(self, step: Step, rule: type[Precision] | type[Record] | type[Repair], *, optimize: bool) -> None:
        self.consts = [widen(jnp.asarray(x)) for x in step.consts]
        everything = [(*x, x[1].caller.path_of(x[0]) or (UNKNOWN_LINE,)) for x in operations(step.jaxpr)]
        kernels = [(eqn, path) for eqn, _, path in everything if runs_only_as_written(eqn)]
        self.not_entered = list(dict.fromkeys(f"{path[-1]}: {eqn.primitive.name}" for eqn, path in kernels))
        found = [x for x in everything if rule.applies(x[0])]
        shortest = _shortest({path for _, _, path in found})
        sites: dict[tuple[int, Place], list[Site]] = {}
        self.constants: dict[tuple[Path, str, float], set[Site]] = {}
        for eqn, place, path in found:
            part = Part(shortest[path], place.inside(eqn).backward)
            own = sites[id(eqn), place] = [Site(part, eqn.primitive.name, type_of(x).dtype) for x in eqn.outvars]
            values = [value for x in eqn.invars if (value := harmful_constant(eqn, x)) is not None]
            for value in values:
                self.constants.setdefault((part.path, eqn.primitive.name, value), set()).update(own)
        self.sites = list(dict.fromkeys(site for own in sites.values() for site in own))
        self.parts = list(dict.fromkeys(site.part for site in self.sites))
        # A line whose forward pass has no such result, as of an index, is also in the order of the forward pass.
        self.paths = list(dict.fromkeys(shortest[path] for _, _, path in everything if path in shortest))
        # The conversions that autocast inserts have the traceback of the matmul.
        matmuls = {eqn.source_info.traceback for eqn, _, _ in found if eqn.primitive.name in MATMULS}
        conversions = {eqn.source_info.traceback for eqn, _, _ in found if eqn.primitive.name == "convert_element_type"}
        by_autocast = matmuls & conversions
        self._by_hand = {shortest[path] for eqn, _, path in found if eqn.source_info.traceback not in by_autocast}
        index = {site: i for i, site in enumerate(self.sites)}

        def run(consts: list[Any], scale: jax.Array, modes: jax.Array) -> tuple[list[Any], Any]:
            return rule(modes, sites, index).evaluate(step.jaxpr, consts, [scale])

        self._run, self._rewind = compile_lazily(run, optimize=optimize), step.rewind

    def is_by_autocast(self, path: Path) -> bool:
        """Tests whether everything that a line computes in half precision is matmuls that `autocast` has converted."""
        return path not in self._by_hand

    def run(
        self, scale: float, modes: Mapping[Site, Mode], default: Mode, consts: list[Any] | None = None
    ) -> tuple[list[Any], dict[Site, Any]]:
        """Runs the step.

        Args:
          scale: the loss scale.
          modes: the modes of some sites.
          default: the mode of all others.
          consts: other arrays that the step depends on.

        Returns:
          The loss and the gradients, and what was recorded for each site.
        """
        self._rewind()
        array = np.array([modes.get(site, default) for site in self.sites], np.int32)
        outputs, records = self._run(self.consts if consts is None else consts, np.float32(scale), array)
        return outputs, {} if records is None else dict(zip(self.sites, np.asarray(records).tolist(), strict=True))


def _shortest(paths: Collection[Path]) -> dict[Path, Path]:
    """Returns for each path the shortest end of it that is a path, too.

    In the forward pass, JAX forgets the callers of a function with `jax.checkpoint`; in the backward pass it does not.
    """
    return {path: next(end for end in (path[-n:] for n in range(1, len(path) + 1)) if end in paths) for path in paths}


def compile_step(step: Step, *, optimize: bool) -> Callable[[float], list[Any]]:
    """Returns a function of the loss scale that returns the loss and the gradients of a step as it is written."""
    run = compile_lazily(lambda consts, scale: jax.core.eval_jaxpr(step.jaxpr, consts, scale), optimize=optimize)

    def run_at(scale: float) -> list[Any]:
        step.rewind()
        return run(step.consts, np.float32(scale))

    return run_at
