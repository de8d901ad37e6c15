"""What is in half precision before a step begins: a comparison of two runs of the step takes it as exact."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.trace.operations import moves_values, of_moved
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller


class Rounded(NamedTuple):
    """An argument of a step, or a constant, in half precision."""

    name: str  # such as `batch['t']`; empty for a constant
    value: jax.Array
    line: str  # the first one that computes with it

    @property
    def max_abs(self) -> float:
        return float(jnp.abs(self.value.astype(np.float32)).max(initial=0.0))

    @property
    def are_integers(self) -> bool:
        """Whether all values are integers or infinite, as in a mask."""
        x = self.value.astype(np.float32)
        return bool((x == jnp.round(x)).all())

    @property
    def are_large_integers(self) -> bool:
        """Whether all values are integers, and neighbors of the largest one have no number of their own.

        An array of two different values is a mask, whose neighbors do not matter.
        """
        exact = 2.0 ** (jnp.finfo(self.value.dtype).nmant + 1)
        return self.are_integers and exact < self.max_abs < np.inf and len(np.unique(self.value)) > 2


def find_rounded(program: Program) -> list[Rounded]:
    """Returns the arrays in half precision on which the outputs of a program depend."""
    lines: dict[int, str] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        for i in () if moves_values(eqn) else flow.union(operands):
            lines.setdefault(i, caller.line_of(eqn))
        return of_moved(eqn, caller, operands)

    narrow = [i for i, x in enumerate(program.consts) if is_narrow(x)]
    labels = [frozenset([i]) if i in narrow else flow.NONE for i in range(len(program.consts))]
    flow.follow(program.jaxpr, rule, constants=labels)
    used = [(i, program.consts[i]) for i in narrow if i in lines]
    return [Rounded(program.names[i], jnp.asarray(x), lines[i]) for i, x in used]
