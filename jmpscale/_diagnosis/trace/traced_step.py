"""A training step, or a loss function with its gradients, as a diagnosis examines it."""

from typing import Any, NamedTuple

from jmpscale._diagnosis.trace.choices import Choice
from jmpscale._diagnosis.trace.cut import UpdateProgram
from jmpscale._diagnosis.trace.program import Program, Result
from jmpscale._diagnosis.trace.scalers import StepScaler


class TracedStep(NamedTuple):
    """A training step with what it returns."""

    program: Program  # its outputs are the loss, the gradients, and what the update is given
    gradients: tuple[str, ...]  # their names
    update: UpdateProgram | None = None  # the program of the results; None for a loss function
    results: tuple[Result, ...] = ()  # those that half precision may change other than through the gradients
    exact_update: UpdateProgram | None = None  # the program of the leaves that it changes through the gradients alone
    exact_leaves: tuple[Result, ...] = ()
    state: tuple[str, ...] | None = None  # the arguments that the step returns; None for a loss function
    may_be_state: tuple[str, ...] = ()  # arguments in half precision that come back changed, and were taken for data
    has_loss: bool = True  # otherwise the first output is 1
    arguments: tuple[tuple[str, Any], ...] = ()  # the leaves of its arguments, with their names
    scalers: tuple[StepScaler, ...] = ()  # of a step; the program has a loss scale for each of several
    ignores_scaler: bool = False  # whether no gradient depends on the scale of a dynamic scaler
    choices: tuple[Choice, ...] = ()  # by random numbers in half precision
    kept: tuple[str, ...] = ()  # the matmuls that autocast leaves in float32, with the reason

    @property
    def precision(self) -> str:
        """The name of all that has fewer bits than float32: low precision if some has fewer than float16."""
        programs = [self.program, *([self.update.program] if self.update else [])]
        return "low precision" if any(x.has_below_half() for x in programs) else "half precision"

    @property
    def of_gradients(self) -> Program:
        """The program of the loss and the gradients alone."""
        return self.program.first_outputs(1 + len(self.gradients))
