"""Multiplication of arrays of any floating-point or complex dtype by a real number."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmpscale._base.compat import unreduced_axes
from jmpscale._base.memory import to_memory_of


def multiply_leaf(x: ArrayLike, factor: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Multiplies an array by a real number in at least float32; rounds once, to `dtype`, by default the array's."""
    factor = jnp.asarray(factor, real_dtype(x))
    if axes := unreduced_axes(x):  # JAX multiplies partial sums only by values of a type that shows these axes
        factor = jax.sharding.reshard(factor, jax.P(reduced=axes))
    if jnp.iscomplexobj(x):  # part by part: inf * (factor + 0j) is NaN
        return jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    if jax.typeof(x).weak_type:
        return jax.lax.mul(x, to_memory_of(x, jax.lax.full_like(x, factor)))  # weakly typed as well
    return (jnp.asarray(x, factor.dtype) * factor).astype(jnp.result_type(x) if dtype is None else dtype)


def real_dtype(x: ArrayLike) -> np.dtype:
    """Returns the real dtype in which an array is multiplied: at least float32."""
    return np.promote_types(jnp.finfo(jnp.result_type(x)).dtype, np.float32)
