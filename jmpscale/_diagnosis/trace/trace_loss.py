"""Traces a loss function and its gradients as a program of the loss scale."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.frameworks import imported, is_nnx_object
from jmpscale._base.tree import PyTree, check_no_refs, flatten_gradients, flatten_matching, is_inexact
from jmpscale._diagnosis.trace.program import Program
from jmpscale._diagnosis.trace.repeatable import repeatable
from jmpscale._diagnosis.trace.trace_observed import Axes
from jmpscale._programs.source import place_of_error
from jmpscale._state import ScalerState, static
from jmpscale._step.call import reads_values

LossAndGrads = Callable[[ScalerState, PyTree, PyTree], PyTree]
Names = Mapping[int, str]  # of the leaves of the arguments, by their identities


def trace_loss(loss_and_grads: LossAndGrads, args: PyTree, kwargs: PyTree, names: Names, axes: Axes) -> Program:
    """Traces a loss and its gradients, once unless Python reads the values of a NumPy array; in the scope of `axes`."""
    try:
        return _trace(loss_and_grads, jax.tree.map(_as_jax_array, (args, kwargs), is_leaf=is_nnx_object), names, axes)
    except Exception as error:
        if not (reads_values(error) or isinstance(error, NameError)):
            raise
    try:  # Python may have read the values of a NumPy array
        return _trace(loss_and_grads, (args, kwargs), names, axes)
    except Exception as error:
        _explain_error(error)
        raise


def _explain_error(error: Exception) -> None:
    """Says what to do about an error of a loss function that is traced."""
    if reads_values(error):
        error.add_note(
            "diagnose traces the loss function, as jax.jit does, so Python must not read the values of JAX arrays in "
            f"it, as it does{place_of_error(error)}. Arguments that are Python numbers or NumPy arrays remain values."
        )
    elif isinstance(error, NameError) and "axis name" in str(error):
        error.add_note(
            "diagnose runs the loss function on one device, outside of the function that names the axis. Pass "
            'jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1) with the name of the axis, '
            "and the arguments of one device."
        )


def _as_jax_array(leaf: Any) -> Any:
    """Converts a NumPy array, whose own operations would not be part of the program; NumPy scalars remain values."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim > 0 and is_inexact(leaf) else leaf


def _trace(loss_and_grads: LossAndGrads, arguments: tuple[PyTree, PyTree], names: Names, axes: Axes) -> Program:
    def outputs(loss_scale: jax.Array) -> list[Any]:
        loss, grads = loss_and_grads(static(1.0)._replace(loss_scale=loss_scale), *_copied(arguments))
        return [loss, *flatten_gradients(grads)[0]]

    closed = jax.make_jaxpr(outputs, axis_env=list(axes))(jnp.float32(1.0))
    check_no_refs(closed.consts, "the values that fun closes over")
    consts = list(closed.consts)
    return Program(repeatable(closed.jaxpr), consts, tuple(names.get(id(x), "") for x in consts))


def _copied(tree: PyTree) -> PyTree:
    """Copies containers, which the step may change, and Flax NNX objects, whose copies belong to the current trace."""
    objects, unflatten = flatten_matching(tree, is_nnx_object, is_leaf=is_nnx_object)
    return unflatten(imported("flax.nnx", "clone")(objects) if objects else [])
