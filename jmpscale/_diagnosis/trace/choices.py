"""What a step chooses by random numbers that it draws in half precision."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._diagnosis.trace.operations import moves_values, narrow_dtype
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of

COMPARISONS = {"lt", "le", "gt", "ge"}
_BITS = {"random_bits", "rng_bit_generator"}
# The results of these primitives have no more different values than the random numbers, of which each one makes one.
_ONE_BY_ONE = {"abs", "add", "and", "bitcast_convert_type", "clamp", "convert_element_type", "div", "erf", "erf_inv"}
_ONE_BY_ONE |= {"exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "or"}
_ONE_BY_ONE |= {"pow", "rsqrt", "shift_right_logical", "sign", "sqrt", "square", "sub", "tanh"}


class Draw(NamedTuple):
    """Random numbers that are drawn in half precision."""

    line: str
    dtype: np.dtype | None = None  # None for random bits
    is_alone: bool = True  # whether they were only combined with scalars, so that all have one distribution

    @property
    def distinct(self) -> int:
        """How many of them differ: JAX draws the digits of a number between 1 and 2, and subtracts 1."""
        return 2 ** int(jnp.finfo(self.dtype).nmant)


class Choice(NamedTuple):
    """A comparison with random numbers in half precision, or a choice of the largest or the smallest ones."""

    draw: Draw
    operation: str  # the name of JAX's primitive
    line: str
    candidates: int  # the number of values of which the largest or smallest are chosen; 0 for a comparison


def find_choices(jaxpr: core.Jaxpr) -> list[Choice]:
    """Returns what a program chooses by random numbers in half precision."""
    found: dict[Choice, None] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        if eqn.primitive.name in _BITS:
            return [frozenset([Draw(caller.line_of(eqn))]) if _is_short(x) else flow.NONE for x in eqn.outvars]
        line, count = caller.line_of(eqn), _count_candidates(eqn)
        draws = [x for x in flow.union(_deciding(eqn, operands)) if x.dtype and (count or x.is_alone)]
        found.update(dict.fromkeys(Choice(x, eqn.primitive.name, line, count) for x in sorted(draws)))
        return [_of_result(x, eqn, operands) for x in eqn.outvars]

    flow.follow(jaxpr, rule)
    return list(found)


def _is_short(x: core.Var) -> bool:
    dtype = getattr(type_of(x), "dtype", None)
    return dtype in (np.uint8, np.uint16)


def _deciding(eqn: core.JaxprEqn, operands: Sequence[flow.Labels]) -> Sequence[flow.Labels]:
    """Returns the labels of the operands that decide what an operation chooses; none if it does not choose."""
    name = eqn.primitive.name
    if name in COMPARISONS:
        return operands
    if name == "sort":
        return operands[: eqn.params["num_keys"]]
    return operands[:1] if name in {"argmax", "argmin", "top_k", "approx_top_k"} else []


def _count_candidates(eqn: core.JaxprEqn) -> int:
    """Returns the number of values of which an operation chooses the largest or the smallest ones, or 0."""
    axes = {
        "argmax": lambda params: params["axes"],
        "argmin": lambda params: params["axes"],
        "top_k": lambda params: (params.get("axis", -1),),
        "approx_top_k": lambda params: (params["reduction_dimension"],),
        "sort": lambda params: (params["dimension"],),
    }.get(eqn.primitive.name)
    return math.prod(type_of(eqn.invars[0]).shape[i] for i in axes(eqn.params)) if axes else 0


def _of_result(x: core.Var, eqn: core.JaxprEqn, operands: Sequence[flow.Labels]) -> flow.Labels:
    labels, dtype = flow.union(operands), narrow_dtype(x)
    if moves_values(eqn):
        return labels
    if eqn.primitive.name == "bitcast_convert_type":
        return frozenset(Draw(draw.line, dtype) for draw in labels) if dtype else flow.NONE
    if eqn.primitive.name not in _ONE_BY_ONE:
        return flow.NONE
    pairs = zip(eqn.invars, operands, strict=True)
    if all(found or type_of(y).size == 1 for y, found in pairs):
        return labels
    # A sum with other numbers in float32 has more values.
    return frozenset(draw._replace(is_alone=False) for draw in labels) if dtype else flow.NONE
