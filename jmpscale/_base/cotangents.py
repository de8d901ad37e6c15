"""Operations that return their operand, and multiply or divide its cotangent.

They are one primitive, whose transpose multiplies by a factor and is not the transpose of its value, the identity. JAX
has `linear_call` for such operations, but cannot batch it. A custom derivative rule would not do: JAX would apply it
once, and forget it in derivatives of the result, or could not differentiate it in forward mode.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jmpscale._base.frameworks import imported
from jmpscale._base.multiply import multiply_leaf, real_dtype

NAME = "scale_cotangent"  # of the primitive


def multiply_cotangent(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns `x`, and multiplies its cotangent by a scalar; the cotangent's own cotangent is divided by it.

    In forward mode, tangents do not change. The factor is a constant of every derivative.
    """
    return _PRIMITIVE.bind(x, factor, divides=False)


def divide_cotangent(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns `x`, and divides its cotangent by a scalar; the cotangent's own cotangent is multiplied by it."""
    return _PRIMITIVE.bind(x, factor, divides=True)


def _identity(x: Any, factor: Any, *, divides: bool) -> Any:
    return x


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, divides: bool) -> tuple[Any, Any]:
    x, factor = primals
    tangent = tangents[0]
    if not isinstance(tangent, ad.Zero):
        tangent = _PRIMITIVE.bind(tangent, factor, divides=divides)
    return _PRIMITIVE.bind(x, factor, divides=divides), tangent


def _propagate_series(
    primals: Sequence[Any], series: Sequence[Sequence[Any]], *, divides: bool
) -> tuple[Any, list[Any]]:
    """Returns a value and the terms of its Taylor series, which do not change, as tangents do not."""
    x, factor = primals
    value, *terms = [_PRIMITIVE.bind(term, factor, divides=divides) for term in (x, *series[0])]
    return value, terms


def _transpose(cotangent: Any, x: Any, factor: jax.Array, *, divides: bool) -> tuple[Any, None]:
    if isinstance(cotangent, ad.Zero):
        return cotangent, None
    # The cotangent's own cotangent is first multiplied as the transpose of this product, and then divided, or vice
    # versa, so it does not change.
    inner = _PRIMITIVE.bind(cotangent, factor, divides=not divides)
    factor = factor.astype(real_dtype(cotangent))
    if factor.ndim:  # batched
        factor = factor.reshape(factor.shape + (1,) * (cotangent.ndim - factor.ndim))
    return multiply_leaf(inner, 1 / factor if divides else factor), None


def _batch(args: Sequence[jax.Array], axes: Sequence[int | None], *, divides: bool) -> tuple[jax.Array, int]:
    """Batches the primitive. The axes of a batched factor are the first axes of the operand, which is batched, too."""
    (x, factor), (x_axis, factor_axis) = args, axes
    axis = factor.ndim
    if factor_axis is not None:
        axis, size, factor = 0, factor.shape[factor_axis], jnp.moveaxis(factor, factor_axis, 0)
        x = jnp.broadcast_to(x, (size, *x.shape)) if x_axis is None else x
    return _PRIMITIVE.bind(jnp.moveaxis(x, x_axis or 0, axis), factor, divides=divides), axis


class _Primitive(core.Primitive):
    """A primitive with a rule for `jax.experimental.jet`, which programs may import after this package."""

    def bind(self, *args: Any, **params: Any) -> Any:
        if rules := imported("jax.experimental.jet", "jet_rules"):
            rules[self] = _propagate_series
        return super().bind(*args, **params)


_PRIMITIVE = _Primitive(NAME)
_PRIMITIVE.def_impl(_identity)
_PRIMITIVE.def_abstract_eval(_identity)
ad.primitive_jvps[_PRIMITIVE] = _differentiate
ad.primitive_transposes[_PRIMITIVE] = _transpose
batching.primitive_batchers[_PRIMITIVE] = _batch
mlir.register_lowering(_PRIMITIVE, lambda ctx, x, factor, **params: [x])
