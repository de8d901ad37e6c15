"""Classifies the leaves of a tree, and finds its scaler.

Leaves that are not arrays pass through every function of this package unchanged.
"""

import collections
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpscale._state import ARRAY_FIELDS, ScalerConfig, ScalerState, describe, register_with_flax

PyTree = Any
Tree = TypeVar("Tree")
Path = tuple[Any, ...]

_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"  # flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT
_REF = getattr(jax, "Ref", ())  # JAX before 0.8 has no public references


def is_traced(x: object) -> bool:
    """Tests whether a value is traced, so Python cannot read it."""
    return isinstance(x, jax.core.Tracer)


def is_compiling() -> bool:
    """Tests whether JAX is tracing a program to compile it, as in `jax.jit` and `jax.lax.scan`, not in `jax.vmap`."""
    return is_traced(jnp.zeros(()))


def is_array(leaf: object) -> bool:
    """Tests whether a leaf is a JAX array, or a NumPy array or scalar that JAX accepts; Python numbers are not."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_)
    return isinstance(leaf, jax.Array)


def is_inexact(leaf: Any) -> bool:
    """Tests whether a leaf holds floating-point or complex numbers."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact))


def is_gradient(path: Path, leaf: Any) -> bool:
    """Tests whether a leaf of a gradient tree is a gradient.

    Flax's fp8 layers return new values of their scales and histories in place of gradients, under a special name.
    """
    return is_inexact(leaf) and all(getattr(key, "key", None) != _OVERWRITE_WITH_GRADIENT for key in path)


def flatten_matching(
    tree: PyTree, matches: Callable[[Path, Any], bool], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the leaves for which `matches(path, leaf)` holds, and a function that replaces them in the tree."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    mask = [matches(path, leaf) for path, leaf in entries]
    matching = [leaf for (_, leaf), matched in zip(entries, mask, strict=True) if matched]
    # The matching leaves are not kept, because unflatten may outlive the trace that they belong to.
    others = [None if matched else leaf for (_, leaf), matched in zip(entries, mask, strict=True)]

    def unflatten(replacements: Iterable[Any]) -> Any:
        new = iter(replacements)
        leaves = [next(new) if matched else leaf for leaf, matched in zip(others, mask, strict=True)]
        return jax.tree.unflatten(treedef, leaves)

    return matching, unflatten


def find_instances(tree: PyTree, kind: type) -> list[Any]:
    """Returns the nodes of a tree that are instances of a class, outermost first; does not look inside them."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf with its path as Python code, such as `['w'][0]`."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def check_no_refs(tree: PyTree, name: str = "tree") -> None:
    """Raises if a leaf is a mutable array reference: its updates would be neither checked nor gated."""
    if any(isinstance(leaf, _REF) for leaf in jax.tree.leaves(tree)):
        path = next(path for path, leaf in named_leaves(tree) if isinstance(leaf, _REF))
        raise TypeError(
            f"{name} must hold values, got a jax.Ref at {name}{path}. Read it with ref[...], pass the value, and write "
            "the result back with ref[...] = value."
        )


def nnx_objects(tree: PyTree) -> list[Any]:
    """Returns the Flax NNX objects that a tree contains, which are changed in place."""
    nnx = sys.modules.get("flax.nnx")
    # While another thread is still importing Flax, the module exists without its classes.
    kind = getattr(nnx, "Pytree", getattr(nnx, "Object", None))
    return [] if kind is None else find_instances(tree, kind)


def check_no_nnx_objects(tree: PyTree, name: str, remedy: str) -> None:
    """Raises if a tree contains Flax NNX objects: a transformation would change only copies of them."""
    if found := nnx_objects(tree):
        raise TypeError(
            f"{name} must hold values, got a Flax NNX {type(found[0]).__name__}, which is changed in place: the change "
            f"would be lost. {remedy}"
        )


def cast(tree: Tree, dtype: Any) -> Tree:
    """Converts the floating-point arrays of a tree, such as parameters or a batch, to another dtype.

    Args:
      tree: any pytree, models included. Leaves that are not floating-point arrays (integers, booleans, complex
        numbers, PRNG keys, Python numbers, other objects) are unchanged, and so are scalers.
      dtype: a floating-point dtype.

    Returns:
      The tree with the same structure, shapes and shardings. The gradient with respect to a converted array has the
      dtype of the original.

    Raises:
      TypeError: `dtype` is not a floating-point dtype, or a leaf is a `jax.Ref`.

    >>> cast({"w": jnp.ones(2), "step": 3, "ids": jnp.arange(2)}, jnp.float16)
    {'ids': Array([0, 1], dtype=int32), 'step': 3, 'w': Array([1., 1.], dtype=float16)}
    """
    if dtype is None or not jnp.issubdtype(dtype, np.floating):
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype}. Pass a dtype such as jnp.float16.")
    check_no_refs(tree)

    def is_floating(_: Path, leaf: Any) -> bool:
        return is_array(leaf) and jnp.issubdtype(leaf.dtype, np.floating)

    leaves, unflatten = flatten_matching(tree, is_floating, is_leaf=_is_scaler)
    return unflatten(jnp.asarray(x, dtype) for x in leaves)


def get_scaler(tree: PyTree) -> ScalerState:
    """Returns the scaler that an optimizer state, a train state or any other pytree contains.

    Args:
      tree: a pytree that contains exactly one `ScalerState`. Its arrays may be wrapped, as by Flax NNX.

    Returns:
      The `ScalerState`, with its arrays unwrapped.

    Raises:
      ValueError: the tree contains no scaler, or more than one, or one whose arrays were removed.

    >>> from jmpscale import dynamic
    >>> float(get_scaler({"model": 1.0, "scaler": dynamic(8.0)}).loss_scale)
    8.0
    """
    return find_scaler(tree, "tree")


def find_scaler(tree: PyTree, name: str) -> ScalerState:
    """Returns the only scaler in a tree, unwrapped; errors call the tree `name`."""
    return _unwrap_arrays(_only_scaler(tree, name), name)


def _unwrap_arrays(scaler: ScalerState, name: str) -> ScalerState:
    """Returns a scaler with its arrays taken out of the containers that Flax NNX puts around them."""
    arrays = {name: jax.tree.leaves(getattr(scaler, name)) for name in ARRAY_FIELDS}
    if empty := [field for field, leaves in arrays.items() if not leaves]:
        raise ValueError(
            f"{name} must contain a ScalerState with its arrays, got one without {empty[0]}. A filter has removed it; "
            "pass the unfiltered tree."
        )
    return scaler._replace(**{field: leaves[0] for field, leaves in arrays.items()})


def replace_scaler(tree: Tree, scaler: ScalerState) -> Tree:
    """Returns a copy of a pytree with its scaler replaced.

    Args:
      tree: a pytree that contains exactly one `ScalerState`.
      scaler: the new scaler; it is copied. Its settings apply from now on. Different settings cost one compilation.

    Returns:
      The tree with the new scaler, whose arrays are wrapped like the arrays of the old scaler.

    Raises:
      TypeError: `scaler` is not a `ScalerState`.
      ValueError: the tree contains no scaler, or more than one.

    >>> from jmpscale import dynamic
    >>> float(replace_scaler((dynamic(), 1), dynamic(8.0))[0].loss_scale)
    8.0
    """
    check_one_scaler(scaler, "scaler")
    old = _only_scaler(tree, "tree")

    def wrap(name: str) -> Any:
        # The arrays are copied, so that donating the tree does not delete the caller's scaler.
        return jax.tree.unflatten(jax.tree.structure(getattr(old, name)), [jnp.array(getattr(scaler, name))])

    new = scaler._replace(**{name: wrap(name) for name in ARRAY_FIELDS})
    _, unflatten = flatten_matching(tree, lambda _, leaf: _is_scaler(leaf), is_leaf=_is_scaler)
    return unflatten([new])


def _is_scaler(x: object) -> bool:
    return isinstance(x, ScalerState)


def _only_scaler(tree: PyTree, name: str) -> ScalerState:
    register_with_flax()
    found = find_instances(tree, ScalerState)
    if len(found) != 1:
        raise ValueError(
            f"{name} must contain exactly one ScalerState, found {len(found)} in a {type(tree).__name__}. Pass a "
            "scaler, the optimizer state of with_loss_scaling, or the part of a tree that contains the scaler."
        )
    return found[0]


def check_one_scaler(state: Any, name: str = "state") -> None:
    """Raises unless `state` is a single scaler: a batch would broadcast against the wrong axis."""
    check_scaler(state, name)
    if shape := getattr(state.loss_scale, "shape", ()):
        raise ValueError(
            f"{name} must hold one scaler, got a batch with loss_scale of shape {shape}. Call this under jax.vmap."
        )
    for field in ARRAY_FIELDS:
        kind = np.floating if field == "loss_scale" else np.integer
        value = getattr(state, field)
        dtype = getattr(value, "dtype", type(value))
        # Counters of 8 or 16 bits would wrap around.
        narrow = is_array(value) and value.dtype.itemsize < 4
        if getattr(value, "shape", ()) or not jnp.issubdtype(dtype, kind) or narrow:
            raise TypeError(
                f"{name}.{field} must be a scalar of {kind.__name__} dtype with at least 32 bits, got "
                f"{describe(value)}. Restore checkpoints into a state created by jmpscale.dynamic, static or disabled."
            )


def check_scaler(state: Any, name: str = "state") -> None:
    """Raises unless `state` is a scaler, or a batch of scalers."""
    if not isinstance(state, ScalerState):
        raise TypeError(
            f"{name} must be a ScalerState, got {type(state).__name__}. Create one with jmpscale.dynamic, static or "
            "disabled; jmpscale.get_scaler finds it in an optimizer state."
        )
    if not isinstance(state.config, ScalerConfig):
        raise TypeError(
            f"{name}.config must be a ScalerConfig, got {type(state.config).__name__}. Settings are not part of a "
            "checkpoint: restore into a state created by jmpscale.dynamic, static or disabled."
        )
    register_with_flax()


def path_names(paths: Sequence[Path]) -> list[str]:
    """Returns names of leaves, such as `params/layer_7/kernel`; full paths where two names would be equal."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    counts = collections.Counter(names)
    return [jax.tree_util.keystr(path) if counts[name] > 1 else name for path, name in zip(paths, names, strict=True)]
