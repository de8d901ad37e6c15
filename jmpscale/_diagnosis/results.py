"""What a training step returns: the new values of the leaves of its state, and other results."""

from typing import Any, NamedTuple

import numpy as np


class Result(NamedTuple):
    """A result of a step that is compared with float32."""

    name: str  # as Python code, such as `params['w']`
    dtype: np.dtype
    old: Any = None  # the value before the step; None if the result is not the new value of a leaf of the state
    is_gradient_led: bool = False  # whether it depends on a gradient


class Leaf(NamedTuple):
    """A leaf of the state in the program of a step."""

    result: Result
    input: int  # the position of its old value among the inputs of the program
    output: int  # the position of its new value among the outputs
    is_parameter: bool  # whether a differentiated function, or the loss, reads it


class Average(NamedTuple):
    """A moving average in half precision: its new value is its old one, times the decay, plus something else."""

    result: Result
    decay: float
