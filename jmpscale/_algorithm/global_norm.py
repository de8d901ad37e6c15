"""The global norm of gradients, also of gradients of which each device holds a part."""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._algorithm.finite import zero_where_nonfinite
from jmpscale._base.axes import AxisName, as_axes, axes_to_reduce
from jmpscale._base.compat import varying_axes
from jmpscale._base.memory import beside, stack
from jmpscale._base.tree import PyTree, as_array, flatten_gradients


def global_norm(grads: PyTree, axis_name: AxisName, norm_axis_name: AxisName) -> jax.Array:
    """Returns the norm over all leaves and devices, in float32, or in float64 if a leaf is float64."""
    leaves = [as_array(x) for x in flatten_gradients(grads)[0]]
    dtype = jnp.float64 if any(x.real.dtype == jnp.float64 for x in leaves) else jnp.float32
    sums: dict[tuple[Hashable, ...], list[jax.Array]] = {}  # by the axes over which to add them
    for x in leaves:
        for part in (x.real, x.imag) if jnp.iscomplexobj(x) else (x,):
            total = _sum_of_squares(part.astype(dtype))
            sums.setdefault(_norm_axes(total, axis_name, norm_axis_name), []).append(total)
    totals = {axes: stack(squares).sum() for axes, squares in sums.items()}
    reduced = [jax.lax.psum(total, axes) if axes else total for axes, total in totals.items()]
    return jnp.sqrt(sum(reduced, jnp.zeros((), dtype)))


@functools.partial(jax.jit, inline=True)
def _sum_of_squares(x: jax.Array) -> jax.Array:
    # The derivative of square(x) alone turns a cotangent of zero into NaN where x is infinite.
    return jnp.where(jnp.isfinite(x), jnp.square(zero_where_nonfinite(x)), beside(x, np.array(np.inf, x.dtype))).sum()


def _norm_axes(x: jax.Array, axis_name: AxisName, norm_axis_name: AxisName) -> tuple[Hashable, ...]:
    """Returns the axes along which each device holds a part: the axes that the types show, and the named axes."""
    typed = [name for name in axes_to_reduce(x, axis_name) if name in varying_axes(x)]
    return tuple(dict.fromkeys([*typed, *axes_to_reduce(x, as_axes(norm_axis_name))]))
