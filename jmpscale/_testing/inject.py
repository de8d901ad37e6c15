"""Injects faults into the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpscale._base.axes import map_like
from jmpscale._base.check import check_flag
from jmpscale._base.compat import varying_axes
from jmpscale._base.text import describe
from jmpscale._base.tree import Tree, check_no_nnx_objects, is_inexact, named_leaves


def inject_backward(tree: Tree, value: ArrayLike, *, path: str = "", when: ArrayLike = True) -> Tree:
    """Returns a tree unchanged, and in the backward pass sets the first element of one leaf's cotangent to a value.

    Call it in the loss function, on parameters or activations. The fault then passes through the rest of the backward
    pass, the unscaling and the check, as a real overflow does. A ReLU or a maximum before this point may remove the
    fault, because its derivative is zero where it is not active.

    Args:
      tree: pytree of parameters or activations that the loss depends on.
      value: a scalar such as `jnp.inf` or `jnp.nan`, converted to the leaf's dtype.
      path: the leaf, in the notation of `jax.tree_util.keystr`: `"['dense']['kernel']"` in dictionaries,
        `".layers[0].weight"` in an Equinox model, and `""` if the tree is a single array.
      when: bool[], whether to inject the fault. For a fault in one step, compare a count that advances on skipped
        steps as well, such as the index of the loop: with a gated count every later step would be skipped, too. For a
        fault on one device, compare `jax.lax.axis_index`; devices that hold the same leaf all receive the fault,
        because the cotangent is a sum over them.

    Returns:
      The tree, bit for bit. In reverse mode, the first element of the leaf's cotangent is `value` if `when` is true.

    Raises:
      TypeError: `when` is not a boolean, or the tree contains a Flax NNX object.
      ValueError: there is no floating-point or complex leaf at `path`, or `value` or `when` is not a scalar.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jmpscale import testing
    >>> jax.grad(lambda w: jnp.sum(testing.inject_backward(w, jnp.inf) ** 2))(jnp.ones(3))
    Array([inf,  2.,  2.], dtype=float32)
    """
    check_no_nnx_objects(
        tree, "tree", "Inject into the result of the model: inject_backward(model(x), jnp.inf, when=...)."
    )
    paths = [name for name, leaf in named_leaves(tree) if is_inexact(leaf) and jnp.size(leaf)]
    if not (isinstance(path, str) and path in paths):
        raise ValueError(
            f"path must lead to a floating-point leaf with elements, got {describe(path)}. The paths of this tree "
            f"are {paths[:20]}."
        )
    if getattr(value, "shape", ()) or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.number):
        raise ValueError(f"value must be a scalar such as jnp.inf, got {describe(value)}. Inject one value at a time.")
    flag = check_flag(when, "when")

    changed = [_fault_in_cotangent(leaf, value, flag) if name == path else leaf for name, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), changed)


def _set_first(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    first = (jnp.arange(jnp.size(leaf)) == 0).reshape(jnp.shape(leaf))
    return jnp.where(first & flag, jnp.asarray(value, jnp.result_type(leaf)), leaf)


def _fault_in_cotangent(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    # The cotangent of a value that devices share is a sum over them: a fault on one device is a fault on all.
    if axes := varying_axes(flag) - varying_axes(leaf):
        flag = jax.lax.pmax(flag.astype(np.int32), tuple(sorted(axes))).astype(bool)
    identity: Any = jax.custom_vjp(lambda leaf, value, flag: map_like(leaf, flag))
    identity.defvjp(
        lambda leaf, value, flag: (map_like(leaf, flag), (value, flag)),
        lambda fault, cotangent: (_set_first(cotangent, *fault), None, None),
    )
    return identity(leaf, value, flag)
