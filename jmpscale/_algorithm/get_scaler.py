"""The scaler of a tree: finding it, unwrapping it, replacing it."""

import jax
import jax.numpy as jnp

from jmpscale._base.tree import PyTree, Tree, find_instances
from jmpscale._guards import scaler as guards
from jmpscale._state import ScalerState, is_scaler, register_with_flax


def get_scaler(tree: PyTree) -> ScalerState:
    """Returns the scaler that an optimizer state, a train state or any other pytree contains.

    Args:
      tree: a pytree that contains exactly one `ScalerState`. Its arrays may be wrapped, as by Flax NNX.

    Returns:
      The `ScalerState`, with its arrays unwrapped.

    Raises:
      ValueError: the tree contains no scaler, more than one, or one whose arrays were removed or donated.

    >>> import jmpscale
    >>> float(jmpscale.get_scaler({"model": 1.0, "scaler": jmpscale.dynamic(8.0)}).loss_scale)
    8.0
    """
    return find_scaler(tree, "tree", allow_batch=True)


def find_scaler(tree: PyTree, name: str = "scaler", *, allow_batch: bool = False, remedy: str = "") -> ScalerState:
    """Returns the only scaler in a tree, unwrapped; errors call the tree `name`, and may have a remedy of their own."""
    guards.find_called(tree, name, remedy)
    register_with_flax()
    [wrapped] = find_instances(tree, ScalerState)
    scaler = ScalerState._make([*jax.tree.leaves(wrapped), wrapped.config])  # Flax NNX puts arrays into containers
    guards.found(scaler, name, allow_batch)
    return scaler


def replace_scaler(tree: Tree, scaler: ScalerState) -> Tree:
    """Returns a copy of a pytree with its scaler replaced.

    Args:
      tree: a pytree that contains exactly one `ScalerState`.
      scaler: the new scaler; it is copied. Its settings apply from now on. Different settings trigger a recompilation.

    Returns:
      The tree with the new scaler, whose arrays are wrapped like the arrays of the old scaler.

    Raises:
      TypeError: `scaler` is not a `ScalerState`.
      ValueError: the tree contains no scaler, or more than one.

    >>> import jmpscale
    >>> float(jmpscale.replace_scaler((jmpscale.dynamic(), 1), jmpscale.dynamic(8.0))[0].loss_scale)
    8.0
    """
    guards.replace_called(tree, scaler)
    register_with_flax()
    [old] = find_instances(tree, ScalerState)
    # The arrays are copied, so that donating the tree does not delete the caller's scaler.
    new = jax.tree.unflatten(jax.tree.structure(old), map(jnp.array, scaler[:-1]))._replace(config=scaler.config)
    return jax.tree.map(lambda x: new if is_scaler(x) else x, tree, is_leaf=is_scaler)
