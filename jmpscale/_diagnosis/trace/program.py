"""A training step as a program of the loss scale, and what it returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jmpscale._base.memory import on_device
from jmpscale._programs import flow
from jmpscale._programs.compile import compiled_jaxpr


class Program(NamedTuple):
    """A training step: a program that computes the loss and the gradients, in true units, from the loss scale."""

    jaxpr: core.Jaxpr
    consts: list[Any]  # the arrays that the step depends on
    measured: int | None = None  # the number of outputs that are the loss and the gradients; None if all are

    @property
    def measured_outputs(self) -> int:
        """The number of outputs that are the loss and the gradients."""
        return len(self.jaxpr.outvars) if self.measured is None else self.measured

    def of_gradients(self) -> "Program":
        """Returns a step that computes nothing but the loss and the gradients."""
        if self.measured is None:
            return self
        wanted = [i < self.measured for i in range(len(self.jaxpr.outvars))]
        return Program(partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=True)[0], self.consts)

    def depends_on_scale(self) -> bool:
        """Tests whether the loss or a gradient depends on the loss scale, by data flow."""
        return any(flow.follow(self.of_gradients().jaxpr, inputs=[frozenset(["scale"])]))


class Result(NamedTuple):
    """A result of a step that is compared with float32."""

    name: str  # as Python code, such as `params['w']`
    dtype: np.dtype
    old: Any = None  # the value before the step; None if the result is not the new value of a leaf of the state
    is_gradient_led: bool = False  # whether it depends on a gradient
    partners: tuple[str, ...] = ()  # other leaves of its shape, if the update of each of the two reads the other one
    is_random: bool = False  # whether its update reads random numbers
    part: str = ""  # the part of the state that contains the leaf, such as `params`; empty if it is a part itself


class Leaf(NamedTuple):
    """A leaf of the state in the program of a step."""

    result: Result
    input: int  # the position of its old value among the inputs of the program
    output: int  # the position of its new value among the outputs
    is_parameter: bool  # whether a differentiated function, or the loss, reads it


def compile_as_written(program: Program) -> Callable[[float], list[Any]]:
    """Returns a function of the loss scale that returns the loss and the gradients of a step as it is written."""
    run = compiled_jaxpr(program.jaxpr)
    return lambda scale: list(map(on_device, run(program.consts, np.float32(scale))))
