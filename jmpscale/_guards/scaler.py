"""Guards of the functions that find a scaler in a tree or replace it, and checks of scalers."""

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.arguments import check_in_range
from jmpscale._base.compat import is_compiling
from jmpscale._base.frameworks import is_optax_state
from jmpscale._base.marks import Mark, was_used
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, find_instances, is_traced
from jmpscale._base.warn import warn_user
from jmpscale._state import ARRAY_FIELDS, LARGEST_SCALE, SMALLEST_SCALE, ScalerConfig, ScalerState

_WHERE_A_SCALER_IS = (
    "Pass a scaler, the optimizer state of with_loss_scaling, such as optimizer.opt_state in Flax NNX, or the part of "
    "a tree that contains the scaler. In most functions it is the first argument."
)


def find_called(tree: PyTree, name: str, remedy: str) -> None:
    arrays = len(jax.tree.leaves(only_scaler(tree, name, remedy or _WHERE_A_SCALER_IS)))
    if arrays != len(ARRAY_FIELDS):
        raise ValueError(f"{name} must contain a ScalerState with all arrays, got {arrays}. Pass the unfiltered tree.")


def found(scaler: ScalerState, name: str, allow_batch: bool) -> None:
    check_scaler(scaler, name, allow_batch=allow_batch)


def replace_called(tree: PyTree, scaler: object) -> None:
    check_scaler(scaler)
    only_scaler(tree, "tree", _WHERE_A_SCALER_IS)


def only_scaler(tree: PyTree, name: str, remedy: str) -> ScalerState:
    """Returns the scaler of a tree; raises unless it is the only one. `remedy` is for trees without a scaler."""
    found = find_instances(tree, ScalerState)
    if len(found) == 1:
        return found[0]
    if found:
        remedy = (
            "A step has one scaler: wrap the whole optimizer once, with_loss_scaling(optax.chain(...)), or pass the "
            "part of the tree that contains the scaler of the step."
        )
    elif any(map(is_optax_state, jax.tree.leaves(tree, is_leaf=is_optax_state))):
        remedy = (
            "Its optimizer is not wrapped: create the state with jmpscale.with_loss_scaling(tx) in place of tx; in the "
            "functional API, pass the scaler instead."
        )
    raise ValueError(
        f"{name} must contain exactly one ScalerState, found {len(found)} in a {type_name(tree)}. {remedy}"
    )


def check_scaler(scaler: object, name: str = "scaler", *, allow_batch: bool = False) -> None:
    """Raises unless `scaler` is a scaler, and not a batch, which would broadcast against the wrong axis."""
    if not isinstance(scaler, ScalerState):
        raise TypeError(f"{name} must be a ScalerState, got {type_name(scaler)}. Use jmpscale.dynamic or get_scaler.")
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


def warn_if_nothing_is_scaled(scaler: ScalerState) -> None:
    """Warns about a step that adapts a dynamic scale, in a program that has not scaled a loss yet."""
    if scaler.config.mode == "dynamic" and not was_used(Mark.SCALED, Mark.GRADIENT):
        warn_user(
            "no loss has been scaled yet, so small gradients underflow in float16. Use jmpscale.value_and_grad, or "
            "wrap the loss function in jmpscale.scaled_backward. Without float16, use static(1.0)."
        )
