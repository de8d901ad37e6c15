"""Float32 copies of parameters in half precision, in the state of an optimizer of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmpscale._algorithm.optax import Transformation, with_extra_args
from jmpscale._base.as_written import as_written
from jmpscale._base.tree import PyTree
from jmpscale._base.types import as_float32, is_half
from jmpscale._guards import master_params as guards
from jmpscale._state import WithMasterParamsState


def with_master_params(inner: Transformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates float32 copies of the parameters that are bfloat16 or float16.

    In half precision, a change below half of the last place of a parameter is lost. The copies keep it: they are called
    main parameters in Megatron-LM, and master weights in apex. `inner` sees the copies, and float32 gradients. Then
    each parameter becomes its rounded copy, exactly, except for the sign of a zero. Other parameters have no copy.

    Where a copy does not round to its parameter, because something else has changed the parameter, the next update
    starts from the parameter. So a checkpoint of the parameters and the optimizer state continues bit for bit, and new
    parameters beside an old state are used as they are.

    Place every transformation that changes updates inside, `with_loss_scaling` and `optax.MultiSteps` included. Copies
    would follow updates that a transformation outside has changed, and lose their digits; `diagnose_step` reports it.
    Outside, `with_loss_scaling`, `optax.MultiSteps`, `optax.masked` and `optax.partition` are right, too.

    Args:
      inner: an optax gradient transformation. Its state has the dtypes of a state for float32 parameters.

    Returns:
      A gradient transformation. Call `tx.update(grads, opt_state, params)`, and apply the updates by
      `optax.apply_updates`, which keeps the dtypes of the parameters: the updates of parameters with a copy are
      float32. `optax.tree.get(opt_state, "master_params")` returns the copies, in the structure of the parameters, with
      None for each other parameter.

    Raises:
      TypeError: `inner` is not a gradient transformation. From `tx.init`: `inner` needs arrays, and the parameters
        contain other leaves. From `tx.update`: the parameters are missing or are gradients, one has been converted
        since `tx.init`, or the state is from another optimizer.

    Warns:
      UserWarning: a gradient is float16 although `inner` adapts a loss scale.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> tx = jmpscale.with_master_params(optax.sgd(2.0**-10))
    >>> w = jnp.array(1.0, jnp.bfloat16)  # the next smaller number is 0.99609375
    >>> opt_state = tx.init(w)
    >>> for _ in range(3):
    ...     updates, opt_state = tx.update(jnp.array(1.0, jnp.bfloat16), opt_state, w)
    ...     w = (w.astype(jnp.float32) + updates).astype(w.dtype)  # or optax.apply_updates(w, updates)
    >>> w, opt_state.master_params
    (Array(0.996094, dtype=bfloat16), Array(0.9970703, dtype=float32))
    """
    guards.created(inner)
    tx = with_extra_args(inner)

    def init(params: optax.Params) -> WithMasterParamsState:
        copies = jax.tree.map(lambda param: param if is_half(param) else None, params)
        # inner may keep parameters in its state: it gets arrays of its own, so that both can be donated.
        with guards.initializing(params):
            inner_state = tx.init(as_float32(params, is_half))
        return WithMasterParamsState(as_float32(copies, is_half), inner_state)

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
        copies = jax.tree.map(lambda p, x, u: _reachable(x + u, p) if is_half(p) else None, params, full, changes)
        updates = jax.tree.map(lambda p, x, u: _difference(x, p) if is_half(p) else u, params, copies, changes)
        return updates, WithMasterParamsState(copies, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# Inlined, a jitted function adds the equations of its body: leaves of equal type share one trace.
@functools.partial(jax.jit, inline=True)
def _follow(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns a copy where it rounds to its parameter, otherwise the parameter, in float32."""
    value = param.astype(np.float32)
    return jnp.where(_rounded(copy, param.dtype) == value, copy, value)


@functools.partial(jax.jit, inline=True)
def _reachable(new: jax.Array, param: jax.Array) -> jax.Array:
    """Returns a new copy that a float32 update of its parameter can reach.

    No such update leads from 1, to which 0.9999199 rounds in bfloat16, to -1.4901161e-6. A new copy that is so much
    smaller than the parameter moves by less than the update rounds.
    """
    value = param.astype(np.float32)
    is_far = 2.0**12 * jnp.abs(_rounded(new, param.dtype)) < jnp.abs(value)
    return jnp.where(is_far, value + (new - value), new)


@functools.partial(jax.jit, inline=True)
def _difference(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the float32 update whose addition to a parameter gives its rounded copy."""
    rounded, value = _rounded(copy, param.dtype), param.astype(np.float32)
    update = jnp.where(rounded == value, -0.0, rounded - value)  # inf - inf is NaN
    return jnp.where(value == 0, copy, update)  # a zero gets the sign of a copy that rounds to zero


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns float32 numbers rounded to bfloat16 or float16, in float32.

    For a GPU, XLA removes a conversion to half precision and back. Its own operation does not round to the subnormal
    numbers of float16.
    """
    info = jnp.finfo(dtype)
    with as_written():  # what a copy is compared with is rounded in float32, too
        rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
        if dtype == jnp.bfloat16:
            return rounded
        step = float(info.smallest_subnormal)
        return jnp.where(jnp.abs(x) < float(info.tiny), jnp.rint(x / step) * step, rounded)
