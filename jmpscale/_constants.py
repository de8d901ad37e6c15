"""Finds the constants in the operands of the matmuls of a traced function.

A constant is a literal, an array that the function closes over, or an array that it computes from constants alone, such
as `jnp.arange(80_000.0)`. An operand contains a constant if it is one, or if the constant was added, selected or moved
into it, as the mask in `jnp.where(mask, scores, -1e9)`. Other operations end the search: after a softmax, a mask of
-1e9 is zero.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import PROGRAM, Caller, Traced, called_jaxpr, evaluate_equation, held_jaxprs, type_of
from jmpscale._base.tree import PyTree, is_array, is_traced

_LARGEST_SIZE = 2**20  # of the arrays that are read
_KEEPS_CONSTANTS = {"add", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "neg"}
_KEEPS_CONSTANTS |= {"pad", "reshape", "rev", "select_n", "slice", "squeeze", "stop_gradient", "sub", "transpose"}
_COMPUTES_CONSTANTS = _KEEPS_CONSTANTS | {"abs", "div", "exp", "exp2", "expm1", "integer_pow", "iota", "log", "max"}
_COMPUTES_CONSTANTS |= {"min", "mul", "pow", "sign", "sqrt", "square"}


class _Value:
    """A value in a traced program: an input, a constant, or the result of an equation.

    Attributes:
      eqn: the equation.
      operands: its operands.
      constant: the value, if it is a constant, else None. `_largest_constant` computes it.
      largest: the largest finite magnitude of a constant in the value; None if it has not been computed.
    """

    def __init__(self, eqn: core.JaxprEqn | None = None, operands: Sequence["_Value"] = (), constant: Any = None):
        self.eqn, self.operands, self.constant = eqn, operands, constant
        self.largest: float | None = None

    @property
    def primitive(self) -> str:
        return self.eqn.primitive.name if self.eqn else ""

    def compute(self) -> None:
        """Computes `constant` and `largest`, which the operands must have."""
        operands = [x.constant for x in self.operands]
        if self.eqn is not None and _computes_constant(self.eqn) and all(x is not None for x in operands):
            self.constant = _evaluate(self.eqn, operands)
        if self.constant is not None:
            self.largest = _magnitude(self.constant)
        elif self.primitive in _KEEPS_CONSTANTS:
            self.largest = max((x.largest or 0.0 for x in self.operands), default=0.0)
        else:
            self.largest = 0.0


_UNKNOWN = _Value()


def _largest_constant(value: _Value) -> float:
    """Returns the largest finite magnitude of a constant in a value, or 0."""
    stack = [value]  # a recursion could be too deep
    while stack:
        last = stack[-1]
        operands = last.operands if last.primitive in _COMPUTES_CONSTANTS else ()
        if missing := [x for x in operands if x.largest is None]:
            stack += missing
        else:
            stack.pop()
            if last.largest is None:
                last.compute()
    return value.largest or 0.0


def _computes_constant(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in _COMPUTES_CONSTANTS or len(eqn.outvars) != 1:
        return False
    shape = type_of(eqn.outvars[0]).shape
    is_known = all(isinstance(size, int) for size in shape)  # not a symbol of jax.export
    return is_known and math.prod(shape) <= _LARGEST_SIZE


def _evaluate(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Any:
    # A constant such as 1 / 0 may be infinite, because a mask can hide it.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        return evaluate_equation(eqn, eqn.params, operands)[0]


def _magnitude(constant: Any) -> float:
    numbers = np.abs(np.asarray(jax.device_get(constant)).astype(np.float64))
    return float(np.max(numbers, where=np.isfinite(numbers), initial=0.0))


def constants_of_operands(
    traced: Traced, args: PyTree, matches: Callable[[core.JaxprEqn], bool]
) -> Iterator[tuple[str, float]]:
    """Yields the lines of equations that match, with the largest finite magnitude of a constant in the two operands.

    Args:
      traced: the traced call of a function.
      args: the arguments of the function, which are not constants.
      matches: tests whether an equation is a matmul to look at.

    Yields:
      A source line and a number, 0 if the operands contain no constant.
    """
    arguments = {id(leaf) for leaf in jax.tree.leaves(args)}
    inputs = [_Value(constant=None if id(x) in arguments else _read(x)) for x in traced.inputs]
    known = dict(zip(traced.jaxpr.constvars, inputs, strict=True))
    for eqn, caller, operands in _equations(traced.jaxpr, known, PROGRAM):
        if matches(eqn):
            yield caller.line_of(eqn), max(map(_largest_constant, operands[:2]))


def _read(x: Any) -> Any:
    """Returns an array of numbers whose values are cheap to read, or None."""
    if is_traced(x) or not is_array(x) or x.size > _LARGEST_SIZE or not jnp.issubdtype(x.dtype, np.number):
        return None
    return x if getattr(x, "is_fully_addressable", True) else None


def _equations(
    jaxpr: core.Jaxpr, known: dict[Any, _Value], caller: Caller
) -> Iterator[tuple[core.JaxprEqn, Caller, list[_Value]]]:
    """Yields all equations with their callers and operands, and defines the values of their results in `known`."""
    for eqn in jaxpr.eqns:
        operands = [_value_of(x, known) for x in eqn.invars]
        yield eqn, caller, operands
        if (called := called_jaxpr(eqn)) is None:
            for body in held_jaxprs(eqn):
                yield from _equations(body, {}, caller.inside(eqn))
            known.update((x, _Value(eqn, operands)) for x in eqn.outvars)
        else:
            body, constants = called
            inside = dict(zip(body.constvars, (_Value(constant=_read(x)) for x in constants), strict=True))
            inside.update(zip(body.invars, operands, strict=True))
            yield from _equations(body, inside, caller.inside(eqn))
            known.update(zip(eqn.outvars, (_value_of(x, inside) for x in body.outvars), strict=True))


def _value_of(x: Any, known: dict[Any, _Value]) -> _Value:
    return _Value(constant=x.val) if isinstance(x, core.Literal) else known.get(x, _UNKNOWN)
