"""Finds what is too coarse when a step begins: arguments and constants in half precision.

Two runs of a step take them as exact, so no comparison shows it. The gradients in float32 do: if an input that moves
within its last place changes them much, its lost digits matter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.fitting_scales import Errors, largest
from jmpscale._diagnosis.run.moves import move, move_rounded
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.thresholds import BESIDE_PARAMETERS, MOST_INPUTS, SAME_SIZE
from jmpscale._diagnosis.trace.readers import find_readers
from jmpscale._diagnosis.trace.traced_step import TracedStep


class CoarseInput(NamedTuple):
    """An argument of a step, or a constant, whose lost digits change the loss or a gradient."""

    name: str  # such as `batch['t']`; empty for a constant
    dtype: np.dtype
    shape: tuple[int, ...]
    line: str  # the first one that computes with it
    error: float  # of the loss or a gradient after a move; infinite if they are not finite then


def find_coarse_inputs(step: TracedStep, trials: GradientTrials, rounding: float) -> list[CoarseInput]:
    """Returns the inputs that are too coarse; if they are many, the first ones.

    Of an ill-conditioned step, as near a minimum of the loss, any change makes other gradients. So an input is only too
    coarse if it changes them more than `rounding` does, which is the error of the step as it is written, and much more
    than the parameters do that move within the last places of the same dtype.
    """
    moves = _Moves(step, trials)
    limit = max(trials.accepted.small, SAME_SIZE * rounding)
    if not moves.inputs or math.isinf(limit) or moves.error(moves.inputs) <= limit:
        return []
    limit = max(limit, BESIDE_PARAMETERS * moves.error_of_parameters())
    found: list[CoarseInput] = []
    pending = [moves.inputs]
    while pending and len(found) < MOST_INPUTS:
        chosen = pending.pop()
        error = moves.error(chosen)
        if error <= limit:
            continue
        if len(chosen) == 1:
            found.append(moves.describe(chosen[0], error))
        else:
            middle = len(chosen) // 2
            pending += [chosen[middle:], chosen[:middle]]
    return found


class _Moves:
    """Runs a step in float32 after moves of what it takes."""

    def __init__(self, step: TracedStep, trials: GradientTrials) -> None:
        self._program, self._trials = step.of_gradients, trials
        led = {x.input for x in step.results if x.is_gradient_led}
        names = self._program.names
        self._parameters = [i for i, name in enumerate(names) if name in step.gradients or i in led]
        # An array of fewer bits is quantized on purpose.
        halves = {i for i, x in enumerate(self._program.consts) if is_narrow(x) and x.dtype.itemsize == 2}
        self._readers = find_readers(self._program, halves.difference(self._parameters))
        self.inputs = sorted(self._readers)
        self._errors: dict[tuple[int, ...], float] = {}

    def error(self, inputs: Sequence[int]) -> float:
        """Returns the largest error of the loss or a gradient if some inputs move within their last places."""
        key = tuple(inputs)
        if key not in self._errors:
            dtypes = {i: self._program.consts[i].dtype for i in inputs}
            self._errors[key] = self._largest(lambda i, x, direction: move_rounded(x, dtypes[i], direction), inputs)
        return self._errors[key]

    def error_of_parameters(self) -> float:
        """Returns the largest error if the parameters move within the last places of the coarsest input."""
        dtypes: list[np.dtype] = [self._program.consts[i].dtype for i in self.inputs]
        coarsest = max(dtypes, key=lambda x: float(jnp.finfo(x).eps))
        return self._largest(lambda _, x, direction: move(x, coarsest, direction), self._parameters)

    def _largest(self, moved: Callable[[int, Any, int], Any], inputs: Sequence[int]) -> float:
        consts = self._trials.program.consts

        def errors(direction: int) -> tuple[Errors, float]:
            found = [moved(i, x, direction) if i in inputs else x for i, x in enumerate(consts)]
            return self._trials.errors_of(found)

        return max(max(largest(gradients), loss) for gradients, loss in map(errors, (1, -1)))

    def describe(self, i: int, error: float) -> CoarseInput:
        x = self._program.consts[i]
        return CoarseInput(self._program.names[i], x.dtype, x.shape, self._readers[i], error)
