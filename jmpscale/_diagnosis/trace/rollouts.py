"""Runs loops before the gradients, such as the rollout of an environment, once, and not in every trial."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.tree import is_inexact
from jmpscale._diagnosis.trace.operations import narrow_dtype
from jmpscale._diagnosis.trace.program import Program, without_dead_code
from jmpscale._programs.compile import compiled_jaxpr
from jmpscale._programs.jaxpr import equations, held_jaxprs
from jmpscale._programs.scopes import is_backward, is_differentiated

_LOOPS = {"scan", "while"}


def run_rollouts(program: Program) -> Program:
    """Returns a program that has the results of loops in place of the loops, if these are finite.

    The loops have the same results in every trial: they depend neither on the loss scale nor on a result in half
    precision, and no derivative is taken in them, or of them.
    """
    loops = _find_loops(program.jaxpr)
    read = {x for eqn in program.jaxpr.eqns for x in eqn.invars if isinstance(x, core.Var)}
    read.update(x for x in program.jaxpr.outvars if isinstance(x, core.Var))
    variables = [x for eqn in loops for x in eqn.outvars if x in read]
    if not variables:
        return program
    first = _first_of_equal(loops)
    needed = list(dict.fromkeys(first.get(x, x) for x in variables))
    found = dict(zip(needed, _evaluate(program, needed), strict=True))
    values = [found[first.get(x, x)] for x in variables]
    if not all(bool(jnp.isfinite(x).all()) for x in values if is_inexact(x)):
        return program
    jaxpr, removed = program.jaxpr, set(map(id, loops))
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in removed]
    consts, names = [*program.consts, *values], (*program.names, *[""] * len(values))
    # In JAX 0.12, the variables of constants that are not attached are inputs.
    closed = core.ClosedJaxpr(jaxpr.replace(constvars=[*jaxpr.constvars, *variables], eqns=eqns), consts)
    return Program(without_dead_code(closed.jaxpr), consts, names)


def _first_of_equal(loops: list[core.JaxprEqn]) -> dict[Any, Any]:
    """Returns the result of the first equal loop for each result: a step that is cut may have a loop twice."""
    first: dict[Any, core.JaxprEqn] = {}
    found: dict[Any, Any] = {}
    for eqn in loops:
        bodies = tuple(map(id, held_jaxprs(eqn)))
        operands = tuple(id(x) if isinstance(x, core.Literal) else x for x in eqn.invars)
        equal = first.setdefault((bodies, operands), eqn)
        found.update(zip(eqn.outvars, equal.outvars, strict=True))
    return found


def _find_loops(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    varying: set[Any] = set(jaxpr.invars)  # the loss scale, and what depends on it or is in half precision
    loops = []
    for eqn in jaxpr.eqns:
        depends = any(isinstance(x, core.Var) and x in varying for x in eqn.invars)
        if depends or eqn.effects or is_differentiated(eqn) or _computes_in_half_or_differentiates(eqn):
            varying.update(eqn.outvars)
        elif eqn.primitive.name in _LOOPS:
            loops.append(eqn)
    return loops


def _computes_in_half_or_differentiates(eqn: core.JaxprEqn) -> bool:
    inner = [x for held in held_jaxprs(eqn) for x, _ in equations(held)]
    return any(is_backward(x) or any(map(narrow_dtype, x.outvars)) for x in (eqn, *inner))


def _evaluate(program: Program, variables: list[Any]) -> list[Any]:
    """Returns the values of variables of a program, which do not depend on the loss scale."""
    return compiled_jaxpr(program.with_outputs(variables).jaxpr)(program.consts, np.float32(1.0))
