"""Leaves of a tree: which are arrays, and which are gradients; and the scaler of a tree: finding, checking, replacing.

Leaves that are not arrays pass through every function of this package unchanged.
"""

import collections
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmpscale._check import describe, type_name
from jmpscale._state import ARRAY_FIELDS, ScalerConfig, ScalerState, register_with_flax

PyTree: TypeAlias = Any
Tree = TypeVar("Tree")
Kind = TypeVar("Kind")
Path: TypeAlias = tuple[Any, ...]  # of the keys of jax.tree_util

# The names of the variables of Flax's fp8 layers, for which a backward pass returns new values in place of gradients:
# their collection (flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT), and pairs such as input_scale and input_amax_history.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_SCALE, _HISTORY = "_scale", "_amax_history"
_REF = getattr(jax, "Ref", ())  # JAX before 0.8 has no public references


def is_traced(x: object) -> TypeGuard[jax.Array]:
    """Tests whether a value is traced, so Python cannot read it."""
    return isinstance(x, jax.core.Tracer)


def is_compiling() -> bool:
    """Tests whether JAX is tracing a program to compile it, as in `jax.jit` and `jax.lax.scan`, not in `jax.vmap`."""
    return is_traced(jnp.zeros(()))


def is_array(leaf: object) -> TypeGuard[jax.Array]:
    """Tests whether a leaf is a JAX array, or a NumPy array or scalar that JAX accepts; Python numbers are not."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_)
    return isinstance(leaf, jax.Array)


def is_inexact(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf holds floating-point or complex numbers."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact))


def is_real(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf holds floating-point numbers that are not complex."""
    return is_inexact(leaf) and not jnp.iscomplexobj(leaf)


def flatten_matching(
    tree: PyTree, matches: Callable[[object], bool], is_leaf: Callable[[object], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    """Returns the leaves for which `matches(leaf)` holds, and a function that replaces them in the tree."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf)
    return _split(leaves, treedef, [matches(leaf) for leaf in leaves])


def flatten_gradients(tree: PyTree) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    """Returns the gradients in a tree of gradients, and a function that replaces them in the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return _split(leaves, treedef, _gradient_mask(tree))


def _split(leaves: list[Any], treedef: Any, mask: list[bool]) -> tuple[list[Any], Callable[[Iterable[object]], PyTree]]:
    # The matching leaves are not kept, because unflatten may outlive the trace that they belong to.
    others = [None if matched else leaf for leaf, matched in zip(leaves, mask, strict=True)]

    def unflatten(replacements: Iterable[object]) -> PyTree:
        new = iter(replacements)
        merged = [next(new) if matched else leaf for leaf, matched in zip(others, mask, strict=True)]
        return jax.tree.unflatten(treedef, merged)

    return [leaf for leaf, matched in zip(leaves, mask, strict=True) if matched], unflatten


def gradients_with_path(tree: PyTree) -> list[tuple[Path, Any]]:
    """Returns the gradients in a tree of gradients, with their paths."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    return [entry for entry, matched in zip(entries, _gradient_mask(tree), strict=True) if matched]


def _gradient_mask(tree: PyTree) -> list[bool]:
    """Tests which leaves of a tree of gradients are gradients, and not new statistics of Flax's fp8 layers."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    statistics = _fp8_statistics([path for path, _ in entries])
    return [is_inexact(leaf) and index not in statistics for index, (_, leaf) in enumerate(entries)]


def _fp8_statistics(paths: list[Path]) -> set[int]:
    """Returns the indices of the scales and histories of Flax's fp8 layers, also outside their named collection."""
    found = {i for i, path in enumerate(paths) if any(_key_name(key) == _OVERWRITE_WITH_GRADIENT for key in path)}
    names = [_key_name(path[-1]) if path else None for path in paths]
    histories = [i for i, name in enumerate(names) if isinstance(name, str) and name.endswith(_HISTORY)]
    for i in histories:
        scale = str(names[i]).removesuffix(_HISTORY) + _SCALE
        siblings = [j for j, name in enumerate(names) if name == scale and paths[j][:-1] == paths[i][:-1]]
        found |= {i, *siblings} if siblings else set()
    return found


def _key_name(key: object) -> object:
    return getattr(key, "key", getattr(key, "name", None))


def find_instances(tree: PyTree, kind: type[Kind]) -> list[Kind]:
    """Returns the nodes of a tree that are instances of a class, outermost first; does not look inside them."""
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf with its path as Python code, such as `['w'][0]`."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def structure(tree: PyTree) -> object:
    """Returns the structure of a tree, which Python compares by `==`."""
    return jax.tree.structure(tree)


def path_names(paths: Sequence[Path]) -> list[str]:
    """Returns names of leaves, such as `params/layer_7/kernel`; full paths where two names would be equal."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    counts = collections.Counter(names)
    return [jax.tree_util.keystr(path) if counts[name] > 1 else name for path, name in zip(paths, names, strict=True)]


def check_no_refs(tree: PyTree, name: str = "tree") -> None:
    """Raises if a leaf is a mutable array reference: its updates would be neither checked nor gated."""
    if any(isinstance(leaf, _REF) for leaf in jax.tree.leaves(tree)):
        path = next(path for path, leaf in named_leaves(tree) if isinstance(leaf, _REF))
        raise TypeError(
            f"{name} must hold values, got a jax.Ref at {name}{path}. Read it with ref[...], pass the value, and write "
            "the result back with ref[...] = value."
        )


def nnx_objects(tree: PyTree) -> list[object]:
    """Returns the Flax NNX objects that a tree contains, which are changed in place."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_nnx_object) if is_nnx_object(leaf)]


def is_nnx_object(node: object) -> bool:
    """Tests whether a node of a tree is a Flax NNX object."""
    nnx = sys.modules.get("flax.nnx")
    # While another thread is still importing Flax, the module exists without its classes.
    kind = getattr(nnx, "Pytree", getattr(nnx, "Object", None))
    return kind is not None and isinstance(node, kind)


def nnx_variables(tree: PyTree) -> list[object]:
    """Returns the Flax NNX variables that a tree contains, which are changed in place."""
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    return find_instances(tree, variable) if variable else []


def check_no_nnx_objects(tree: PyTree, name: str, remedy: str) -> None:
    """Raises if a tree contains Flax NNX objects: a transformation would change only copies of them."""
    if found := nnx_objects(tree):
        raise TypeError(
            f"{name} must hold values, got a Flax NNX {type_name(found[0])}, which is changed in place: the change "
            f"would be lost. {remedy}"
        )


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
      TypeError: `dtype` is not a floating-point dtype, or the tree contains a `jax.Ref` or a Flax NNX object. An NNX
        object is changed in place, so that the random streams and batch statistics of a copy would be lost.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.cast({"w": jnp.ones(2), "step": 3, "ids": jnp.arange(2)}, jnp.float16)
    {'ids': Array([0, 1], dtype=int32), 'step': 3, 'w': Array([1., 1.], dtype=float16)}
    """
    _check_floating(dtype)
    check_no_refs(tree)
    check_no_nnx_objects(
        tree,
        "tree",
        "Wrap the loss function in jmpscale.autocast, pass dtype=jnp.float16 to the layers, or cast nnx.state(model).",
    )

    def is_floating(leaf: object) -> bool:
        return is_array(leaf) and jnp.issubdtype(leaf.dtype, np.floating)

    leaves, unflatten = flatten_matching(tree, is_floating, is_leaf=_is_scaler)
    return unflatten(jnp.asarray(x, dtype) for x in leaves)


def _check_floating(dtype: DTypeLike) -> None:
    got = describe(dtype)
    if dtype is not None:
        try:
            got = np.dtype(dtype).name
            if jnp.issubdtype(np.dtype(dtype), np.floating):
                return
        except (TypeError, ValueError):  # NumPy's errors for values that do not describe a dtype
            pass
    raise TypeError(
        f"dtype must be a floating-point dtype, got {got}. Pass the tree, then a dtype such as jnp.float16: "
        "cast(params, jnp.float16)."
    )


def get_scaler(tree: PyTree) -> ScalerState:
    """Returns the scaler that an optimizer state, a train state or any other pytree contains.

    Args:
      tree: a pytree that contains exactly one `ScalerState`. Its arrays may be wrapped, as by Flax NNX.

    Returns:
      The `ScalerState`, with its arrays unwrapped.

    Raises:
      ValueError: the tree contains no scaler, or more than one, or one whose arrays were removed.

    >>> import jmpscale
    >>> float(jmpscale.get_scaler({"model": 1.0, "scaler": jmpscale.dynamic(8.0)}).loss_scale)
    8.0
    """
    return _unwrap_arrays(_only_scaler(tree, "tree"), "tree")


def find_scaler(tree: PyTree, name: str = "scaler", *, allow_batch: bool = False, remedy: str = "") -> ScalerState:
    """Returns the only scaler in a tree, unwrapped and checked; errors call the tree `name`."""
    scaler = _unwrap_arrays(_only_scaler(tree, name, remedy), name)
    check = _check_scaler_type if allow_batch else check_scaler
    check(scaler, name)
    return scaler


def _unwrap_arrays(scaler: ScalerState, name: str) -> ScalerState:
    """Returns a scaler with its arrays taken out of the containers that Flax NNX puts around them."""
    arrays = {field: jax.tree.leaves(getattr(scaler, field)) for field in ARRAY_FIELDS}
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

    >>> import jmpscale
    >>> float(jmpscale.replace_scaler((jmpscale.dynamic(), 1), jmpscale.dynamic(8.0))[0].loss_scale)
    8.0
    """
    check_scaler(scaler)
    old = _only_scaler(tree, "tree")

    def wrap(field: str) -> PyTree:
        # The arrays are copied, so that donating the tree does not delete the caller's scaler.
        return jax.tree.unflatten(jax.tree.structure(getattr(old, field)), [jnp.array(getattr(scaler, field))])

    new = scaler._replace(**{field: wrap(field) for field in ARRAY_FIELDS})
    _, unflatten = flatten_matching(tree, _is_scaler, is_leaf=_is_scaler)
    return unflatten([new])


def _is_scaler(x: object) -> bool:
    return isinstance(x, ScalerState)


def _only_scaler(tree: PyTree, name: str, remedy: str = "") -> ScalerState:
    register_with_flax()
    found = find_instances(tree, ScalerState)
    if len(found) != 1:
        remedy = remedy or (
            "Pass a scaler, the optimizer state of with_loss_scaling, or the part of a tree that contains the scaler."
        )
        raise ValueError(
            f"{name} must contain exactly one ScalerState, found {len(found)} in a {type_name(tree)}. {remedy}"
        )
    return found[0]


def check_scaler(scaler: object, name: str = "scaler") -> None:
    """Raises unless `scaler` is a single scaler: a batch would broadcast against the wrong axis."""
    state = _check_scaler_type(scaler, name)
    if shape := getattr(state.loss_scale, "shape", ()):
        raise ValueError(
            f"{name} must hold one scaler, got a batch with loss_scale of shape {shape}. Call this under jax.vmap."
        )
    for field in ARRAY_FIELDS:
        _check_field(getattr(state, field), field, name)


def _check_scaler_type(scaler: object, name: str) -> ScalerState:
    """Raises unless `scaler` is a scaler, or a batch of scalers."""
    if not isinstance(scaler, ScalerState):
        raise TypeError(
            f"{name} must be a ScalerState, got {type_name(scaler)}. Create one with jmpscale.dynamic, static or "
            "disabled; jmpscale.get_scaler finds it in an optimizer state."
        )
    if not isinstance(scaler.config, ScalerConfig):
        raise TypeError(
            f"{name}.config must be a ScalerConfig, got {type_name(scaler.config)}. Settings are not part of a "
            "checkpoint: restore into a state created by jmpscale.dynamic, static or disabled."
        )
    register_with_flax()
    return scaler


def _check_field(value: object, field: str, name: str) -> None:
    kind, example = (np.floating, "a float such as 1024.0") if field == "loss_scale" else (np.integer, "an integer")
    dtype = getattr(value, "dtype", type(value))
    # Counters of 8 or 16 bits would wrap around.
    narrow = is_array(value) and value.dtype.itemsize < 4
    if getattr(value, "shape", ()) or not jnp.issubdtype(dtype, kind) or narrow:
        raise TypeError(
            f"{name}.{field} must be a scalar of {kind.__name__} dtype with at least 32 bits, got {describe(value)}. "
            f"Set it to {example}, and restore checkpoints into a state created by jmpscale.dynamic, static or "
            "disabled."
        )
