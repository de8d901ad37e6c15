"""Float32 copies of half-precision parameters, in the state of an optimizer of optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmpscale._algorithm.optax import Transformation, with_extra_args
from jmpscale._base.tree import PyTree
from jmpscale._base.types import as_float32, is_half
from jmpscale._guards import master_params as guards
from jmpscale._state import WithMasterParamsState


def with_master_params(inner: Transformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates float32 copies of the parameters that are bfloat16 or float16.

    """
    guards.created(inner)
    tx = with_extra_args(inner)

    def init(params: optax.Params) -> WithMasterParamsState:
        full = as_float32(params, is_half)
        copies = jax.tree.map(lambda param, x: x if is_half(param) else None, params, full)
        return WithMasterParamsState(copies, tx.init(full))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, WithMasterParamsState]:
        guards.called(state, params)
        grads = as_float32(updates, is_half)
        guards.converted(updates, grads, state)
        if "grad" in extra_args:  # by optax's convention, the same gradients
            extra_args["grad"] = as_float32(extra_args["grad"], is_half)

        full = jax.tree.map(lambda p, copy: _follow(copy, p) if is_half(p) else p, params, state.master_params)
        changes, inner_state = tx.update(grads, state.inner_state, full, **extra_args)
        new = optax.apply_updates(full, changes)
        updates = jax.tree.map(lambda p, x, change: _difference(x, p) if is_half(p) else change, params, new, changes)
        applied = optax.apply_updates(params, updates)
        copies = jax.tree.map(lambda p, x: _follow(x, p) if is_half(p) else None, applied, new)
        return updates, WithMasterParamsState(copies, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _follow(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns a copy; where it does not round to its parameter, the parameter in float32.

    """
    value = jnp.asarray(param, np.float32)
    return jnp.where(_rounded(copy, param.dtype) == value, copy, value)


def _difference(new: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the float32 number that, added to a parameter, gives the rounded new copy."""
    rounded, value = _rounded(new, param.dtype), jnp.asarray(param, np.float32)
    update = jnp.where(rounded == value, -0.0, rounded - value)  # inf - inf is NaN
    return jnp.where(value == 0, new, update)  # keeps the sign of a copy that rounds to zero


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns float32 numbers rounded to bfloat16 or float16, in float32.

    On a GPU, XLA omits a conversion to half precision and back. Its operation that rounds makes subnormal numbers of
    float16 zero.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype == jnp.bfloat16:
        return rounded
    step = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < info.tiny, jnp.rint(x / step) * step, rounded)
