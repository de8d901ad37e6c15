"""Scaling the loss, and unscaling and checking the gradients, in dtypes that hold the results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmpscale._base.axes import AxisName, check_no_partial_sums
from jmpscale._base.check import warn_user
from jmpscale._base.compat import unreduced_axes
from jmpscale._base.marks import Mark, has_mark, mark, was_used
from jmpscale._base.text import describe
from jmpscale._base.tree import (
    PyTree,
    Tree,
    check_no_refs,
    first_leaf,
    flatten_gradients,
    is_inexact,
    is_real,
    is_real_scalar,
    is_traced,
)
from jmpscale._finite import all_finite
from jmpscale._scaler_of_tree import find_scaler
from jmpscale._state import ScalerState


def scale(scaler: PyTree, tree: Tree) -> Tree:
    """Multiplies a loss, or a pytree of losses, by the loss scale.

    Args:
      scaler: the scaler, or any pytree that contains exactly one. Unscale the gradients with the same scaler.
      tree: pytree of floating-point arrays of any shape.

    Returns:
      The scaled tree; leaves narrower than float32 become float32, because the default scale is infinite in float16.
      The derivatives of a scalar that is not finite are NaN, so that no comparison in the backward pass hides it. With
      `disabled()`, the tree itself.

    Raises:
      TypeError: a leaf does not have a floating-point dtype.
      ValueError: `scaler` does not contain exactly one scaler.

    Warns:
      UserWarning: a traced leaf has a dtype that cannot hold large scales, such as float16.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.scale(jmpscale.dynamic(2.0**16), jnp.float16(3.0))
    Array(196608., dtype=float32)
    """
    return scale_losses(find_scaler(scaler), tree, with_check=True)


def scale_losses(state: ScalerState, tree: Tree, *, with_check: bool) -> Tree:
    """Multiplies losses by the loss scale; `with_check`, the derivatives of a scalar that is not finite are NaN."""
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    if found := first_leaf(tree, lambda leaf: not is_real(leaf)):
        path, leaf = found
        raise TypeError(f"scale takes floating-point losses, got {describe(leaf)} at tree{path}. Pass only the losses.")
    if found := first_leaf(tree, lambda leaf: is_traced(leaf) and needs_wider_gradient(leaf)):
        warn_about_narrow_loss(found[1])
    scaled = _scale_leaves(state.loss_scale, tree, with_check)
    mark(Mark.SCALED, scaled)
    return scaled


def warn_about_narrow_loss(loss: jax.Array) -> None:
    """Warns about a loss whose dtype cannot hold large scales."""
    warn_user(
        f"the loss is {loss.dtype}, so the backward pass starts from the loss scale in {loss.dtype}, where large "
        "scales are infinite. Return it in float32: convert the model's output with .astype(jnp.float32)."
    )


@functools.partial(jax.jit, static_argnames="with_check")
def _scale_leaves(loss_scale: jax.Array, tree: PyTree, with_check: bool) -> PyTree:
    def scale_leaf(x: ArrayLike) -> jax.Array:
        loss = jnp.asarray(x, _real_dtype(x))
        loss = _with_derivative_of_loss(loss) if with_check and is_whole_loss(loss) else loss
        return multiply_leaf(loss, loss_scale)

    return jax.tree.map(scale_leaf, tree)


@jax.custom_jvp
def _with_derivative_of_loss(loss: jax.Array) -> jax.Array:
    """Returns a scalar loss, whose derivatives are NaN if it is not finite; see `one_if_finite`."""
    return loss


@_with_derivative_of_loss.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (loss,), (tangent,) = primals, tangents
    return _with_derivative_of_loss(loss), tangent * one_if_finite(loss)


def is_whole_loss(x: jax.Array) -> bool:
    """Tests whether an array is a loss whose gradients must not be finite if it is not.

    In a larger array, such as one of masked losses, elements that are not finite may be unused. A partial sum can only
    be checked after its reduction.
    """
    return is_real_scalar(x) and not unreduced_axes(x)


def one_if_finite(loss: jax.Array) -> jax.Array:
    """Returns 1 for a finite loss, otherwise NaN: a factor of the gradients, which is not differentiated.

    Without it, a comparison with NaN, as in a ReLU or a maximum, selects the branch whose derivative is zero, so that
    the gradients of a loss that is not finite would be finite and wrong.
    """
    return 0 * jax.lax.stop_gradient(loss) + 1


def unscale(scaler: PyTree, tree: Tree) -> Tree:
    """Divides gradients by the loss scale.

    It multiplies by the reciprocal of the scale, which is exact for powers of two; with another scale the result may
    differ from the quotient in the last bit.

    Args:
      scaler: the scaler that scaled the loss, before its update, or any pytree that contains exactly one.
      tree: pytree of gradients. Leaves that are not floating-point or complex are unchanged, and so are the new scales
        and histories that Flax's fp8 layers return in place of gradients.

    Returns:
      The unscaled gradients; float16 and float8 become float32. With `disabled()`, the tree itself.

    Raises:
      TypeError: a leaf is a partial sum or a `jax.Ref`.
      ValueError: `scaler` does not contain exactly one scaler.

    Warns:
      UserWarning: a gradient is already a result of `unscale`, `value_and_grad` or `loss_scaled`.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.unscale(jmpscale.dynamic(2.0**16), {"w": jnp.float16(2.0), "step": 3})
    {'step': 3, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_scaler(scaler)
    if state.config.mode != "disabled" and (has_mark(Mark.GRADIENT, tree) or has_mark(Mark.LOSS, tree)):
        warn_user("the gradients are unscaled twice: value_and_grad and loss_scaled unscale them. Remove this call.")
    return unscale_gradients(state, tree)


def unscale_gradients(state: ScalerState, tree: Tree, loss: ArrayLike | None = None) -> Tree:
    """Divides gradients by the loss scale; all are NaN if the loss, if it is given, is not finite.

    Unlike `unscale`, it accepts the gradients of a `loss_scaled` function.
    """
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    check_no_partial_sums(tree)
    # Only gradients pass through jit, which converts float0 to bool and raises for Python objects.
    grads, unflatten = flatten_gradients(tree)
    unscaled = unscale_leaves(grads, state.loss_scale, loss)
    mark(Mark.GRADIENT, unscaled, state.loss_scale)
    return unflatten(unscaled)


@jax.jit
def unscale_leaves(grads: Tree, loss_scale: jax.Array, loss: ArrayLike | None = None) -> Tree:
    """Divides the arrays of a tree by the loss scale; `unscaled_dtype` gives the dtypes of the results."""
    one = jnp.ones(()) if loss is None else one_if_finite(jnp.asarray(loss))
    loss_scale = jnp.asarray(loss_scale)
    dtypes = set(map(_real_dtype, jax.tree.leaves(grads)))
    inverse = {dtype: one.astype(dtype) / loss_scale.astype(dtype) for dtype in dtypes}
    return jax.tree.map(lambda x: multiply_leaf(x, inverse[_real_dtype(x)], unscaled_dtype(jnp.result_type(x))), grads)


def multiply_leaf(x: ArrayLike, factor: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Multiplies an array by a real number in at least float32; rounds once, to `dtype`, by default the array's."""
    factor = jnp.asarray(factor, _real_dtype(x))
    if axes := unreduced_axes(x):  # JAX multiplies partial sums only by values of a type that shows these axes
        factor = jax.sharding.reshard(factor, jax.P(reduced=axes))
    if jnp.iscomplexobj(x):  # part by part: inf * (factor + 0j) is NaN
        return jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    if jax.typeof(x).weak_type:
        return jax.lax.mul(x, jax.lax.full_like(x, factor))  # weakly typed as well
    return (jnp.asarray(x, factor.dtype) * factor).astype(jnp.result_type(x) if dtype is None else dtype)


def _real_dtype(x: ArrayLike) -> np.dtype:
    """Returns the real dtype in which a leaf is multiplied: at least float32."""
    return np.promote_types(jnp.finfo(jnp.result_type(x)).dtype, np.float32)


def unscaled_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of an unscaled gradient: float32 for float16 and float8, otherwise the dtype itself."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else np.promote_types(dtype, np.float32)


def needs_wider_gradient(x: object) -> bool:
    """Tests whether a leaf is float16 or float8, which cannot hold unscaled gradients."""
    return is_inexact(x) and unscaled_dtype(jnp.result_type(x)) != jnp.result_type(x)


def warn_if_nothing_is_scaled(scaler: ScalerState) -> None:
    """Warns about a step that adapts a dynamic scale, in a program that has not scaled a loss yet."""
    if scaler.config.mode == "dynamic" and not was_used(Mark.SCALED, Mark.GRADIENT):
        warn_user(
            "no loss has been scaled yet, so small gradients underflow in float16. Use jmpscale.value_and_grad, or "
            "wrap the loss function in jmpscale.loss_scaled. Without float16, use static(1.0)."
        )


def unscale_and_check(scaler: PyTree, grads: Tree, *, axis_name: AxisName = None) -> tuple[Tree, jax.Array]:
    """Divides gradients by the loss scale and tests whether all of them are finite, on all devices.

    Args:
      scaler: the scaler that scaled the loss, before its update, or any pytree that contains exactly one.
      grads: pytree of gradients, as in `unscale`.
      axis_name: the mapped axes over which to combine the result, as in `all_finite`.

    Returns:
      The unscaled gradients, and `finite`, bool[], for `apply_if` and `update`. With `disabled()`, `grads` and True.

    Raises:
      TypeError: a leaf is a partial sum or a `jax.Ref`.
      ValueError: `scaler` does not contain exactly one scaler, or an axis is not mapped here.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> grads, finite = jmpscale.unscale_and_check(jmpscale.dynamic(4.0), jnp.array([8.0, jnp.inf]))
    >>> grads, bool(finite)
    (Array([ 2., inf], dtype=float32), False)
    """
    grads = unscale(scaler, grads)
    return grads, all_finite(grads, scaler=scaler, axis_name=axis_name)
