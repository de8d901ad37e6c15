"""The modes of operations, which compute as they are written, in float32, or otherwise, as an array of modes says."""

import enum
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.compat import in_current_mesh
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.errors import severity
from jmpscale._diagnosis.thresholds import NEAR_ONE, SAMPLES
from jmpscale._diagnosis.trace.operations import Operation, Path
from jmpscale._diagnosis.trace.passes import Pass
from jmpscale._programs.float32 import run_as_written, run_in_float32
from jmpscale._programs.interpret import Interpreter
from jmpscale._programs.jaxpr import Key, type_of


class Mode(enum.IntEnum):
    """How an operation computes."""

    AS_WRITTEN = 0
    RANGE = 1  # with the precision as written, and the range of float32
    FLOAT32 = 2
    REPAIRED = 3  # in float32, with zeros in place of infinities and NaN
    PERTURBED = 4  # in float32, with constants near 1 that round to those in the program


# Of all operations of a site, or of each one in program order: a `Mode`, or the bits of a factor.
Modes = Mapping["Site", int | tuple[int, ...]]


class Part(NamedTuple):
    """A line in one pass."""

    path: Path
    pass_: Pass

    @property
    def backward(self) -> bool:
        return self.pass_ is Pass.BACKWARD


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
    tiny: float  # the fraction of values that are below the smallest normal number, and not zero


class Execution(NamedTuple):
    """An execution of an operation by an interpreter whose argument is the array of modes."""

    interpreter: Interpreter
    position: int  # of the operation in the array

    @property
    def mode(self) -> jax.Array:
        return in_current_mesh(self.interpreter.argument)[self.position]

    def record(self, numbers: jax.Array) -> None:
        self.interpreter.record(self.position, numbers)


class Modal(NamedTuple):
    """How operations with modes compute."""

    dtype: Callable[[Operation], np.dtype | None]  # of the results with a mode; None if the operation has no mode
    # Takes the operation, its operands, and its results in float32.
    run: Callable[[Execution, Operation, list[Any], list[Any]], list[Any]]
    columns: int = 0  # of the records
    records: Callable[[Operation], bool] = lambda _: True  # whether it makes records of an operation, if of any


def _half_dtype(operation: Operation) -> np.dtype | None:
    return next((dtype for dtype in operation.dtypes if dtype), None)


def _choose_precision(
    execution: Execution, operation: Operation, inputs: list[Any], in_float32: list[Any]
) -> list[Any]:
    """Chooses the precision and the range of results."""

    def choose(in_float32: jax.Array, written: jax.Array, dtype: np.dtype | None) -> jax.Array:
        if dtype is None:
            return written
        info = jnp.finfo(dtype)
        ranged = jax.lax.reduce_precision(in_float32, exponent_bits=8, mantissa_bits=info.nmant)
        if operation.eqn.primitive.name != "convert_element_type":
            # The operands are rounded as well, so a result in range is as it is written.
            magnitude = jnp.abs(written)
            is_in_range = (magnitude >= float(info.smallest_normal)) & (magnitude <= float(info.max))
            ranged = jax.lax.select(is_in_range, written, ranged)
        return jax.lax.select_n(execution.mode, written, ranged, in_float32)

    return list(map(choose, in_float32, run_as_written(operation.eqn, inputs), operation.dtypes))


def _recorded_dtype(operation: Operation) -> np.dtype | None:
    """Returns the dtype; None for the update in bfloat16, whose range is enough, and which takes long to compile."""
    dtype = _half_dtype(operation)
    return None if operation.pass_ is Pass.UPDATE and dtype == jnp.bfloat16 else dtype


def _record(execution: Execution, operation: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
    """Computes in float32, and records `Statistics`."""
    written = run_as_written(operation.eqn, inputs)
    for x, y, dtype in zip(in_float32, written, operation.dtypes, strict=True):
        if dtype is not None:
            execution.record(_statistics(x, y, float(jnp.finfo(dtype).smallest_normal)))
    return in_float32


# Inlined, a jitted function adds the equations of its body: operations with results of equal type share one trace.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def _statistics(in_float32: jax.Array, written: jax.Array, smallest_normal: float) -> jax.Array:
    finite = jnp.isfinite(in_float32)
    magnitude = jnp.where(finite, jnp.abs(in_float32), 0).astype(np.float32)  # not float64
    overflows = finite & ~jnp.isfinite(written)  # also inside of an operation, such as a sum
    tiny = (magnitude > 0) & (magnitude < smallest_normal)
    # One reduction with three operands compiles in a third of the time of three reductions.
    largest, *counts = jax.lax.reduce(
        (magnitude, overflows.astype(np.float32), tiny.astype(np.float32)),
        (np.float32(0),) * 3,
        lambda x, y: (jnp.maximum(x[0], y[0]), x[1] + y[1], x[2] + y[2]),
        range(magnitude.ndim),
    )
    return jnp.stack([largest, *(count / max(magnitude.size, 1) for count in counts)])


def _inexact_dtype(operation: Operation) -> np.dtype | None:
    return next((type_of(x).dtype for x in operation.eqn.outvars if _is_inexact(type_of(x))), None)


def _repair(execution: Execution, _: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
    """Replaces infinities and NaN in float32, and records which operations make them.

    The first column shows whether the results are infinite or NaN although the operands are not; the second one,
    whether they are infinite or NaN.
    """
    before, after = (severity(list(filter(_is_inexact, arrays))) for arrays in (inputs, in_float32))
    execution.record(jnp.stack([after > before, after > 0]).astype(np.float32))
    is_repaired = execution.mode == Mode.REPAIRED
    return [jnp.where(is_repaired & ~jnp.isfinite(x), 0, x) if _is_inexact(x) else x for x in in_float32]


def _constant_dtype(operation: Operation) -> np.dtype | None:
    """Returns the dtype of a factor, a divisor or a base of a power that is a constant near 1 in half precision."""
    pairs = zip(operation.eqn.invars, _constants(operation), strict=True)
    return next((type_of(x).dtype for x, is_constant in pairs if is_constant), None)


def _constants(operation: Operation) -> list[bool]:
    """Tests for each operand whether it is such a constant; not the exponent of a power."""
    eqn = operation.eqn
    if operation.as_written or eqn.primitive.name not in {"mul", "div", "pow", "integer_pow", "broadcast_in_dim"}:
        return [False] * len(eqn.invars)
    found = [isinstance(x, core.Literal) and is_narrow(type_of(x)) and is_near_one(x.val) for x in eqn.invars]
    return [found[0], *[False] * (len(found) - 1)] if eqn.primitive.name == "pow" else found


def is_near_one(x: Any) -> bool:
    """Tests whether a number is so near to 1 that it may be a decay."""
    return bool(abs(float(np.asarray(x).astype(np.float32)) - 1) < NEAR_ONE)


def perturbed(x: Any, dtype: np.dtype) -> Any:
    """Returns a constant, carried in float32, that is smaller by a quarter of the last place of its dtype."""
    return x * np.float32(1 - float(jnp.finfo(dtype).eps) / 4)


def _perturb_constants(
    execution: Execution, operation: Operation, inputs: list[Any], in_float32: list[Any]
) -> list[Any]:
    pairs = zip(inputs, operation.eqn.invars, _constants(operation), strict=True)
    changed = [perturbed(x, type_of(y).dtype) if found else x for x, y, found in pairs]
    outputs = run_in_float32(operation.eqn, changed) or in_float32
    return [jnp.where(execution.mode == Mode.PERTURBED, x, y) for x, y in zip(outputs, in_float32, strict=True)]


def mode_of_factor(exponent: int) -> int:
    """Returns the mode in which cotangents are rounded as if they were larger by a power of two."""
    return int(np.float32(2.0**exponent).view(np.int32))


def _multiply_cotangents(
    of_loss: Collection[Key], execution: Execution, operation: Operation, inputs: list[Any], in_float32: list[Any]
) -> list[Any]:
    """Rounds cotangents as if they were multiplied by a power of two, whose bits are the mode.

    The operations on which the loss depends have no cotangents of it, such as those of a gradient that it contains.
    """

    def choose(in_float32: jax.Array, written: jax.Array, dtype: np.dtype | None) -> jax.Array:
        if dtype is None or not operation.is_transposed or operation.key in of_loss:
            return written
        factor = jax.lax.bitcast_convert_type(execution.mode, np.float32)
        rounded = (in_float32 * factor).astype(dtype).astype(np.float32) / factor
        return jnp.where(execution.mode == Mode.AS_WRITTEN, written, rounded)

    return list(map(choose, in_float32, run_as_written(operation.eqn, inputs), operation.dtypes))


def counting(dtypes: Mapping[tuple[str, str], np.dtype]) -> Modal:
    """Returns the modes of some comparisons, by their lines and primitives: they record how rare a result is.

    The first column has the fraction of the results that are true, or those that are false if they are fewer; the
    second one, the number of results.
    """

    def record(execution: Execution, _: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
        fraction = in_float32[0].astype(np.float32).mean()
        size = np.float32(in_float32[0].size)
        execution.record(jnp.stack([jnp.minimum(fraction, 1 - fraction), size]))
        return in_float32

    return Modal(lambda x: dtypes.get((x.line, x.eqn.primitive.name)), record, columns=2)


def sampling(conversions: Collection[Key]) -> Modal:
    """Returns the modes of `PRECISION`, with which some conversions to integers record a sample of these integers.

    A record is a positive number that depends on one of the integers, and hardly ever agrees for two different ones. Of
    the iterations of a loop, each record is that of another one, because it is the largest.
    """
    positions, factors = np.random.default_rng(0).integers(0, 2**32, (2, SAMPLES), np.uint32)

    def is_sampled(operation: Operation) -> bool:
        return operation.key in conversions

    def dtype(operation: Operation) -> np.dtype | None:
        return type_of(operation.eqn.outvars[0]).dtype if is_sampled(operation) else _half_dtype(operation)

    def run(execution: Execution, operation: Operation, inputs: list[Any], in_float32: list[Any]) -> list[Any]:
        if not is_sampled(operation):
            return _choose_precision(execution, operation, inputs, in_float32)
        integers = in_float32[0]
        if any(jax.typeof(integers).sharding.spec):  # a mesh with Explicit axes
            integers = jax.sharding.reshard(integers, jax.P())
        integers = integers.ravel()
        sample = integers[positions % integers.size].astype(np.uint32)
        execution.record(((sample * (factors | 1)) >> 8).astype(np.float32))
        return in_float32

    return Modal(dtype, run, SAMPLES, is_sampled)


PRECISION = Modal(_half_dtype, _choose_precision)
RECORD = Modal(_recorded_dtype, _record, columns=3)
REPAIR = Modal(_inexact_dtype, _repair, columns=2)
CONSTANTS = Modal(_constant_dtype, _perturb_constants)


def factors(of_loss: Collection[Key]) -> Modal:
    """Returns modes that multiply the cotangents of a loss, which depends on some operations."""
    return Modal(_half_dtype, functools.partial(_multiply_cotangents, of_loss))


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)
