"""Leaves of a tree: which are arrays, and which are gradients.

Leaves that are neither arrays nor numbers pass through every function of this package unchanged.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpscale._base.compat import REF
from jmpscale._base.frameworks import fp8_statistics, is_nnx_object
from jmpscale._base.text import describe, type_name

PyTree: TypeAlias = Any
Tree = TypeVar("Tree")
Kind = TypeVar("Kind")


def is_traced(x: object) -> TypeGuard[jax.Array]:
    """Tests whether a value is traced, so Python cannot read it."""
    return isinstance(x, jax.core.Tracer)


def is_array(leaf: object) -> TypeGuard[jax.Array]:
    """Tests whether a leaf is a JAX array, or a NumPy array or scalar that JAX accepts; Python numbers are not."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_)
    return isinstance(leaf, jax.Array)


def as_array(x: ArrayLike) -> jax.Array:
    """Returns a JAX array as it is, and any other value as a new one; `jnp.asarray` takes longer than an operation."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def is_inexact(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf holds floating-point or complex numbers."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact))


def is_real(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf holds floating-point numbers that are not complex."""
    return is_inexact(leaf) and not jnp.iscomplexobj(leaf)


def is_real_scalar(leaf: object) -> bool:
    """Tests whether a leaf is a single floating-point number, such as a loss."""
    return is_real(leaf) and jnp.shape(leaf) == ()


def is_key(leaf: object) -> bool:
    """Tests whether a leaf is a random key or an array of keys, or the array of numbers that represents one key."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        return False
    is_typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_typed or (leaf.dtype == np.uint32 and leaf.shape in {(2,), (4,)})


def is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def flatten_matching(
    tree: PyTree, matches: Callable[[object], bool], is_leaf: Callable[[object], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    """Returns the leaves for which `matches(leaf)` holds, and a function that replaces them in the tree."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf)
    return _split(leaves, treedef, [matches(leaf) for leaf in leaves])


def flatten_gradients(
    tree: PyTree, others: Sequence[str] = ()
) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    """Returns the gradients in a tree of gradients, and a function that replaces them in the tree.

    `others` are the paths of leaves that are not gradients, or of nodes that contain them.
    """
    mask = _gradient_mask(tree)
    if others:
        names = [path for path, _ in named_leaves(tree)]
        mask = [flag and not is_named(path, others) for flag, path in zip(mask, names, strict=True)]
    return _split(*jax.tree.flatten(tree), mask)


def _split(leaves: list[Any], treedef: Any, mask: list[bool]) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    # The matching leaves are not kept, because unflatten may outlive the trace that they belong to.
    others = [None if matched else leaf for leaf, matched in zip(leaves, mask, strict=True)]

    def unflatten(replacements: Iterable[object]) -> PyTree:
        new = iter(replacements)
        merged = [next(new) if matched else leaf for leaf, matched in zip(others, mask, strict=True)]
        return jax.tree.unflatten(treedef, merged)

    return list(itertools.compress(leaves, mask)), unflatten


def named_gradients(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each gradient with a name, such as `params/layer_7/kernel`; its full path if two names would be equal."""
    found = list(itertools.compress(jax.tree_util.tree_leaves_with_path(tree), _gradient_mask(tree)))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    counts = collections.Counter(names)
    pairs = zip(names, found, strict=True)
    return [(jax.tree_util.keystr(path) if counts[name] > 1 else name, leaf) for name, (path, leaf) in pairs]


def _gradient_mask(tree: PyTree) -> list[bool]:
    """Tests which leaves of a tree of gradients are gradients, and not new statistics of Flax's fp8 layers."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    statistics = fp8_statistics([path for path, _ in entries])
    return [is_inexact(leaf) and index not in statistics for index, (_, leaf) in enumerate(entries)]


def find_instances(tree: PyTree, kind: type[Kind] | tuple[type[Kind], ...]) -> list[Kind]:
    """Returns the nodes of a tree that are instances of a class, outermost first; does not look inside them.

    `kind` may also be several classes.
    """
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf with its path as Python code, such as `['w'][0]`."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves_with_path(tree)]


def is_named(path: str, names: Sequence[str]) -> bool:
    """Tests whether one of the names is the path of a leaf, or of a node that contains it."""
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in names)


def leaves_with_path(tree: PyTree) -> list[tuple[jax.tree_util.KeyPath, Any]]:
    """Returns each leaf with its path.

    JAX numbers the leaves of nodes that are registered without keys. Mappings among them, such as Haiku's FlatMap, have
    keys.
    """
    found = jax.tree_util.tree_leaves_with_path(tree)
    if not any(isinstance(key, jax.tree_util.FlattenedIndexKey) for path, _ in found for key in path):
        return found
    with_keys = jax.tree_util.tree_leaves_with_path(_as_dicts(tree))
    has_same_order = [id(leaf) for _, leaf in with_keys] == [id(leaf) for _, leaf in found]
    return with_keys if has_same_order else found


def _as_dicts(tree: PyTree) -> PyTree:
    """Returns a tree with dictionaries in place of mappings."""

    def converted(x: Any) -> Any:
        return {key: _as_dicts(value) for key, value in x.items()} if isinstance(x, Mapping) else x

    return jax.tree.map(converted, tree, is_leaf=lambda x: isinstance(x, Mapping))


def first_leaf(tree: PyTree, matches: Callable[[Any], object]) -> tuple[str, Any] | None:
    """Returns the path and the value of the first leaf that matches."""
    if not any(map(matches, jax.tree.leaves(tree))):
        return None  # finding the paths of a large tree takes longer than the test
    return next((path, leaf) for path, leaf in named_leaves(tree) if matches(leaf))


def bit_pattern(leaf: object) -> object:
    """Returns a value that is equal for two leaves only if they are equal bit for bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape, leaf.dtype, np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()
    return leaf


def structure(tree: PyTree) -> object:
    """Returns the structure of a tree, which Python compares by `==`."""
    return jax.tree.structure(tree)


def differing_nodes(one: PyTree, other: PyTree, path: str = "") -> tuple[str, PyTree, PyTree]:
    """Returns the path of the first nodes that differ by themselves in two trees of different structure, and the nodes.

    `path` is the path of the trees themselves.
    """
    if _own_structure(one) == _own_structure(other):
        for (key, child), (_, other_child) in zip(_children(one), _children(other), strict=True):
            if structure(child) != structure(other_child):
                return differing_nodes(child, other_child, path + jax.tree_util.keystr(key))
    return path, one, other


def _children(node: PyTree) -> list[tuple[jax.tree_util.KeyPath, Any]]:
    return jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)


def _own_structure(node: PyTree) -> Any:
    """Returns the structure of a node whose children count as leaves."""
    return jax.tree.structure(node, is_leaf=lambda x: x is not node)


def auxiliary_data(node: PyTree) -> str:
    """Returns the text of what is fixed in a node of a tree: the keys of a dict, or the settings of a scaler."""
    own = _own_structure(node)
    _, data = own.node_data()
    return str(own if data is None else data)  # of a list, its length is fixed


def check_no_refs(tree: PyTree, name: str = "tree") -> None:
    """Raises if a leaf is a mutable array reference: its updates would be neither checked nor gated."""
    if found := first_leaf(tree, lambda leaf: isinstance(leaf, REF)):
        raise TypeError(f"{name} must hold values, got a jax.Ref at {name}{found[0]}. Pass its value, ref[...].")


def check_no_nnx_objects(tree: PyTree, name: str, remedy: str) -> None:
    """Raises if a tree contains Flax NNX objects: a transformation would change only copies of them."""
    if found := list(filter(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object))):
        raise TypeError(
            f"{name} must hold values, got a Flax NNX {type_name(found[0])}, which is changed in place: the change "
            f"would be lost. {remedy}"
        )


def check_has_values(tree: PyTree, name: str, function: str) -> None:
    """Raises if a leaf is an array without values, which `function` would read."""
    for path, leaf in named_leaves(tree):
        if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name} must hold arrays with values, got {describe(leaf)} without values at {name}{path}. Call "
                f"{function} outside of jax.jit, with the arrays of a training step."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{name} must hold arrays with values, got a deleted {describe(leaf)} at {name}{path}. It was donated "
                f"to a compiled function: pass the result of this function, or call {function} before it."
            )
