"""Finds the constants in the operands of the matmuls of a traced function.

A constant is a literal, an array that the function closes over, or an array that it computes from constants alone, such
as `jnp.arange(80_000.0)`. An operand contains a constant if it is one, or if the constant was added, selected or moved
into it, as the mask in `jnp.where(mask, scores, -1e9)`. Other operations end the search: after a softmax, a mask of
-1e9 is zero.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import Traced, called_jaxpr, evaluate_equation, held_jaxprs, type_of
from jmpscale._base.tree import PyTree, is_array, is_traced

_LARGEST_SIZE = 2**20  # of the arrays that are read
_MOVES = {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "pad"}
_MOVES |= {"reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"}
_KEEPS_CONSTANTS = _MOVES | {"add", "sub", "neg", "select_n"}
_COMPUTES_CONSTANTS = _KEEPS_CONSTANTS | {"abs", "div", "exp", "exp2", "expm1", "integer_pow", "iota", "log", "max"}
_COMPUTES_CONSTANTS |= {"min", "mul", "pow", "sign", "sqrt", "square"}


class _Value:
    """A value in a traced program: an input, a constant, or the result of an equation."""

    def __init__(self, eqn: core.JaxprEqn | None = None, operands: Sequence["_Value"] = (), constant: Any = None):
        self.eqn, self.operands, self._constant = eqn, operands, constant

    @functools.cached_property
    def constant(self) -> Any:
        """The value, if it is a constant, else None."""
        if self.eqn is None or self.eqn.primitive.name not in _COMPUTES_CONSTANTS or len(self.eqn.outvars) != 1:
            return self._constant
        if type_of(self.eqn.outvars[0]).size > _LARGEST_SIZE:
            return None
        operands = [x.constant for x in self.operands]
        if any(x is None for x in operands):
            return None
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return evaluate_equation(self.eqn, self.eqn.params, operands)[0]

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite magnitude of a constant in the value, or 0."""
        if self.constant is not None:
            return _largest(self.constant)
        if self.eqn is None or self.eqn.primitive.name not in _KEEPS_CONSTANTS:
            return 0.0
        return max((x.largest for x in self.operands), default=0.0)


_UNKNOWN = _Value()


def _largest(constant: Any) -> float:
    numbers = np.abs(np.asarray(jax.device_get(constant)).astype(np.float64))
    return float(np.max(numbers, where=np.isfinite(numbers), initial=0.0))


def constants_of_operands(
    traced: Traced, args: PyTree, matches: Callable[[core.JaxprEqn], bool]
) -> Iterator[tuple[core.JaxprEqn, float]]:
    """Yields the equations that match, each with the largest finite magnitude of a constant in its two operands.

    Args:
      traced: the traced call of a function.
      args: the arguments of the function, which are not constants.
      matches: tests whether an equation is a matmul to look at.

    Yields:
      An equation and a number, 0 if its operands contain no constant.
    """
    arguments = {id(leaf) for leaf in jax.tree.leaves(args)}
    inputs = [_Value(constant=None if id(x) in arguments else _read(x)) for x in traced.inputs]
    known = dict(zip(traced.jaxpr.constvars, inputs, strict=True))
    for eqn, operands in _equations(traced.jaxpr, known):
        if matches(eqn):
            yield eqn, max(x.largest for x in operands[:2])


def _read(x: Any) -> Any:
    """Returns an array of numbers whose values are cheap to read, or None."""
    if is_traced(x) or not is_array(x) or x.size > _LARGEST_SIZE or not jnp.issubdtype(x.dtype, np.number):
        return None
    return x if getattr(x, "is_fully_addressable", True) else None


def _equations(jaxpr: core.Jaxpr, known: dict[Any, _Value]) -> Iterator[tuple[core.JaxprEqn, list[_Value]]]:
    """Yields all equations with their operands, and defines the values of their results in `known`."""
    for eqn in jaxpr.eqns:
        operands = [_value_of(x, known) for x in eqn.invars]
        yield eqn, operands
        if (called := called_jaxpr(eqn)) is None:
            for body in held_jaxprs(eqn):
                yield from _equations(body, {})
            known.update((x, _Value(eqn, operands)) for x in eqn.outvars)
        else:
            body, constants = called
            inside = dict(zip(body.constvars, (_Value(constant=_read(x)) for x in constants), strict=True))
            inside.update(zip(body.invars, operands, strict=True))
            yield from _equations(body, inside)
            known.update(zip(eqn.outvars, (_value_of(x, inside) for x in body.outvars), strict=True))


def _value_of(x: Any, known: dict[Any, _Value]) -> _Value:
    return _Value(constant=x.val) if isinstance(x, core.Literal) else known.get(x, _UNKNOWN)
