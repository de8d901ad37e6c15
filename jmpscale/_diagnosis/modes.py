"""A training step whose operations compute as they are written, in float32, or otherwise, as an array of modes says.

With all operations as written it is the step; with all of them in float32 it is the reference. So a search over the
modes finds the lines that must compute in float32 by changing them.
"""

import collections
import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import Caller, type_of
from jmpscale._base.source import expression_of, is_in_inner_gradient
from jmpscale._diagnosis.errors import severity
from jmpscale._diagnosis.float32 import run_as_written, run_in_float32
from jmpscale._diagnosis.interpret import Interpreter, widen
from jmpscale._diagnosis.program import Operation, Path, program_operations
from jmpscale._diagnosis.step import Step, compiled


class Mode(enum.IntEnum):
    """How an operation computes."""

    AS_WRITTEN = 0
    RANGE = 1  # with the precision as written, and the range of float32
    FLOAT32 = 2
    REPAIRED = 3  # in float32, with zeros in place of infinities and NaN


Modes = Mapping["Site", Mode | tuple[Mode, ...]]  # of all operations of a site, or of each one in program order


class Part(NamedTuple):
    """A line in one pass."""

    path: Path
    backward: bool


class Site(NamedTuple):
    """One kind of operation of a part: all calls of the line, such as the layers of a loop in Python."""

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


class Run(NamedTuple):
    """A run of an operation in an interpreter whose argument is the array of modes."""

    interpreter: Interpreter
    modes: list[int]  # the indices of its modes, of which the largest decides
    sites: list[int]  # the indices of its records

    @property
    def mode(self) -> jax.Array:
        return functools.reduce(jnp.maximum, [self.interpreter.argument[i] for i in self.modes])

    def record(self, numbers: jax.Array) -> None:
        for i in self.sites:
            self.interpreter.record(i, numbers)


class Modal(NamedTuple):
    """How operations with modes compute."""

    dtype: Callable[[Operation], np.dtype | None]  # of the results with a mode; None if the operation has no mode
    # Takes the operation, its operands, and its results in float32.
    run: Callable[[Run, Operation, list[Any], list[Any]], list[Any]]
    columns: int = 0  # of the records


def _half_dtype(operation: Operation) -> np.dtype | None:
    return next((dtype for dtype in operation.dtypes if dtype), None)


def _choose_precision(run: Run, operation: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
    """Chooses the precision and the range of results."""

    def choose(in_float32: jax.Array, written: jax.Array, dtype: np.dtype | None) -> jax.Array:
        if dtype is None:
            return written
        rounded = jax.lax.reduce_precision(in_float32, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant)
        return jax.lax.select_n(run.mode, written, rounded, in_float32)

    return list(map(choose, in_float32, run_as_written(operation.eqn, inputs), operation.dtypes))


def _record(run: Run, operation: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
    """Computes in float32, and records `Statistics`."""
    written = run_as_written(operation.eqn, inputs)
    for x, y, dtype in zip(in_float32, written, operation.dtypes, strict=True):
        if dtype is not None:
            run.record(_statistics(x, y, float(jnp.finfo(dtype).smallest_normal)))
    return in_float32


def _statistics(in_float32: jax.Array, written: jax.Array, smallest_normal: float) -> jax.Array:
    finite = jnp.isfinite(in_float32)
    magnitude = jnp.where(finite, jnp.abs(in_float32), 0).astype(np.float32)  # not float64
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


def _inexact_dtype(operation: Operation) -> np.dtype | None:
    return next((type_of(x).dtype for x in operation.eqn.outvars if _is_inexact(type_of(x))), None)


def _repair(run: Run, _: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
    """Replaces infinities and NaN in float32, and records which operations make them.

    The first column shows whether the results are infinite or NaN although the operands are not; the second one,
    whether they are infinite or NaN.
    """
    before, after = (severity(list(filter(_is_inexact, arrays))) for arrays in (inputs, in_float32))
    run.record(jnp.stack([after > before, after > 0]).astype(np.float32))
    is_repaired = run.mode == Mode.REPAIRED
    return [jnp.where(is_repaired & ~jnp.isfinite(x), 0, x) if _is_inexact(x) else x for x in in_float32]


PRECISION = Modal(_half_dtype, _choose_precision)
RECORD = Modal(_half_dtype, _record, columns=3)
REPAIR = Modal(_inexact_dtype, _repair, columns=2)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


class ModalStep:
    """A step whose operations have modes. Its sites, parts and paths are in the order of the program."""

    def __init__(self, step: Step, modal: Modal) -> None:
        self.consts = [widen(jnp.asarray(x)) for x in step.consts]
        everything = program_operations(step.jaxpr)
        with_mode = [(x, dtype) for x in everything if (dtype := modal.dtype(x)) is not None]
        shortest = _shortest({path for x, _ in with_mode for path in x.paths})
        sites = {
            x.key: [Site(Part(shortest[path], x.backward), x.eqn.primitive.name, dtype) for path in x.paths]
            for x, dtype in with_mode
        }
        self.sites = list(dict.fromkeys(site for group in sites.values() for site in group))
        self.counts = collections.Counter(site for group in sites.values() for site in group)
        self.calls = _calls(x for x in everything if not x.backward)
        self.in_inner_gradients = {site for x, _ in with_mode if is_in_inner_gradient(x.eqn) for site in sites[x.key]}
        self.parts = list(dict.fromkeys(site.part for site in self.sites))
        # A line whose forward pass has no such result, such as an index, is also in the order of the forward pass.
        self.paths = list(dict.fromkeys(shortest[path] for x in everything for path in x.paths if path in shortest))
        # The operations that reach the outputs and run as written, whatever the modes are; known after the first run.
        self.not_entered: dict[Operation, None] = {}
        index = {site: i for i, site in enumerate(self.sites)}
        *starts, _ = itertools.accumulate((self.counts[site] for site in self.sites), initial=0)
        next_mode = {site: itertools.count(start) for site, start in zip(self.sites, starts, strict=True)}
        runs = {key: ([next(next_mode[x]) for x in group], [index[x] for x in group]) for key, group in sites.items()}
        found = {x.key: x for x in everything}

        def rule(interpreter: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
            operation = found[id(eqn), caller]
            outputs = run_in_float32(eqn, inputs)
            if outputs is None:
                outputs = run_as_written(eqn, inputs)
                self.not_entered |= {operation: None}
            if operation.key not in runs:
                return outputs
            return modal.run(Run(interpreter, *runs[operation.key]), operation, inputs, outputs)

        def run(consts: list[Any], scale: jax.Array, array: jax.Array) -> tuple[list[Any], Any]:
            records = {i: jnp.zeros(modal.columns, np.float32) for i in index.values() if modal.columns}
            return Interpreter(rule, array, records).evaluate(core.ClosedJaxpr(step.jaxpr, consts), [scale])

        self._run = compiled(run)

    def run(
        self, scale: float, modes: Modes, default: Mode, consts: list[Any] | None = None
    ) -> tuple[list[Any], dict[Site, Any]]:
        """Returns the loss and the gradients, and what was recorded for each site.

        `modes` are the modes of some sites, `default` is the mode of all others, and `consts` replaces `self.consts`.
        """

        def modes_of(site: Site) -> tuple[Mode, ...]:
            mode = modes.get(site, default)
            return mode if isinstance(mode, tuple) else (mode,) * self.counts[site]

        array = np.array([mode for site in self.sites for mode in modes_of(site)], np.int32)
        outputs, records = self._run(self.consts if consts is None else consts, np.float32(scale), array)
        return outputs, {self.sites[i]: x.tolist() for i, x in jax.device_get(records).items()}


def _calls(forward: Iterable[Operation]) -> dict[Path, int]:
    """Returns how often a program calls its lines, such as for the layers of a loop in Python.

    An expression has several operations of the same kind in each call if `autocast` converts both operands of a matmul.
    """
    sizes = collections.Counter((x.paths[0], x.eqn.primitive, expression_of(x.eqn)) for x in forward)
    calls: dict[Path, int] = {}
    for (path, *_), size in sizes.items():
        calls[path] = min(size, calls.get(path, size))
    return calls


def _shortest(paths: Collection[Path]) -> dict[Path, Path]:
    """Returns for each path the shortest end of it that is a path, too.

    In the forward pass, JAX forgets the callers of a function with `jax.checkpoint`; in the backward pass it does not.
    """
    return {path: next(end for end in (path[-n:] for n in range(1, len(path) + 1)) if end in paths) for path in paths}
