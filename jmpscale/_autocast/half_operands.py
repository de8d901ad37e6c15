"""Matmuls with operands in half precision and float32 results, whose derivatives are such matmuls, too.

If a program converts the operands and requests a float32 result, its derivative is not in half precision: JAX
multiplies the float32 cotangent by the converted operand, in float32. But JAX copies the `precision` of a matmul to the
matmuls of its derivatives, under every transformation. So here the operands remain float32 in the program, with the
precision `HalfOperands`, and are converted, as the cotangents are, when JAX lowers the program for a platform.

JAX's own `DotAlgorithmPreset.F16_F16_F32` means the same, but JAX does not lower it for CPUs, nor compile it for TPUs,
nor `BF16_BF16_F32` for GPUs before Ampere. Without the name of an algorithm, the matmul of the converted operands
compiles for all accelerators, and for GPUs to the same program. CPUs have no units for half precision, and no matmul of
such operands with a float32 result for some layouts: they multiply the rounded operands in float32.

Operands that are infinite in float16 become NaN, because later arithmetic could hide an infinite result.

The matmul is JAX's own primitive, not a new one: the policy `dots_saveable` of `jax.checkpoint` finds matmuls by the
identity of their primitive, so it would recompute every matmul of another primitive in the backward pass.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jmpscale._base.compat import unknown_jax


class HalfOperands(jax.lax.DotAlgorithm):
    """The precision of a matmul whose operands are converted when it is lowered, and whose result is float32.

    It is not equal to the `DotAlgorithm` with the same fields. Otherwise JAX, which keeps lowered matmuls by their
    parameters, would lower whichever of the two comes second in a program as it has lowered the first.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HalfOperands) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:  # a tuple has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((HalfOperands, *self))

    def __repr__(self) -> str:
        return f"HalfOperands({self.dtype})"

    @property
    def dtype(self) -> np.dtype:
        """The dtype to which the operands are converted."""
        return np.dtype(self.lhs_precision_type)


@functools.cache
def half_operands(dtype: np.dtype) -> HalfOperands:
    """Returns the precision of matmuls that convert their operands to a dtype, after teaching JAX to lower it."""
    _register_lowering()
    return HalfOperands(dtype, dtype, np.dtype(np.float32))


@functools.cache
def _register_lowering() -> None:
    """Replaces the lowering rules of matmuls with rules that differ for the precision `HalfOperands` alone."""
    tables = _lowering_rules()
    if not any(primitive.name == "dot_general" for primitive in tables[None]):
        raise unknown_jax("lowering rule of dot_general")
    for platform, table in tables.items():
        for primitive, entry in list(table.items()):
            # On platforms without their own rule, JAX lowers a ragged_dot to matmuls of the same precision.
            if primitive.name == "dot_general" or (primitive.name == "ragged_dot_general" and platform):
                rule = _converts_operands(entry.rule, platform)
                mlir.register_lowering(primitive, rule, platform, inline=entry.inline)


def _lowering_rules() -> dict[str | None, dict[Any, Any]]:
    """Returns JAX's lowering rules by platform and primitive; None stands for platforms without rules."""
    try:
        return {None: vars(mlir)["_lowerings"], **vars(mlir)["_platform_specific_lowerings"]}
    except KeyError as error:
        raise unknown_jax(f"jax.interpreters.mlir.{error.args[0]}") from error


def _converts_operands(lower: Any, platform: str | None) -> Any:
    """Returns a lowering rule of matmuls that converts the operands if the precision says so."""

    def rule(ctx: Any, *operands: Any, precision: Any, **params: Any) -> Any:
        if not isinstance(precision, HalfOperands):
            return lower(ctx, *operands, precision=precision, **params)
        dtypes = [precision.dtype, np.dtype(np.float32)] if platform == "cpu" else [precision.dtype]
        converted = [functools.reduce(_convert, dtypes, x) for x in operands[:2]]
        if precision.dtype == np.float16:  # bfloat16 has the range of float32
            converted = [_lower_nan_for_infinity(x) for x in converted]
        avals = [x.update(dtype=dtypes[-1]) for x in ctx.avals_in[:2]]
        ctx = ctx.replace(avals_in=[*avals, *ctx.avals_in[2:]])
        return lower(ctx, *converted, *operands[2:], precision=None, **params)

    return rule


def _convert(x: Any, dtype: np.dtype) -> Any:
    return stablehlo.convert(ir.RankedTensorType.get(x.type.shape, mlir.dtype_to_ir_type(dtype)), x)


def _lower_nan_for_infinity(x: Any) -> Any:
    """Returns an operand with NaN for infinity, as `_with_nan_for_infinity` of `rules.py` does for a result."""
    return stablehlo.subtract(x, stablehlo.subtract(x, x))
