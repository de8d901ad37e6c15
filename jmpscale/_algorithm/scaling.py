"""Scaling the loss, and unscaling and checking the gradients, in dtypes that hold the results."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._algorithm.finite import all_finite
from jmpscale._base.axes import AxisName
from jmpscale._base.compat import unreduced_axes
from jmpscale._base.multiply import multiply_leaf, real_dtype
from jmpscale._base.options import requires_names
from jmpscale._base.tree import PyTree, Tree, flatten_gradients, is_real_scalar
from jmpscale._base.types import unscaled_dtype
from jmpscale._get_scaler import find_scaler
from jmpscale._guards import scaling as guards
from jmpscale._state import ScalerState, scale_of


def scale(scaler: PyTree, tree: Tree) -> Tree:
    """Multiplies a loss, or a pytree of losses, by the loss scale.

    Args:
      scaler: the scaler, or any pytree that contains exactly one. Unscale the gradients with the same scaler.
      tree: pytree of floating-point arrays of any shape.

    Returns:
      The scaled tree; leaves narrower than float32 become float32, because the default scale is infinite in float16.
      The backward pass of a scalar that is not finite starts from NaN, so its gradients are NaN, except where a
      comparison, as in a ReLU or `jnp.where`, selects a derivative of zero: check the loss as well. With `disabled()`,
      the tree itself.

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
    """Multiplies losses by the loss scale; `with_check`, derivatives of a scalar that is not finite start from NaN."""
    guards.scale_called(state, tree)
    if state.config.mode == "disabled":
        return tree
    scaled = jmpscale_scale(scale_of(state), tree, with_check)
    guards.scaled(state, tree, scaled)
    return scaled


@functools.partial(jax.jit, static_argnames="with_check")
def jmpscale_scale(loss_scale: jax.Array, tree: PyTree, with_check: bool) -> PyTree:
    """Multiplies losses. The tools find it in a program by its name, which no function of a user has."""

    def scale_leaf(x: ArrayLike) -> jax.Array:
        loss = jnp.asarray(x, real_dtype(x))
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
      UserWarning: a gradient is already a result of `unscale`, `value_and_grad` or `scaled_backward`; or the scaler is
        from after `update`, and the scaler from before it has scaled the loss.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.unscale(jmpscale.dynamic(2.0**16), {"w": jnp.float16(2.0), "step": 3})
    {'step': 3, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_scaler(scaler)
    guards.unscale_called(state, tree)
    return unscale_gradients(state, tree)


def unscale_gradients(
    state: ScalerState, tree: Tree, loss: ArrayLike | None = None, others: Sequence[str] = ()
) -> Tree:
    """Divides gradients by the loss scale; all are NaN if the loss, if it is given, is not finite.

    `others` are the paths of leaves that are not gradients. Unlike `unscale`, it accepts the gradients of a
    `scaled_backward` function.
    """
    guards.unscaling(state, tree)
    if state.config.mode == "disabled":
        return tree
    # Only gradients pass through jit, which converts float0 to bool and raises for Python objects.
    grads, unflatten = flatten_gradients(tree, others)
    unscaled = jmpscale_unscale(grads, state.loss_scale, loss)
    guards.unscaled(unscaled, state.loss_scale)
    return unflatten(unscaled)


@jax.jit
def jmpscale_unscale(grads: Tree, loss_scale: jax.Array, loss: ArrayLike | None = None) -> Tree:
    """Divides the arrays of a tree by the loss scale; `unscaled_dtype` gives the dtypes of the results."""
    one = jnp.ones(()) if loss is None else one_if_finite(jnp.asarray(loss))
    loss_scale = jnp.asarray(loss_scale)
    dtypes = set(map(real_dtype, jax.tree.leaves(grads)))
    inverse = {dtype: one.astype(dtype) / loss_scale.astype(dtype) for dtype in dtypes}
    return jax.tree.map(lambda x: multiply_leaf(x, inverse[real_dtype(x)], unscaled_dtype(jnp.result_type(x))), grads)


@requires_names
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
