"""The scalers among the arguments of a training step."""

from typing import NamedTuple

import jax
import numpy as np

from jmpscale._base.tree import PyTree
from jmpscale._get_scaler import find_scaler
from jmpscale._state import ScalerState, is_scaler
from jmpscale._step.call import StepCall, is_array_type


class StepScaler(NamedTuple):
    """A scaler that a step takes."""

    name: str  # as Python code, such as `opt_state['d'].scaler`
    state: ScalerState  # the first of a batch, as each device has a copy
    place: int  # of its loss scale among the leaves of all arguments


def find_scalers(call: StepCall) -> list[StepScaler]:
    """Returns the scalers of a call that are not disabled, in the order of the arguments."""
    found, position = [], 0
    for name, argument in zip(call.names, call.arguments, strict=True):
        for path, node in jax.tree_util.tree_leaves_with_path(argument, is_leaf=is_scaler):
            leaves = jax.tree.leaves(node)
            if is_scaler(node) and node.config.mode != "disabled":
                scaler = StepScaler(name + jax.tree_util.keystr(path), _first_of_batch(node), position)
                found += [scaler] if is_array_type(leaves[0]) else []
            position += len(leaves)
    return found


def _first_of_batch(tree: PyTree) -> ScalerState:
    scaler = find_scaler(tree, allow_batch=True)
    return jax.tree.map(lambda x: np.ravel(x)[0], scaler) if np.ndim(scaler.loss_scale) else scaler
