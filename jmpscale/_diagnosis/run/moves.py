"""Moves values by a fraction, or within their last place, to numbers that round to the same values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def perturb(x: jax.Array, fraction: float) -> jax.Array:
    """Changes values by a fraction, up or down, depending on their bits; not integers, which may be indices."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.int32)
    up = ((bits ^ (bits >> 7) ^ (bits >> 13)) & 1) == 1
    changed = x * jnp.where(up, 1 + fraction, 1 - fraction).astype(x.dtype)
    return jnp.where(x == jnp.round(x), x, changed)


@functools.partial(jax.jit, static_argnums=1)
def move(x: jax.Array, dtype: np.dtype, direction: int) -> jax.Array:
    """Moves values, carried in float32, by a quarter of their last place in a dtype.

    Some values move toward zero and the others away from it, depending on their bits, as rounding moves them: equal
    values move in the same direction. All of them move in the other one if `direction` is -1, and not 1.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.uint32)
    is_odd = (bits * np.uint32(0x9E3779B1)) >> 31 == 1
    quarter = np.uint32(1 << (21 - int(jnp.finfo(dtype).nmant)))
    away, toward = (jax.lax.bitcast_convert_type(y, np.float32) for y in (bits + quarter, bits - quarter))
    moved = jnp.where(is_odd == (direction > 0), away, toward).astype(x.dtype)
    return jnp.where((x == 0) | ~jnp.isfinite(x), x, moved)


@functools.partial(jax.jit, static_argnums=1)
def move_rounded(x: jax.Array, dtype: np.dtype, direction: int) -> jax.Array:
    """Moves the values that may have been rounded to a dtype.

    If all values of an array are integers, as in a mask, the integers that the dtype represents exactly do not move.
    Neither does an array all of whose values have zeros in half of their digits, such as 0.5 and 1.
    """
    digits = int(jnp.finfo(dtype).nmant)
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.uint32)
    last = np.uint32((1 << (digits // 2 + 1)) - 1) << np.uint32(23 - digits)
    is_exact = (x == jnp.round(x)).all() & (jnp.abs(x) <= 2.0 ** (digits + 1)) | ((bits & last) == 0).all()
    return jnp.where(is_exact, x, move(x, dtype, direction))
