"""Keeps the derivative rules of a program that is run by another rule for its operations."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._programs.float32 import evaluate_equation
from jmpscale._programs.interpret import Interpreter
from jmpscale._programs.jaxpr import Caller, type_of

Run = Callable[..., list[Any]]
Evaluate = Callable[[core.ClosedJaxpr, Sequence[Any]], list[Any]]


class DifferentiableInterpreter(Interpreter):
    """Runs a program by a rule, such that the result can be differentiated like the program. It records nothing.

    `jax.custom_jvp` and `jax.custom_vjp` functions keep their derivatives, whose operations run by the same rule, and
    what `jax.checkpoint` recomputes is recomputed.
    """

    def _call(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        def run(*inputs: Any) -> list[Any]:
            return super(DifferentiableInterpreter, self)._call(eqn, list(inputs), inside)

        name = eqn.primitive.name
        if name == "custom_jvp_call":
            return _with_jvp(eqn, run, self._evaluate)(*inputs)
        if name == "custom_vjp_call":
            return _with_vjp(eqn, run, self._evaluate)(*inputs)
        return _recomputed(eqn, run)(*inputs) if name == "remat2" else run(*inputs)

    def _evaluate(self, program: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        return self.evaluate(program, inputs)[0]


def _with_jvp(eqn: core.JaxprEqn, run: Run, evaluate: Evaluate) -> Run:
    """Returns a function with the derivative rule of a `jax.custom_jvp` function, which `evaluate` runs."""
    call = jax.custom_jvp(run)

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        real = [x for x, primal in zip(tangents, primals, strict=True) if _is_inexact(primal)]

        def written(primals: list[Any], tangents: list[Any]) -> list[Any]:
            given, fun = _of_inexact(eqn, primals)
            outputs, changes = jax.jvp(fun, given, tangents)
            return [*outputs, *filter(_is_inexact, changes)]

        of_real = [x for x, primal in zip(eqn.invars, primals, strict=True) if _is_inexact(primal)]
        program = jax.make_jaxpr(written)(_as_types(eqn.invars, primals), _as_types(of_real, real))
        found = evaluate(program, [*primals, *real])
        count = len(eqn.outvars)
        changes = iter(found[count:])
        return found[:count], [next(changes) if _is_inexact(y) else _no_tangent(y) for y in found[:count]]

    return call


def _with_vjp(eqn: core.JaxprEqn, run: Run, evaluate: Evaluate) -> Run:
    """Returns a function with the derivative rule of a `jax.custom_vjp` function, which `evaluate` runs."""
    call = jax.custom_vjp(run)
    structure: Any = None  # of the function that `jax.vjp` returns, whose leaves are the residuals
    types: list[Any] = []  # of the residuals

    def forward(*inputs: Any) -> tuple[list[Any], list[Any]]:
        nonlocal structure, types

        def written(*inputs: Any) -> tuple[list[Any], list[Any]]:
            nonlocal structure
            given, fun = _of_inexact(eqn, inputs)
            outputs, pull_back = jax.vjp(fun, *given)
            residuals, structure = jax.tree.flatten(pull_back)
            return outputs, residuals

        program, (_, types) = jax.make_jaxpr(written, return_shape=True)(*_as_types(eqn.invars, inputs))
        found = evaluate(program, inputs)
        count = len(eqn.outvars)
        return found[:count], found[count:]

    def backward(residuals: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        real = [x for x, out in zip(cotangents, eqn.outvars, strict=True) if _is_inexact(type_of(out))]

        def written(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
            given = iter(cotangents)
            all_outputs = map(type_of, eqn.outvars)
            return jax.tree.unflatten(structure, residuals)(
                [next(given) if _is_inexact(out) else _no_tangent(out) for out in all_outputs]
            )

        of_real = [out for out in eqn.outvars if _is_inexact(type_of(out))]
        program = jax.make_jaxpr(written)(_as_types(types, residuals), _as_types(of_real, real))
        found = iter(evaluate(program, [*residuals, *real]))
        return tuple(next(found) if _is_inexact(type_of(x)) else None for x in eqn.invars)

    call.defvjp(forward, backward)
    return call


def _recomputed(eqn: core.JaxprEqn, run: Run) -> Run:
    """Returns a function that JAX recomputes in the backward pass, or that belongs to one, in which it recomputes."""
    prevent_cse = eqn.params["prevent_cse"]
    if not eqn.params["differentiated"]:
        return jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=prevent_cse)
    # Otherwise the compiler would take the values from the forward pass, and keep them until the backward pass.
    return (lambda *inputs: run(*jax.lax.optimization_barrier(inputs))) if prevent_cse else run


def _of_inexact(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> tuple[list[Any], Run]:
    """Returns the inputs of an equation that have derivatives, and its results as a function of them."""

    def fun(*given: Any) -> list[Any]:
        values = iter(given)
        return evaluate_equation(eqn, [next(values) if _is_inexact(x) else x for x in inputs])

    return list(filter(_is_inexact, inputs)), fun


def _as_types(types: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns arrays in the half-precision dtypes of types, or of variables, which the values represent in float32."""
    dtypes = [getattr(x, "dtype", None) or type_of(x).dtype for x in types]
    narrow = [is_narrow(jax.ShapeDtypeStruct((), dtype)) for dtype in dtypes]
    return [x.astype(dtype) if flag else x for x, dtype, flag in zip(values, dtypes, narrow, strict=True)]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


def _no_tangent(x: Any) -> np.ndarray:
    """Returns what stands for the derivative of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)
