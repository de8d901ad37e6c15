"""Which matmuls and convolutions run as written, and why."""

import enum
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._autocast.half_operands import HalfOperands
from jmpscale._programs.jaxpr import MATMULS, PROGRAM, RULES, Caller, held_jaxprs, inner_holder, type_of

HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
FLOAT32 = np.dtype(np.float32)

# Half precision gains nothing in smaller contractions, because the units for matmuls contract at least 8 elements at a
# time, and rounding ruins what such contractions often compute: points, frames, grids, four-vectors and poses.
_SMALL_CONTRACTION = 4

_MOST = 0.5  # the fraction of a program's work that functions with their own derivative rules may keep in float32


class Kept(enum.Enum):
    """Why a matmul or convolution runs as written."""

    DTYPE = "The operands are {dtypes}, but autocast converts float32. Pass float32 values, or remove autocast."
    SMALL = ""  # an inner product, or a contraction of at most 4 elements: not a mistake, so no message explains it
    PRECISION = (
        "autocast keeps the setting jax_default_matmul_precision={setting!r}, which may be from a package that the "
        'program imports. Set it only where it is needed; jax.config.update("jax_default_matmul_precision", None) '
        "unsets it."
    )
    HELD = "{holder} runs as written. Use autocast in its function, or wrap the function that returns the gradients."


class Group(NamedTuple):
    """Matmuls of a function, convolutions included, of which one thing is true."""

    reason: Kept | None  # why autocast leaves them as written, or None if they run in half precision
    holder: str  # the primitive around them that autocast does not enter, if this is the reason
    number: int  # in the program; a matmul in a loop counts once
    multiplications: int  # of all iterations of a `scan`
    line: str  # the line of the first one
    dtypes: str  # of its operands

    def explanation(self) -> str:
        """Returns the reason as a sentence, with the remedy."""
        values = {"dtypes": self.dtypes, "setting": setting_that_keeps(), "holder": self.holder}
        return self.reason.value.format(**values) if self.reason else ""


def groups_of_matmuls(jaxpr: core.Jaxpr, half: np.dtype) -> list[Group]:
    """Returns the matmuls of a function to which autocast is applied, by what becomes of them.

    `jaxpr` is the function as written, before `in_half` rewrites it.
    """
    found: dict[tuple[Kept | None, str], list[tuple[core.JaxprEqn, tuple[core.JaxprEqn, ...], int]]] = {}
    for eqn, calls, repeats in _matmuls(jaxpr):
        holder = functools.reduce(inner_holder, calls, "")
        reason = _reason(half, eqn, holder)
        found.setdefault((reason, holder if reason is Kept.HELD else ""), []).append((eqn, calls, repeats))
    groups = []
    for (reason, holder), matmuls in found.items():
        first, calls, _ = matmuls[0]
        line = functools.reduce(Caller.inside, calls, PROGRAM).line_of(first)
        dtypes = " and ".join(str(_dtype(x)) for x in first.invars[:2])
        multiplications = sum(repeats * _multiplications(eqn) for eqn, _, repeats in matmuls)
        groups.append(Group(reason, holder, len(matmuls), multiplications, line, dtypes))
    return groups


def most_kept_by_rules(groups: list[Group]) -> list[Group]:
    """Returns the matmuls in functions with their own derivative rules if most of a program's work stays float32 there.

    Work is counted in multiplications, not in matmuls: speed is lost in large ones. A kernel or a solver in such a
    function is written for the dtype that it receives, so its matmuls are no mistake.
    """
    kept = [group for group in groups if group.reason is Kept.HELD and group.holder in RULES]
    work, total = (sum(group.multiplications for group in some) for some in (kept, groups))
    return kept if work > _MOST * total else []


def _matmuls(
    jaxpr: core.Jaxpr, calls: tuple[core.JaxprEqn, ...] = (), repeats: int = 1
) -> Iterator[tuple[core.JaxprEqn, tuple[core.JaxprEqn, ...], int]]:
    """Yields matmuls, with the equations around each, outermost first, and the number of times that it runs.

    The number of iterations of a `while` is unknown, and counts as one.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in MATMULS:
            yield eqn, calls, repeats
        iterations = eqn.params["length"] if eqn.primitive is jax.lax.scan_p else 1
        for held in held_jaxprs(eqn):
            yield from _matmuls(held, (*calls, eqn), repeats * iterations)


def _reason(half: np.dtype, eqn: core.JaxprEqn, holder: str) -> Kept | None:
    if isinstance(eqn.params["precision"], HalfOperands) or all(_dtype(x) == half for x in eqn.invars[:2]):
        return None  # by an autocast inside, or by hand
    return reason_to_keep(half, eqn) or (Kept.HELD if holder else None)


def _multiplications(eqn: core.JaxprEqn) -> int:
    """Returns the number of multiplications of a matmul or convolution; a symbolic size counts as one."""
    sizes = [*type_of(eqn.outvars[0]).shape, *_contracted_sizes(eqn)]
    return math.prod(size for size in sizes if isinstance(size, int))


def reason_to_keep(half: np.dtype, eqn: core.JaxprEqn) -> Kept | None:
    """Returns why a matmul or convolution runs as written, or None if autocast converts it."""
    operands = [_dtype(x) for x in eqn.invars[:2]]
    if _keeps_precision(eqn.params["precision"]):
        return Kept.PRECISION
    # The user chose complex or wider operands, or the other half-precision dtype.
    if FLOAT32 not in operands or any(jnp.issubdtype(x, np.inexact) and x not in (FLOAT32, half) for x in operands):
        return Kept.DTYPE
    if _dtype(eqn.outvars[0]) not in (FLOAT32, half):
        return Kept.DTYPE
    return Kept.SMALL if _has_small_contraction(eqn) or _is_inner_product(eqn) else None


def _has_small_contraction(eqn: core.JaxprEqn) -> bool:
    """Tests whether each element of the result is a sum of at most `_SMALL_CONTRACTION` products."""
    sizes = _contracted_sizes(eqn)
    # A symbolic size, of a program that is exported, is not an int.
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _SMALL_CONTRACTION


def _contracted_sizes(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the sizes of the axes over which products are added up."""
    left, right = (type_of(x).shape for x in eqn.invars[:2])
    match eqn.primitive.name:
        case "conv_general_dilated":  # adds the elements of a window in the input channels of a group
            out_features = eqn.params["dimension_numbers"].rhs_spec[0]
            return [size for axis, size in enumerate(right) if axis != out_features]
        case "ragged_dot_general":
            (contracting, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        case _:
            (contracting, _), _ = eqn.params["dimension_numbers"]
    return [left[axis] for axis in contracting]


def _is_inner_product(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    shapes = [type_of(x).shape for x in eqn.invars[:2]]
    contracting, batch = eqn.params["dimension_numbers"]
    sides = zip(shapes, contracting, batch, strict=True)
    free = [size for shape, c, b in sides for axis, size in enumerate(shape) if axis not in (*c, *b)]
    return all(size == 1 for size in free)


def _dtype(x: Any) -> np.dtype:
    return type_of(x).dtype


def _keeps_precision(precision: object) -> bool:
    """Tests whether the user has requested the highest precision, or an algorithm, for a matmul."""
    if isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return precision != jax.lax.DotAlgorithmPreset.DEFAULT  # which requests nothing
    operands = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in operands


def setting_that_keeps() -> str | None:
    """Returns the setting of jax_default_matmul_precision if matmuls without a precision run as written under it."""
    operand = jax.ShapeDtypeStruct((2, 2), np.float32)
    precision = jax.make_jaxpr(jax.lax.dot)(operand, operand).eqns[0].params["precision"]
    return jax.config.values["jax_default_matmul_precision"] if _keeps_precision(precision) else None
