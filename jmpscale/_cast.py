"""Conversion of the arrays of a tree to another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmpscale._base.arguments import as_dtype
from jmpscale._base.frameworks import averages_of_gradients
from jmpscale._base.text import describe
from jmpscale._base.tree import Tree, check_no_nnx_objects, check_no_refs, is_array
from jmpscale._base.warn import warn_user
from jmpscale._state import is_scaler


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Converts the floating-point arrays of a tree, such as parameters or a batch, to another dtype.

    Args:
      tree: any pytree, Equinox models included. Leaves that are not floating-point arrays (integers, booleans, complex
        numbers, PRNG keys, Python numbers, other objects) are unchanged, and so are scalers.
      dtype: a floating-point dtype.

    Returns:
      The tree with the same structure, shapes and shardings. The gradient with respect to a converted array has the
      dtype of the original.

    Raises:
      TypeError: `dtype` is not a floating-point dtype, or the tree contains a `jax.Ref` or a Flax NNX object.

    Warns:
      UserWarning: averages of gradients, in the state of an optimizer, are converted to float16.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.cast({"w": jnp.ones(2), "step": 3, "ids": jnp.arange(2)}, jnp.float16)
    {'ids': Array([0, 1], dtype=int32), 'step': 3, 'w': Array([1., 1.], dtype=float16)}
    """
    known = as_dtype(dtype)
    if known is None or not jnp.issubdtype(known, np.floating):
        raise TypeError(f"dtype must be a floating-point dtype, got {describe(dtype)}. Call cast(params, jnp.float16).")
    check_no_refs(tree)
    remedy = "Wrap the loss function in autocast, pass dtype=jnp.float16 to the layers, or cast nnx.state(model)."
    check_no_nnx_objects(tree, "tree", remedy)
    if known == np.float16 and averages_of_gradients(tree):
        warn_user("the tree contains averages of gradients, which underflow in float16. Cast the parameters alone.")

    def convert(x: object) -> object:
        return jnp.asarray(x, dtype) if is_array(x) and jnp.issubdtype(x.dtype, np.floating) else x

    return jax.tree.map(convert, tree, is_leaf=is_scaler)
