"""The scaler of a tree: `get_scaler` and `find_scaler` return it unwrapped, and `replace_scaler` replaces it."""

import jax
import jax.numpy as jnp

from jmpscale._base.tree import PyTree, Tree, find_instances
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
      tree: a pytree that contains exactly one `ScalerState`, or one batch of them.
      scaler: the new scaler; it is copied. Its settings apply from now on. Different settings trigger a recompilation.
        In a batch of scalers, such as the members of an ensemble under `jax.vmap`, one new scaler replaces each; a new
        batch of the same shape replaces the old one.

    Returns:
      The tree with the new scaler, whose arrays are wrapped like the arrays of the old scaler.

    Raises:
      TypeError: `scaler` is not a `ScalerState`.
      ValueError: the tree contains no scaler, or more than one; or `scaler` is a batch of another shape.

    >>> import jmpscale
    >>> float(jmpscale.replace_scaler((jmpscale.dynamic(), 1), jmpscale.dynamic(8.0))[0].loss_scale)
    8.0
    """
    if isinstance(tree, ScalerState) and not isinstance(scaler, ScalerState) and find_instances(scaler, ScalerState):
        raise TypeError("the arguments are replace_scaler(tree, scaler), got them in the opposite order.")
    old = only_scaler(tree, "tree", _WHERE_A_SCALER_IS)
    shape = _shape_of_batch(old)
    check_scaler(scaler, allow_batch=bool(shape) and _shape_of_batch(scaler) == shape)
    register_with_flax()
    # The arrays are copied, so that donating the tree does not delete the caller's scaler.
    arrays = [jnp.broadcast_to(jnp.array(x), shape) for x in scaler[:-1]]
    new = jax.tree.unflatten(jax.tree.structure(old), arrays)._replace(config=scaler.config)
    return jax.tree.map(lambda x: new if is_scaler(x) else x, tree, is_leaf=is_scaler)


def _shape_of_batch(scaler: PyTree) -> tuple[int, ...]:
    """Returns the shape of a batch of scalers; `()` for one scaler."""
    return next((getattr(x, "shape", ()) for x in jax.tree.leaves(scaler)), ())
