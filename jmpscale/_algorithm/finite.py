"""Tests whether a tree is finite, on all devices, and replaces the values that are not.

Each element is tested. A maximum does not suffice, because XLA's maximum on CPU loses NaN in arrays of 4,096 elements
or more, and neither does a sum, because finite values may add up to infinity.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpscale._base.axes import AxisName, all_reduce_and
from jmpscale._base.compat import use_variadic_reduce
from jmpscale._base.memory import beside, is_on_host, stack
from jmpscale._base.options import requires_names_in
from jmpscale._base.tree import PyTree, as_array, is_inexact
from jmpscale._get_scaler import find_scaler
from jmpscale._guards import finite as guards

# With fewer elements the time of a reduction hardly matters, and a reduction of a single value compiles faster.
_MIN_SIZE_FOR_VARIADIC_REDUCE = 2**12


@requires_names_in("all_finite((loss, grads))")
def all_finite(tree: PyTree, *, scaler: PyTree = None, axis_name: AxisName = None) -> jax.Array:
    """Tests whether a pytree contains no infinity and no NaN.

    Args:
      tree: any pytree; in a training step the pair of the loss and the gradients. Leaves that are not floating-point or
        complex, and empty arrays, count as finite.
      scaler: the scaler of the step, or any pytree that contains exactly one. With `disabled()` the result is True
        without a test, so that a training step compiles to the step without loss scaling.
      axis_name: the mapped axis or axes over which to combine the result; needed only under `jax.pmap`,
        `jax.vmap(axis_name=...)` and `check_vma=False`, where JAX's types do not show the axes. Pass `()` if all
        devices hold the same values, such as gradients after a `psum`.

    Returns:
      bool[], equal on all devices along the axes.

    Raises:
      TypeError: the tree is a function or a string, or a leaf is a partial sum or a `jax.Ref`.
      ValueError: an axis is not mapped here, or `scaler` does not contain exactly one scaler.

    Warns:
      UserWarning: `axis_name` is missing, so devices could diverge.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> tree = {"w": jnp.ones((2, 3)), "step": 7}
    >>> bool(jmpscale.all_finite(tree)), bool(jmpscale.all_finite(tree | {"b": jnp.array([0.0, jnp.nan])}))
    (True, False)
    """
    guards.called(tree)
    if scaler is not None and find_scaler(scaler).config.mode == "disabled":
        with jax.ensure_compile_time_eval():  # known when the step is traced, so that apply_if adds no branch
            return jnp.array(True)
    guards.computing(tree, axis_name)
    (finite,) = all_reduce_and(all_finite_here(tree), axis_name=axis_name)
    guards.computed(finite, tree)
    return finite


def all_finite_here(tree: PyTree) -> jax.Array:
    """Tests whether a tree is finite on this device."""
    return _all_leaves_finite(list(filter(is_inexact, jax.tree.leaves(tree))))


@jax.jit
def _all_leaves_finite(leaves: list[ArrayLike]) -> jax.Array:
    if not leaves:
        return jnp.array(True)
    arrays = [as_array(x) for x in leaves]
    return jax.lax.platform_dependent(arrays, cpu=_all_leaves_finite_cpu, default=_all_leaves_finite_default)


def _all_leaves_finite_default(leaves: list[jax.Array]) -> jax.Array:
    """Counts the non-finite values: a sum of zeros and ones is zero if and only if all of them are.

    XLA partitions plain sums over devices and, on TPU, fuses them with the sums of a global norm; it does neither with
    `all(isfinite(x))`. The zeros are negative because XLA on GPUs would merge positive ones with the zeros that an
    embedding's gradient starts from, and write them to memory.
    """
    return stack([_count_nonfinite(x) for x in leaves]).sum() == 0


# Inlined, a jitted function adds the equations of its body: leaves of equal type share one trace.
@functools.partial(jax.jit, inline=True)
def _count_nonfinite(x: jax.Array) -> jax.Array:
    if is_on_host(x):  # where JAX cannot select one of two constants
        return (~jnp.isfinite(x)).astype(np.float32).sum()
    zero, one = np.float32(-0.0), np.float32(1)
    return jnp.where(jnp.isfinite(x), zero, one).sum()


def _all_leaves_finite_cpu(leaves: list[jax.Array]) -> jax.Array:
    """Combines the flags of all leaves so that thousands of leaves compile quickly.

    XLA on CPU fuses a long `and` of scalars into each of its consumers, which takes more than linear time. Groups of 8,
    and a result that is read at the argmin, prevent this fusion.
    """
    flags = [_is_finite_cpu(x) for x in leaves]
    groups = stack([stack(flags[i : i + 8]).all() for i in range(0, len(flags), 8)])
    return groups[jnp.argmin(groups)]


@functools.partial(jax.jit, inline=True)
def _is_finite_cpu(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _is_finite_cpu(x.real) & _is_finite_cpu(x.imag)
    size: object = x.size  # not an int if a shape is symbolic
    if not (isinstance(size, int) and size >= _MIN_SIZE_FOR_VARIADIC_REDUCE and use_variadic_reduce()):
        return jnp.isfinite(x).all()
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x  # some float8 types have no infinity
    flags = (x < np.inf).astype(np.int32), (x > -np.inf).astype(np.int32)  # NaN is neither
    ones, axes = (np.ones((), np.int32),) * 2, tuple(range(x.ndim))
    below, above = jax.lax.reduce(flags, ones, lambda a, b: (a[0] & b[0], a[1] & b[1]), axes)
    return (below & above).astype(bool)


def zero_nonfinite(tree: PyTree) -> PyTree:
    """Replaces non-finite values with -0.0, which XLA does not merge with other zeros."""
    return jax.tree.map(lambda x: zero_where_nonfinite(x) if is_inexact(x) else x, tree)


@functools.partial(jax.jit, inline=True)
def zero_where_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, beside(x, -0.0))
