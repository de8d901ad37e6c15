"""The arrays that a training step takes and returns: their names, and their positions in its program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import PyTree, is_real, leaves_with_path, named_leaves
from jmpscale._diagnosis.trace.program import Leaf, Result
from jmpscale._state import is_scaler
from jmpscale._step.call import StepCall, is_array_type
from jmpscale._step.dependence import StepDependence
from jmpscale._step.parts import Match


class _Compared(NamedTuple):
    """A result that is compared with float32."""

    result: Result
    output: int  # its position among the outputs of the program
    input: int | None  # the position of its old value among the inputs of the program, if it is a leaf of the state


class StepArrays:
    """The arrays that a step takes, and the results of it that are floating-point numbers, except of scalers."""

    def __init__(self, call: StepCall, out: PyTree, matches: Sequence[Match], dependence: StepDependence) -> None:
        leaves = jax.tree.leaves(call.arguments)
        places = [i for i, leaf in enumerate(leaves) if is_array_type(leaf)]
        self._values = [jnp.asarray(leaves[i]) for i in places]
        self._number = {place: i for i, place in enumerate(places)}  # of an array among the inputs of the program
        self._scales, of_scalers = _places_of_scalers(call.arguments)
        names = [name + path for name, x in zip(call.names, call.arguments, strict=True) for path, _ in named_leaves(x)]
        self.named = tuple((names[i], x) for i, x in zip(places, self._values, strict=True))
        old_of = {new: (match, k) for match in matches for k, new in enumerate(match.new)}

        def compared(path: str, dtype: np.dtype, place: int, output: int) -> _Compared | None:
            if place not in old_of:
                return _Compared(Result(_name_of_result(path), dtype), output, None)
            match, k = old_of[place]
            old = match.old[k]
            if not is_array_type(leaves[old]) or old in of_scalers or not is_real(leaves[old]):
                return None
            number, keys = self._number[old], leaves_with_path(match.tree)[k][0]
            name = match.name + jax.tree_util.keystr(keys)
            # The parts of the state are the arguments, or the elements of the only one.
            part = match.name + jax.tree_util.keystr(keys[: int(len(matches) == 1)])
            # A leaf that is not computed from its old value, such as a copy in half precision of float32 parameters,
            # loses no change over time, so its value is compared, as of any other result.
            old_value = self._values[number] if dependence.depends([place], [old]) else None
            return _Compared(Result(name, dtype, old_value, part="" if part == name else part), output, number)

        scalers_out = _places_of_scalers(out)[1]
        arrays = [(place, path, x) for place, (path, x) in enumerate(named_leaves(out)) if is_array_type(x)]
        found = [
            compared(path, x.dtype, place, output)
            for output, (place, path, x) in enumerate(arrays)
            if jnp.issubdtype(x.dtype, np.floating) and place not in scalers_out
        ]
        self._compared = list(filter(None, found))

    @property
    def results(self) -> list[Result]:
        return [x.result for x in self._compared]

    @property
    def outputs(self) -> list[int]:
        """The positions of the results among the outputs of the program."""
        return [x.output for x in self._compared]

    def leaves(self, is_read: Sequence[bool]) -> list[Leaf]:
        """Returns the leaves of the state; `is_read` says which inputs of the program the forward pass reads."""
        found = [(x._replace(old=self._values[i]), i, output) for x, output, i in self._compared if i is not None]
        return [Leaf(x, i, output, is_read[i]) for x, i, output in found]

    def inputs(self, scale: jax.Array) -> list[Any]:
        """Returns the inputs of the program, in which the scale of the first scaler is a number.

        With `jax.pmap`, each device has a copy of a scaler.
        """
        values = list(self._values)
        numbers = [self._number[place] for place in self._scales if place in self._number]
        for i in numbers:
            ratio = np.asarray(self._values[i]) / np.ravel(self._values[numbers[0]])[0]
            values[i] = scale if ratio.ndim == 0 and ratio == 1 else scale * ratio
        return values


def _places_of_scalers(tree: PyTree) -> tuple[list[int], set[int]]:
    """Returns the positions of the loss scales among the leaves of a tree, and of all leaves of its scalers."""
    scales: list[int] = []
    inside: set[int] = set()
    position = 0
    for node in jax.tree.leaves(tree, is_leaf=is_scaler):
        count = len(jax.tree.leaves(node))
        if is_scaler(node) and node.config.mode != "disabled":
            scales.append(position)
            inside.update(range(position, position + count))
        position += count
    return scales, inside


def _name_of_result(path: str) -> str:
    # `out` is a pair of the result and the values of Flax NNX objects.
    return "result" + path.removeprefix("[0]")
