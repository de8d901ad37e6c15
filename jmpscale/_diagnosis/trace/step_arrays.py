"""The arrays that a training step takes and returns: their names, and their positions in its program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import PyTree, is_real, leaves_with_path, named_leaves
from jmpscale._diagnosis.trace.program import Result
from jmpscale._diagnosis.trace.scalers import find_scalers
from jmpscale._state import is_scaler
from jmpscale._step.call import StepCall, is_array_type
from jmpscale._step.dependence import StepDependence
from jmpscale._step.parts import Match


class StepArrays:
    """The arrays that a step takes, and the results of it that are floating-point numbers, except of scalers."""

    def __init__(self, call: StepCall, out: PyTree, matches: Sequence[Match], dependence: StepDependence) -> None:
        leaves = jax.tree.leaves(call.arguments)
        places = [i for i, leaf in enumerate(leaves) if is_array_type(leaf)]
        self.values = [jnp.asarray(leaves[i]) for i in places]
        self._number = {place: i for i, place in enumerate(places)}  # of an array among the inputs of the program
        of_scalers = _places_of_scalers(call.arguments)
        self.scalers = find_scalers(call)
        names = [name + path for name, x in zip(call.names, call.arguments, strict=True) for path, _ in named_leaves(x)]
        self.names = tuple(names[i] for i in places)
        old_of = {new: (match, k) for match in matches for k, new in enumerate(match.new)}

        def result(path: str, dtype: np.dtype, place: int, output: int) -> Result | None:
            if place not in old_of:
                return Result(_name_of_result(path), dtype, output)
            match, k = old_of[place]
            old = match.old[k]
            if not is_array_type(leaves[old]) or old in of_scalers or not is_real(leaves[old]):
                return None
            keys = leaves_with_path(match.tree)[k][0]
            name = match.name + jax.tree_util.keystr(keys)
            # The parts of the state are the arguments, or the elements of the only one.
            part = match.name + jax.tree_util.keystr(keys[: int(len(matches) == 1)])
            is_changed = dependence.depends([place], [old])
            return Result(name, dtype, output, self._number[old], is_changed, part="" if part == name else part)

        scalers_out = _places_of_scalers(out)
        arrays = [(place, path, x) for place, (path, x) in enumerate(named_leaves(out)) if is_array_type(x)]
        found = [
            result(path, x.dtype, place, output)
            for output, (place, path, x) in enumerate(arrays)
            if jnp.issubdtype(x.dtype, np.floating) and place not in scalers_out
        ]
        self.results = list(filter(None, found))

    def ones(self) -> np.ndarray:
        """Returns a loss scale of 1 for the only scaler, or for each of several."""
        return np.ones(len(self.scalers) if len(self.scalers) > 1 else (), np.float32)

    def with_scales(self, arrays: Sequence[Any], scales: jax.Array) -> list[Any]:
        """Returns the arrays that the step takes, with other loss scales: one, or one for each of several scalers.

        With `jax.pmap`, each device has a copy of a scaler.
        """
        found = list(arrays)
        for k, scaler in enumerate(self.scalers):
            i, scale = self._number[scaler.place], scales[k] if scales.ndim else scales
            ratio = np.asarray(self.values[i]) / np.ravel(self.values[i])[0]
            found[i] = scale if ratio.ndim == 0 else scale * ratio
        return found


def _places_of_scalers(tree: PyTree) -> set[int]:
    """Returns the positions of the leaves of scalers among the leaves of a tree."""
    inside: set[int] = set()
    position = 0
    for node in jax.tree.leaves(tree, is_leaf=is_scaler):
        count = len(jax.tree.leaves(node))
        if is_scaler(node) and node.config.mode != "disabled":
            inside.update(range(position, position + count))
        position += count
    return inside


def _name_of_result(path: str) -> str:
    # `out` is a pair of the result and the values of Flax NNX objects.
    return "result" + path.removeprefix("[0]")
