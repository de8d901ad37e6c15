"""Finds the gradients that a training step computes, and makes them outputs of its program.

They are the results of unscaling; without it, the values that leave a backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.compat import as_varying, axes_of_shard_map, full_like
from jmpscale._base.jaxpr import (
    ENTERED,
    called_jaxpr,
    calls_compiled,
    closed,
    equations,
    held_jaxprs,
    split_scan_inputs,
    split_while_inputs,
    type_of,
)
from jmpscale._base.source import is_backward, is_differentiated
from jmpscale._interpreter.float32 import evaluate_equation

_UNSCALING, _SCALING = "unscale_leaves", "_scale_leaves"  # the compiled functions of `unscale` and `scale`


class Exposed(NamedTuple):
    """The value of a variable of the program: the sum over the iterations of the loops that compute it."""

    variable: Any
    value: Any


class Gradients:
    """The variables of a program that hold gradients, or losses that are scaled, by identity."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        calls = [(eqn, caller) for eqn, caller in equations(jaxpr) if not caller.holder]
        outside = [eqn for eqn, caller in calls if not (caller.backward or is_differentiated(eqn))]
        # Not those of a gradient that the loss contains.
        self._unscaling = {id(eqn) for eqn in outside if calls_compiled(eqn, _UNSCALING)}
        losses = [eqn.invars for eqn, caller in calls if calls_compiled(eqn, _SCALING) and not is_backward(eqn)]
        self._losses = {x for operands in losses for x in operands if isinstance(x, core.Var) and _is_scalar_loss(x)}
        self._contains: dict[int, bool] = {}  # by the identity of a jaxpr

    def variables(self, jaxpr: core.Jaxpr) -> tuple[set[Any], set[Any]]:
        """Returns the variables of a jaxpr that hold gradients, and those that hold losses."""
        defined = {x for eqn in jaxpr.eqns for x in eqn.outvars}
        if self._unscaling:
            found = {x for eqn in jaxpr.eqns if id(eqn) in self._unscaling for x in eqn.outvars}
        else:
            outside = {x for eqn in jaxpr.eqns if not is_differentiated(eqn) for x in _variables(eqn.invars)}
            outside.update(_variables(jaxpr.outvars))
            found = {x for eqn in jaxpr.eqns if is_backward(eqn) for x in eqn.outvars} & outside
        return {x for x in found if jnp.issubdtype(type_of(x).dtype, np.inexact)}, self._losses & defined

    def are_in(self, eqn: core.JaxprEqn) -> bool:
        """Tests whether the jaxprs that an equation holds compute gradients or losses."""
        if is_differentiated(eqn) or eqn.primitive.name not in ENTERED or calls_compiled(eqn, _UNSCALING):
            return False
        return any(map(self._are_in_jaxpr, held_jaxprs(eqn)))

    def _are_in_jaxpr(self, jaxpr: core.Jaxpr) -> bool:
        if id(jaxpr) not in self._contains:
            self._contains[id(jaxpr)] = any(self.variables(jaxpr)) or any(map(self.are_in, jaxpr.eqns))
        return self._contains[id(jaxpr)]


def evaluate(program: core.ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], list[Exposed], list[Exposed]]:
    """Evaluates a program, with the same operations; returns its outputs, its gradients and its scaled losses."""
    gradients = Gradients(program.jaxpr)
    outputs, found = _Evaluation(gradients).run(program, inputs)
    return outputs, [x for x, is_loss in found if not is_loss], [x for x, is_loss in found if is_loss]


_Found = list[tuple[Exposed, bool]]  # whether it is a loss


class _Evaluation:
    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def run(self, program: core.ClosedJaxpr, inputs: Iterable[Any]) -> tuple[list[Any], _Found]:
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        wanted, losses = self._gradients.variables(jaxpr)
        found: _Found = []

        def read(x: Any) -> Any:
            return np.asarray(x.val, type_of(x).dtype) if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            if self._gradients.are_in(eqn):
                results, inner = self._holder(eqn, list(map(read, eqn.invars)))
                found += inner
            else:
                results = evaluate_equation(eqn, [x if isinstance(x, core.Literal) else values[x] for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            for x in eqn.outvars:
                if x in wanted or x in losses:
                    found.append((Exposed(x, values[x]), x in losses))
        return list(map(read, jaxpr.outvars)), found

    def _holder(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], _Found]:
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        run = special.get(eqn.primitive.name)
        return run(eqn, inputs) if run else self.run(called_jaxpr(eqn), inputs)

    def _with_sums(
        self, body: core.ClosedJaxpr, *inputs: Any
    ) -> tuple["_Labels", list[jax.Array], Callable[..., tuple[list[Any], list[jax.Array]]]]:
        """Returns what the gradients in a body are, zeros for their sums, and a function that adds to sums."""
        labels: _Labels = []

        def exposed(*inputs: Any) -> list[jax.Array]:
            _, found = self.run(body, inputs)
            labels[:] = [(x.variable, is_loss) for x, is_loss in found]
            return [_in_float32(x.value) for x, _ in found]

        zeros = [full_like(x, 0) for x in jax.eval_shape(exposed, *inputs)]

        def add(sums: Sequence[jax.Array], *inputs: Any) -> tuple[list[Any], list[jax.Array]]:
            outputs, found = self.run(body, inputs)
            return outputs, [total + _in_float32(x.value) for total, (x, _) in zip(sums, found, strict=True)]

        return labels, zeros, add

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], _Found]:
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        params = eqn.params
        labels, zeros, add = self._with_sums(params["jaxpr"], *consts, *carry, *[x[0] for x in xs])

        def step(state: tuple[list[Any], list[Any]], x: list[Any]) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
            carry, sums = state
            outputs, sums = add(sums, *consts, *carry, *x)
            return (outputs[: len(carry)], sums), outputs[len(carry) :]

        (carry, sums), ys = jax.lax.scan(step, (carry, zeros), xs, length=params["length"], reverse=params["reverse"])
        return [*carry, *ys], _exposed(labels, sums)

    def _while(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], _Found]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        cond_consts, body_consts, carry = split_while_inputs(eqn, inputs)
        labels, zeros, add = self._with_sums(body, *body_consts, *carry)

        def test(state: tuple[list[Any], list[Any]]) -> Any:
            return self.run(cond, [*cond_consts, *state[0]])[0][0]

        def step(state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            return add(state[1], *body_consts, *state[0])

        carry, sums = jax.lax.while_loop(test, step, (carry, zeros))
        return carry, _exposed(labels, sums)

    def _cond(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], _Found]:
        index, *operands = inputs
        parts = [self._with_sums(branch, *operands) for branch in eqn.params["branches"]]
        zeros = [zeros for _, zeros, _ in parts]

        def branch(i: int) -> Callable[..., tuple[list[Any], list[list[jax.Array]]]]:
            def run(*operands: Any) -> tuple[list[Any], list[list[jax.Array]]]:
                outputs, sums = parts[i][2](zeros[i], *operands)
                return outputs, [*zeros[:i], sums, *zeros[i + 1 :]]

            return run

        outputs, sums = jax.lax.switch(index, list(map(branch, range(len(parts)))), *operands)
        return outputs, [x for (labels, *_), found in zip(parts, sums, strict=True) for x in _exposed(labels, found)]

    def _shard_map(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], _Found]:
        """Exposes gradients with a leading axis of the devices over which they differ, and the mean of the losses."""
        params = eqn.params
        axes = axes_of_shard_map(eqn)
        labels: _Labels = []

        def body(*args: Any) -> tuple[list[Any], list[jax.Array]]:
            outputs, found = self.run(closed(params["jaxpr"]), args)
            labels[:] = [(x.variable, is_loss) for x, is_loss in found]
            values = [as_varying(x.value, axes) if params["check_vma"] else x.value for x, _ in found]
            return outputs, [x[None] for x in values]

        outputs, values = jax.shard_map(
            body,
            mesh=params["mesh"],
            axis_names=set(axes),
            check_vma=params["check_vma"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), jax.P(axes)),
        )(*inputs)
        means = [_in_float32(x).mean(0) if is_loss else x for x, (_, is_loss) in zip(values, labels, strict=True)]
        return outputs, _exposed(labels, means)


_Labels = list[tuple[Any, bool]]


def _exposed(labels: _Labels, values: Sequence[Any]) -> _Found:
    return [(Exposed(variable, value), is_loss) for (variable, is_loss), value in zip(labels, values, strict=True)]


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, np.float32))


def _variables(values: Iterable[Any]) -> list[Any]:
    return [x for x in values if isinstance(x, core.Var)]


def _is_scalar_loss(x: Any) -> bool:
    return type_of(x).shape == () and jnp.issubdtype(type_of(x).dtype, np.floating)
