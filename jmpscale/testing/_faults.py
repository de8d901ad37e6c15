"""Makes the gradients of a training step infinite, one after another.

The overflow of a real step reaches some gradients and not others. So a flag that is about some of the gradients may be
right for one batch and wrong for the next one.
"""

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jmpscale._algorithm.scaling import unscale_leaves
from jmpscale._base.compat import varying_axes
from jmpscale._base.jaxpr import Caller, equations
from jmpscale._base.multiply import multiply_leaf
from jmpscale._diagnosis.float32 import run_in_widest
from jmpscale._diagnosis.interpret import Interpreter

_MOST_GROUPS = 32  # with more gradients, neighbors become infinite together


class Faults:
    """Groups of the gradients of a program, which are the results of the compiled function that unscales them."""

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self._program = program
        # An equation in a function that the program calls twice occurs once.
        sizes = {id(eqn): len(eqn.outvars) for eqn, _ in equations(program.jaxpr) if _unscales(eqn)}
        length = math.ceil(sum(sizes.values()) / _MOST_GROUPS)
        groups = itertools.count()
        self._groups: dict[int, list[int]] = {}  # the group of each result of an equation
        for key, size in sizes.items():
            starts = {start: next(groups) for start in range(0, size, length)}
            self._groups[key] = [starts[i - i % length] for i in range(size)]
        self.count = next(groups)

    def evaluate(self, args: Sequence[Any], group: Any) -> list[Any]:
        """Returns the outputs of the program, computed in float32, if the gradients of a group are infinite.

        If an equation runs several times, as in a loop of several steps, its gradients are infinite the first time.
        """
        return _WithFault(self._groups, group).evaluate(self._program, args)[0]


class _WithFault(Interpreter):
    """Computes in float32, and makes the gradients of a group infinite."""

    def __init__(self, groups: dict[int, list[int]], group: Any) -> None:
        times_run = {i: jnp.int32(0) for i in range(len(groups))}  # the number of times that an equation has run
        super().__init__(lambda _, eqn, inputs, caller: run_in_widest(eqn, inputs), records=times_run)
        self._groups, self._group = groups, group
        self._indices = {key: i for i, key in enumerate(groups)}

    def run_equation(self, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
        outputs = super().run_equation(eqn, inputs, caller)
        if id(eqn) not in self._groups:
            return outputs
        index = self._indices[id(eqn)]
        times_run = self.records[index]
        self.record(index, times_run + 1)
        pairs = zip(outputs, self._groups[id(eqn)], strict=True)
        return [_make_infinite_if((self._group == group) & (_like(times_run, x) == 0), x) for x, group in pairs]


def _make_infinite_if(flag: jax.Array, x: jax.Array) -> jax.Array:
    """Makes a gradient infinite, with the wrong sign, or NaN where it is zero, if the flag is true."""
    return multiply_leaf(x, jnp.where(flag, -jnp.inf, 1.0))


def _like(count: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a count that varies only over the mesh axes over which `x` varies; `x` keeps its type."""
    axes = tuple(varying_axes(count) - varying_axes(x))
    return jax.lax.pmax(count, axes) if axes else count


def _unscales(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] == inspect.unwrap(unscale_leaves).__name__
