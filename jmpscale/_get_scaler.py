"""The scaler of a tree: `get_scaler` and `find_scaler` return it unwrapped, and `replace_scaler` replaces it."""

import jax
import jax.numpy as jnp

from jmpscale._base.tree import PyTree, Tree
from jmpscale._guards.checks import check_scaler, only_scaler
from jmpscale._state import ARRAY_FIELDS, ScalerState, is_scaler, register_with_flax

_WHERE_A_SCALER_IS = (
    "Pass a scaler, the optimizer state of with_loss_scaling, such as optimizer.opt_state in Flax NNX, or the part of "
    "a tree that contains the scaler. In most functions it is the first argument."
)


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


def find_scaler(tree: PyTree, name: str = "scaler", *, allow_batch: bool = False) -> ScalerState:
    """Returns the only scaler in a tree, unwrapped; errors call the tree `name`."""
    wrapped = only_scaler(tree, name, _WHERE_A_SCALER_IS)
    register_with_flax()
    arrays = jax.tree.leaves(wrapped[:-1])  # Flax NNX puts them into containers
    if len(arrays) != len(ARRAY_FIELDS):
        raise ValueError(
            f"{name} must contain a ScalerState with all arrays, got {len(arrays)}. Pass the unfiltered tree."
        )
    scaler = ScalerState._make([*arrays, wrapped.config])
    check_scaler(scaler, name, allow_batch=allow_batch)
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
    if isinstance(tree, ScalerState) and not isinstance(scaler, ScalerState):
        raise TypeError("the arguments are replace_scaler(tree, scaler), got them in the opposite order.")
    check_scaler(scaler)
    old = only_scaler(tree, "tree", _WHERE_A_SCALER_IS)
    register_with_flax()
    # The arrays are copied, so that donating the tree does not delete the caller's scaler.
    new = jax.tree.unflatten(jax.tree.structure(old), map(jnp.array, scaler[:-1]))._replace(config=scaler.config)
    return jax.tree.map(lambda x: new if is_scaler(x) else x, tree, is_leaf=is_scaler)
