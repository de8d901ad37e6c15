"""What is in a tree: which leaves are arrays, what they are called, and where the scaler is.

Leaves that are no arrays go around everything that this package does.
"""

import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._state import ScalerConfig, ScalerState, shown

Tree = TypeVar("Tree")

_OVERWRITING = "_overwrite_with_gradient"  # flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT
_ARRAYS = tuple(name for name in ScalerState._fields if name != "config")


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf is an array of JAX, or one of NumPy that JAX takes; a Python number is none."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        dtype: Any = typing.cast(Any, leaf).dtype
        return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return isinstance(leaf, jax.Array)


def is_inexact(leaf: Any) -> bool:
    """Tells whether a leaf holds floating-point or complex numbers: those that can be scaled, and can overflow."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact))


def partition(
    tree: Any, chosen: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the chosen leaves of a tree, and a function that builds the tree with others in their place."""
    leaves, treedef = typing.cast(tuple[list[Any], Any], jax.tree.flatten(tree, is_leaf))
    return _divide(leaves, treedef, list(map(chosen, leaves)))


def partition_gradients(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Like `partition`, by what can be scaled; without what Flax's fp8 layers return in the place of gradients."""
    entries, treedef = typing.cast(tuple[list[tuple[Any, Any]], Any], jax.tree_util.tree_flatten_with_path(tree))
    chosen = [
        is_inexact(leaf) and _OVERWRITING not in (getattr(key, "key", None) for key in path) for path, leaf in entries
    ]
    return _divide([leaf for _, leaf in entries], treedef, chosen)


def _divide(leaves: list[Any], treedef: Any, chosen: list[bool]) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    def rebuild(replacements: Iterable[Any]) -> Any:
        source = iter(replacements)
        return jax.tree.unflatten(
            treedef, [next(source) if mine else x for x, mine in zip(leaves, chosen, strict=True)]
        )

    return [x for x, mine in zip(leaves, chosen, strict=True) if mine], rebuild


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields each leaf after its path, written as Python code: `['w'][0]`."""
    leaves = typing.cast(list[tuple[Any, Any]], jax.tree_util.tree_leaves_with_path(tree))
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)


def cast(tree: Tree, dtype: Any) -> Tree:
    """Converts the floating-point arrays of a tree to another dtype: parameters or a batch to float16, say.

    Args:
      tree: any pytree, models included. Integers, booleans, complex numbers, PRNG keys, Python numbers and whatever
        else is no floating-point array stay as they are.
      dtype: a floating-point dtype.

    Returns:
      The tree, with the same shapes and shardings. Gradients with respect to what was cast are in its own dtype.

    Raises:
      TypeError: `dtype` is not a floating-point dtype.

    >>> cast({"w": jnp.ones(2), "step": 3, "ids": jnp.arange(2)}, jnp.float16)
    {'ids': Array([0, 1], dtype=int32), 'step': 3, 'w': Array([1., 1.], dtype=float16)}
    """
    if not jnp.issubdtype(dtype, np.floating):
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype}. Pass jnp.float16 or another.")
    floats, rebuild = partition(tree, lambda leaf: is_array(leaf) and jnp.issubdtype(leaf.dtype, np.floating))
    return typing.cast(Tree, rebuild(jnp.asarray(x, dtype) for x in floats))


def get_scaler(tree: Any) -> ScalerState:
    """Finds the scaler in an optimizer state, a train state, or any other pytree.

    Args:
      tree: a pytree that contains exactly one `ScalerState`. Arrays may be wrapped, as Flax NNX does.

    Returns:
      The `ScalerState`, holding plain arrays.

    Raises:
      ValueError: the tree contains none, or several, or one whose arrays were taken out of it.

    >>> from jmpscale import dynamic
    >>> float(get_scaler({"model": 1.0, "scaler": dynamic(8.0)}).loss_scale)
    8.0
    """
    scaler = _only_scaler(tree)
    arrays = {name: jax.tree.leaves(getattr(scaler, name)) for name in _ARRAYS}
    if empty := [name for name, leaves in arrays.items() if not leaves]:
        raise ValueError(
            f"tree must contain a ScalerState with its arrays, got one without {empty[0]}. A filter has taken them "
            "out; pass the whole tree."
        )
    return scaler._replace(**{name: leaves[0] for name, leaves in arrays.items()})


def replace_scaler(tree: Tree, scaler: ScalerState) -> Tree:
    """Puts a scaler in the place of the one that a pytree contains: to set the scale by hand, or to reset it.

    Args:
      tree: a pytree that contains exactly one `ScalerState`.
      scaler: the new one; its settings count from now on, and cost one compilation if they differ.

    Returns:
      The tree with the scaler replaced, wrapped as the old one was.

    Raises:
      TypeError: `scaler` is no `ScalerState`.
      ValueError: the tree contains none, or several.

    >>> from jmpscale import dynamic
    >>> replace_scaler((dynamic(), 1), dynamic(8.0))[0].loss_scale
    Array(8., dtype=float32)
    """
    require_one_scaler(scaler, "scaler")
    old = _only_scaler(tree)

    def wrap(was: Any, now: Any) -> Any:
        return jax.tree.unflatten(typing.cast(Any, jax.tree.structure(was)), [now])

    new = scaler._replace(**{name: wrap(getattr(old, name), getattr(scaler, name)) for name in _ARRAYS})
    _, rebuild = partition(tree, _is_scaler, is_leaf=_is_scaler)
    return rebuild([new])


def _is_scaler(x: Any) -> bool:
    return isinstance(x, ScalerState)


def _only_scaler(tree: Any) -> ScalerState:
    found, _ = partition(tree, _is_scaler, is_leaf=_is_scaler)
    if len(found) != 1:
        raise ValueError(
            f"tree must contain exactly one ScalerState, found {len(found)} in a {type(tree).__name__}. "
            "Pass the optimizer state that tx.init of with_loss_scaling made, or the part of it that is meant."
        )
    return found[0]


def require_one_scaler(state: Any, name: str = "state") -> None:
    """Raises unless `state` is a single scaler: a batch would broadcast along the wrong axis in silence."""
    require_scaler(state, name)
    if shape := getattr(state.loss_scale, "shape", ()):
        raise ValueError(
            f"{name} must hold one scaler, got a batch with loss_scale of shape {shape}. Call this under jax.vmap."
        )
    for field in _ARRAYS:
        kind, value = np.floating if field == "loss_scale" else np.integer, getattr(state, field)
        dtype: Any = getattr(value, "dtype", typing.cast(Any, type)(value))
        if getattr(value, "shape", ()) or not jnp.issubdtype(dtype, kind):
            raise TypeError(
                f"{name}.{field} must be a scalar of a {kind.__name__} dtype, got {shown(value)}. Restore checkpoints "
                "into a state made by jmpscale.dynamic, static or disabled."
            )


def require_scaler(state: Any, name: str = "state") -> None:
    """Raises unless `state` is a scaler, or a batch of them."""
    if not isinstance(state, ScalerState):
        raise TypeError(
            f"{name} must be a ScalerState, got {type(state).__name__}. Pass what jmpscale.dynamic, static or disabled "
            "made; jmpscale.get_scaler finds it in an optimizer state."
        )
    if not isinstance(typing.cast(object, state.config), ScalerConfig):
        raise TypeError(
            f"{name}.config must be a ScalerConfig, got {type(state.config).__name__}. Settings are no part of a "
            "checkpoint: restore into a state made by jmpscale.dynamic, static or disabled."
        )
