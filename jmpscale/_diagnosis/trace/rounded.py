"""What is in half precision before a step begins: a comparison of two runs of the step takes it as exact."""

from collections.abc import Sequence
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


def describe_rounded(found: Sequence[Rounded]) -> str:
    """Names what is probably rounded: integers that their dtype cannot tell apart, and constants."""
    sentences = [
        f"{x.name or 'A constant'} holds integers up to {x.max_abs:g} in {x.value.dtype}, which cannot tell neighbors "
        f"of this size apart: pass it in float32 or as integers. It is used at {x.line}."
        for x in found
        if x.are_large_integers
    ]
    constants = [x for x in found if not x.name and x.value.ndim and not x.are_integers]
    if constants:
        which = list(dict.fromkeys(f"{x.value.dtype}{list(x.value.shape)} at {x.line}" for x in constants))
        more = f" and {len(which) - 3} more" if len(which) > 3 else ""
        sentences.append(
            f"Constants in half precision were taken as they are, but may be rounded: {', '.join(which[:3])}{more}."
        )
    return " ".join(sentences)
