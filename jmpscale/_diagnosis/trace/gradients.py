"""Finds the variables of a training step that hold its gradients, and its losses that are scaled.

Gradients are the results of unscaling; without it, the values that leave a backward pass.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._programs.jaxpr import ENTERED, equations, held_jaxprs, scales, type_of, unscales
from jmpscale._programs.scopes import is_backward, is_differentiated


class Gradients:
    """The variables of a program that hold gradients, or losses that are scaled."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        calls = [(eqn, caller) for eqn, caller in equations(jaxpr) if not caller.holder]
        outside = [eqn for eqn, caller in calls if not (caller.backward or is_differentiated(eqn))]
        # A gradient that the loss contains is unscaled inside of the loss, and does not count.
        self._unscaling = {id(eqn) for eqn in outside if unscales(eqn)}
        scaled = [eqn for eqn, caller in calls if scales(eqn) and not is_backward(eqn)]
        losses = [eqn.invars[1:] for eqn in scaled]  # the first operand is the scale
        self._losses = frozenset(x for group in losses for x in group if isinstance(x, core.Var) and _is_scalar_loss(x))
        self._contains: dict[int, bool] = {}  # by the identity of a jaxpr

    def variables(self, jaxpr: core.Jaxpr) -> tuple[frozenset[Any], frozenset[Any]]:
        """Returns the variables of a jaxpr that hold gradients, and those that hold losses."""
        defined = {x for eqn in jaxpr.eqns for x in eqn.outvars}
        if self._unscaling:
            found = {x for eqn in jaxpr.eqns if id(eqn) in self._unscaling for x in eqn.outvars}
        else:
            outside = {x for eqn in jaxpr.eqns if not is_differentiated(eqn) for x in _variables(eqn.invars)}
            outside.update(_variables(jaxpr.outvars))
            found = {x for eqn in jaxpr.eqns if is_backward(eqn) for x in eqn.outvars} & outside
        gradients = frozenset(x for x in found if jnp.issubdtype(type_of(x).dtype, np.inexact))
        return gradients, self._losses & defined

    def are_in(self, eqn: core.JaxprEqn) -> bool:
        """Tests whether the jaxprs that an equation holds compute gradients or losses."""
        if is_differentiated(eqn) or eqn.primitive.name not in ENTERED or unscales(eqn):
            return False
        return any(map(self._are_in_jaxpr, held_jaxprs(eqn)))

    def _are_in_jaxpr(self, jaxpr: core.Jaxpr) -> bool:
        if id(jaxpr) not in self._contains:
            self._contains[id(jaxpr)] = any(self.variables(jaxpr)) or any(map(self.are_in, jaxpr.eqns))
        return self._contains[id(jaxpr)]


def _variables(values: Iterable[Any]) -> list[Any]:
    return [x for x in values if isinstance(x, core.Var)]


def _is_scalar_loss(x: Any) -> bool:
    return type_of(x).shape == () and jnp.issubdtype(type_of(x).dtype, np.floating)
