"""A training step, or a loss function with its gradients, as a diagnosis examines it."""

from typing import Any, NamedTuple

from jmpscale._diagnosis.trace.averages import Average
from jmpscale._diagnosis.trace.lost_factors import LostFactor
from jmpscale._diagnosis.trace.program import Program, Result
from jmpscale._diagnosis.trace.rounded import Rounded


class TracedStep(NamedTuple):
    """A training step with what it returns."""

    program: Program  # its outputs are the loss, the gradients and the results
    gradients: tuple[str, ...]  # their names
    results: tuple[Result, ...] = ()  # those that half precision may change other than through the gradients
    state: tuple[str, ...] | None = None  # the arguments that the step returns; None for a loss function
    has_loss: bool = True  # otherwise the first output is 1
    arguments: tuple[tuple[str, Any], ...] = ()  # the leaves of its arguments, with their names
    stalled: tuple[Average, ...] = ()  # averages in half precision that stop moving
    lost_factors: tuple[LostFactor, ...] = ()  # of parameters in float32
    rounded: tuple[Rounded, ...] = ()  # what is in half precision before the step begins
    ignores_scaler: bool = False  # whether no gradient depends on the scale of a dynamic scaler
    kept: tuple[str, ...] = ()  # the matmuls that autocast leaves in float32, with the reason
