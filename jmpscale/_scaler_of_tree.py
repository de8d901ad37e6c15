"""The scaler of a tree: finding it, checking it, replacing it."""

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import check_in_range, warn_user
from jmpscale._base.compat import is_compiling
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, Tree, find_instances, is_traced
from jmpscale._state import ARRAY_FIELDS, LARGEST_SCALE, SMALLEST_SCALE, ScalerConfig, ScalerState, register_with_flax


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
    """Returns the only scaler in a tree, unwrapped and checked; errors call the tree `name`."""
    scaler = _only_scaler(tree, name, remedy)
    arrays = jax.tree.leaves(scaler)  # Flax NNX puts each array into a container
    if len(arrays) != len(ARRAY_FIELDS):
        raise ValueError(
            f"{name} must contain a ScalerState with all arrays, got {len(arrays)}. Pass the unfiltered tree."
        )
    scaler = ScalerState._make([*arrays, scaler.config])
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
    check_scaler(scaler)
    old = _only_scaler(tree, "tree")
    # The arrays are copied, so that donating the tree does not delete the caller's scaler. In a compiled step, a
    # constant remains one, about which the update then warns.
    copies = scaler[:-1] if in_compiled_step(tree) else map(jnp.array, scaler[:-1])
    new = jax.tree.unflatten(jax.tree.structure(old), copies)._replace(config=scaler.config)
    return jax.tree.map(lambda x: new if is_scaler(x) else x, tree, is_leaf=is_scaler)


def _only_scaler(tree: PyTree, name: str, remedy: str = "") -> ScalerState:
    found = find_instances(tree, ScalerState)
    if len(found) == 1:
        return found[0]
    if found:
        remedy = (
            "A step has one scaler: wrap the whole optimizer once, with_loss_scaling(optax.chain(...)), or pass the "
            "part of the tree that contains the scaler of the step."
        )
    remedy = remedy or (
        "Pass a scaler, the optimizer state of with_loss_scaling, such as optimizer.opt_state in Flax NNX, or the "
        "part of a tree that contains the scaler. In most functions it is the first argument."
    )
    raise ValueError(
        f"{name} must contain exactly one ScalerState, found {len(found)} in a {type_name(tree)}. {remedy}"
    )


def check_scaler(scaler: object, name: str = "scaler", *, allow_batch: bool = False) -> None:
    """Raises unless `scaler` is a scaler, and not a batch, which would broadcast against the wrong axis."""
    if not isinstance(scaler, ScalerState):
        raise TypeError(f"{name} must be a ScalerState, got {type_name(scaler)}. Use jmpscale.dynamic or get_scaler.")
    register_with_flax()
    if not isinstance(scaler.config, ScalerConfig):
        raise TypeError(
            f"{name}.config must be a ScalerConfig, got {type_name(scaler.config)}. Restore a checkpoint into a state "
            "that jmpscale.dynamic, static or disabled has created."
        )
    if any(isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted() for x in jax.tree.leaves(scaler)):
        raise ValueError(
            f"{name} must hold values, got deleted arrays, which were donated to a compiled function. Use the scaler "
            "that this function returned."
        )
    if allow_batch:
        return
    if shape := getattr(scaler.loss_scale, "shape", ()):
        raise ValueError(
            f"{name} must hold one scaler, got a batch with loss_scale of shape {shape}. Call this under jax.vmap; or, "
            f"on the host or if it is replicated, pass one scaler: jax.tree.map(lambda x: x[0], {name})."
        )
    for field in ARRAY_FIELDS:
        value = getattr(scaler, field)
        kind = np.floating if field == "loss_scale" else np.integer
        dtype = getattr(value, "dtype", type(value))
        # Counters of 8 or 16 bits would wrap around.
        if getattr(value, "shape", ()) or not jnp.issubdtype(dtype, kind) or np.dtype(dtype).itemsize < 4:
            raise TypeError(
                f"{name}.{field} must be a scalar of {kind.__name__} dtype with at least 32 bits, got "
                f"{describe(value)}. Convert it, or restore a checkpoint into a state from jmpscale.dynamic."
            )


def scale_on_host(scaler: ScalerState, name: str = "scaler") -> float:
    """Returns the loss scale as a Python number, or raises if it is invalid."""
    remedy = "The state was corrupted; restore an older checkpoint."
    return check_in_range(f"{name}.loss_scale", float(scaler.loss_scale), SMALLEST_SCALE, LARGEST_SCALE, remedy)


def warn_if_constant(scaler: ScalerState, values: PyTree, name: str = "scaler") -> None:
    """Warns if a compiled step, which traces `values`, has its scaler as a constant; the message calls it `name`."""
    if in_compiled_step(values) and not any(map(is_traced, jax.tree.leaves(scaler))):
        warn_user(
            f"the {name} is a constant of the compiled program, so every call starts from the same one: the compiled "
            f"function creates the {name}, or closes over it. Create it outside, pass it to the compiled function as "
            "an argument, and return the new one. In a whole training run, carry it through jax.lax.scan."
        )


def in_compiled_step(values: PyTree) -> bool:
    """Tests whether values are traced to compile a step that the program neither differentiates nor maps over a batch.

    Such a transformation traces values of a type of its own; a new array has the type of the program's values.
    """
    traced = [x for x in jax.tree.leaves(values) if is_traced(x)]
    return bool(traced) and is_compiling() and {type(x) for x in traced} == {type(jnp.zeros(()))}


def is_scaler(x: object) -> bool:
    """Tests whether a node of a tree is a scaler, or a batch of scalers."""
    return isinstance(x, ScalerState)
