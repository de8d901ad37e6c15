"""Replaces the equations of a jaxpr, and of the jaxprs that it holds, by others that define the same variables.

A rewritten jaxpr has the same inputs and outputs as the original, so the equation that holds it needs no other change.
"""

import concurrent.futures
import functools
import operator
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jmpscale._base.compat import unknown_jax
from jmpscale._programs.jaxpr import TRANSPARENT, Jaxpr, equations

RewriteEquation = Callable[[core.JaxprEqn], list[core.JaxprEqn]]
Memo = MutableMapping[Any, Any]  # a jaxpr, and the jaxpr that replaces it, if another does


def rewrite(jaxpr: core.Jaxpr, rewrite_equation: RewriteEquation, memo: Memo) -> core.Jaxpr:
    """Replaces the equations of an open jaxpr, and of the jaxprs that they hold.

    If no equation changes, the result is the same object. `rewrite_equation` returns equations that define the same
    variables, or `[eqn]` to keep the equation. `memo` has the results of earlier calls with the same
    `rewrite_equation`: a jaxpr that occurs many times is rewritten once, and its occurrences remain one object, which
    JAX compiles once.
    """

    def new_value(value: Any) -> Any:
        """Returns a jaxpr, a tuple of jaxprs (the branches of a cond), or another parameter of an equation."""
        if isinstance(value, tuple):
            new = tuple(map(new_value, value))
            return value if _same(new, value) else new
        if not isinstance(value, Jaxpr):
            return value
        if value not in memo:
            rewritten = new_jaxpr(value)
            # In a weak dictionary, a value must not keep its own key alive.
            memo[value] = None if rewritten is value else rewritten
        return memo[value] or value

    def new_jaxpr(value: Jaxpr) -> Jaxpr:
        if isinstance(value, core.Jaxpr):
            eqns = [new for eqn in value.eqns for new in rewrite_equation(new_parameters(eqn))]
            return value if _same(eqns, value.eqns) else value.replace(eqns=eqns)
        new = new_value(value.jaxpr)
        return value if new is value.jaxpr else value.replace(jaxpr=new)

    def new_parameters(eqn: core.JaxprEqn) -> core.JaxprEqn:
        if eqn.primitive.name not in TRANSPARENT:
            return eqn
        new = {name: new_value(value) for name, value in eqn.params.items()}
        return eqn if _same(new.values(), eqn.params.values()) else eqn.replace(params=new)

    return new_value(jaxpr)


def _same(new: Collection[object], old: Collection[object]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


@functools.cache
def check_primitives() -> None:
    """Raises if JAX has renamed a primitive that `rewrite` enters: matmuls in it would silently run as written."""
    mesh = jax.sharding.AbstractMesh((1,), ("axis",))
    sine = jax.shard_map(jax.checkpoint(jax.jit(jax.lax.sin)), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    # The first call may be in the context of a mesh, which a new thread does not inherit.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        traced = thread.submit(jax.make_jaxpr(sine), np.float32(1)).result()
    if not any(eqn.primitive.name == "sin" and not caller.holder for eqn, caller in equations(traced.jaxpr)):
        raise unknown_jax("primitives with the expected names")
