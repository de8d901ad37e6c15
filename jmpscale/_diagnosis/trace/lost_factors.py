"""Finds float32 parameters that a step rounds to half precision to multiply them by a constant that is 1 there.

A decay of 0.99999 is 1 in bfloat16, in the comparison, too. If the constant is meant to be 1, the cast still rounds the
parameters in each step, so the line is wrong in either case.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.trace.operations import constant_scalar, moves_values, narrow_dtype
from jmpscale._diagnosis.trace.program import Leaf, Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller


class LostFactor(NamedTuple):
    """A parameter that is multiplied by 1 in half precision."""

    result: Result
    dtype: np.dtype  # of the multiplication
    line: str


class _Value(NamedTuple):
    """The value of a leaf, or a sum with it; and the multiplication by 1 through which it has passed."""

    leaf: int
    dtype: np.dtype | None = None
    line: str = ""


def find_lost_factors(jaxpr: core.Jaxpr, leaves: Sequence[Leaf]) -> list[LostFactor]:
    """Returns the parameters in float32 whose new value is such a product."""

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        name, dtype = eqn.primitive.name, narrow_dtype(eqn.outvars[0])
        if name == "mul" and dtype and 1.0 in map(constant_scalar, eqn.invars):
            return [frozenset(x._replace(dtype=dtype, line=caller.line_of(eqn)) for x in flow.union(operands))]
        if name == "sub":
            return [operands[0]]
        keeps = name in {"add", "convert_element_type"} or moves_values(eqn)
        return flow.of_operands(eqn, caller, operands if keeps else [])

    wide = {x.input: i for i, x in enumerate(leaves) if x.is_parameter and not is_narrow(x.result)}
    inputs = [frozenset([_Value(wide[i])]) if i in wide else flow.NONE for i in range(len(jaxpr.invars))]
    outputs = flow.follow(jaxpr, rule, inputs=inputs)
    return [
        LostFactor(leaves[x.leaf].result, x.dtype, x.line)
        for i in wide.values()
        for x in outputs[leaves[i].output]
        if x.leaf == i and x.dtype is not None
    ]
