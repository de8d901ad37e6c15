"""The integers that a step makes of rounded numbers, and uses as indices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._diagnosis.thresholds import DIFFERENT_INDICES
from jmpscale._diagnosis.trace.operations import moves_values, narrow_dtype
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, Key, type_of


class Conversion(NamedTuple):
    """A conversion of floating-point numbers to integers."""

    key: Key
    line: str
    sources: frozenset[str]  # the lines that compute the numbers in half precision


def find_conversions(jaxpr: core.Jaxpr) -> list[Conversion]:
    """Returns the conversions of numbers that were computed in half precision to integers that are indices.

    An integer that becomes a floating-point number again is not an index, but a quantized value. Neither is the result
    of a comparison or an `argmax`, which may differ where two numbers are nearly equal.
    """
    used: dict[Conversion, None] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        used.update(dict.fromkeys(x for x in flow.union(_of_indices(eqn, operands)) if isinstance(x, Conversion)))
        line, labels = caller.line_of(eqn), flow.union(operands)
        lines = frozenset(x for x in labels if isinstance(x, str))
        if eqn.primitive.name == "convert_element_type" and lines and _are_many_integers(eqn.outvars[0]):
            return [frozenset([Conversion(caller.key_of(eqn), line, lines)])]

        def of_result(x: core.Var) -> flow.Labels:
            if _is_integer(x):
                return labels - lines
            if not jnp.issubdtype(_dtype(x), np.floating):
                return flow.NONE
            return lines | {line} if narrow_dtype(x) and not moves_values(eqn) else lines

        return list(map(of_result, eqn.outvars))

    flow.follow(jaxpr, rule)
    return list(used)


def _is_integer(x: core.Var) -> bool:
    return jnp.issubdtype(_dtype(x), np.integer)


def _are_many_integers(x: core.Var) -> bool:
    """Tests whether there are so many integers that one that differs by chance is a small fraction of them."""
    return _is_integer(x) and type_of(x).size * DIFFERENT_INDICES > 1


def _dtype(x: core.Var) -> Any:
    return getattr(type_of(x), "dtype", None)


def _of_indices(eqn: core.JaxprEqn, operands: Sequence[flow.Labels]) -> Sequence[flow.Labels]:
    """Returns the labels of the operands that are indices."""
    name = eqn.primitive.name
    if name == "gather" or name.startswith("scatter"):
        return operands[1:2]
    if name in {"dynamic_slice", "dynamic_update_slice"}:
        return operands[1 if name == "dynamic_slice" else 2 :]
    return operands if name == "eq" else []  # as in `jax.nn.one_hot`
