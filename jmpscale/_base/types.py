"""Types of leaves: the dtypes that hold unscaled gradients, and when two leaves have the same type."""

from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmpscale._base.compat import varying_axes
from jmpscale._base.tree import PyTree, bit_pattern, is_array, is_inexact


def unscaled_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of an unscaled gradient: float32 for float16 and float8, otherwise the dtype itself."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else np.promote_types(dtype, np.float32)


def is_narrow(x: Any) -> bool:
    """Tests whether an array, or a type, has floating-point numbers of fewer bits than float32."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4


def is_below_half(x: Any) -> bool:
    """Tests whether an array, or a type, has floating-point numbers of fewer bits than float16, such as float8."""
    return is_narrow(x) and x.dtype.itemsize < 2


def is_half(x: Any) -> bool:
    """Tests whether an array, or a type, has numbers in bfloat16 or float16."""
    return getattr(x, "dtype", None) in (jnp.bfloat16, np.float16)


def as_float32(tree: PyTree, matches: Callable[[Any], bool]) -> PyTree:
    """Returns a tree in which the arrays, and the types of arrays, that match are float32."""

    def convert(x: Any) -> Any:
        if not matches(x):
            return x
        return x.update(dtype=np.float32) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x, np.float32)

    return jax.tree.map(convert, tree)


def needs_wider_gradient(x: object) -> bool:
    """Tests whether a leaf is float16 or float8, which cannot hold unscaled gradients."""
    return is_inexact(x) and unscaled_dtype(jnp.result_type(x)) != jnp.result_type(x)


def is_numeric(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf is an array or a Python number."""
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def has_same_type(was: object, now: object) -> bool:
    """Tests whether two arrays or numbers have the same type, and whether any other leaf is unchanged."""
    if is_unchanged(was, now):  # perhaps an integer that is too large for an array
        return True
    return is_numeric(was) and is_numeric(now) and _strong_type(was) == _strong_type(now)


def _strong_type(x: ArrayLike) -> tuple[object, ...]:
    """Returns the type of an array, without weak typing, and without the mesh, which JAX 0.7 does not always know.

    JAX does not always know the memory space of a scalar either.
    """
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.sharding.spec, varying_axes(x), aval.memory_space if aval.ndim else None


def is_unchanged(was: object, now: object) -> bool:
    """Tests whether a leaf that is not an array is the same object or an equal one."""
    if was is now:
        return True
    if type(was) is not type(now) or is_array(now):
        return False
    if is_numeric(was):
        return repr(was) == repr(now)  # NaN equals NaN, and 0.0 differs from -0.0
    return bool(bit_pattern(was) == bit_pattern(now))
