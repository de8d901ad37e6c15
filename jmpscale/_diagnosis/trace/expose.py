"""Evaluates a training step with the same operations, so that its gradients and scaled losses are results, too.

The gradients of a loop are sums over its iterations.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.compat import as_varying, axes_of_shard_map, full_like, in_current_mesh
from jmpscale._diagnosis.trace.gradients import Gradients
from jmpscale._programs.float32 import evaluate_equation
from jmpscale._programs.jaxpr import called_jaxpr, closed, split_scan_inputs, split_while_inputs, type_of

Place = tuple[int, ...]  # the identities of the calls around a value that is computed once, and of what computes it


class Exposed(NamedTuple):
    """A gradient, or a loss that is scaled."""

    variable: Any  # of the program
    is_loss: bool
    value: Any = None  # the sum over the iterations of the loops that compute it


class Evaluated(NamedTuple):
    """The values of a program, and of what it computes on the way."""

    outputs: list[Any]
    gradients: list[Exposed]
    losses: list[Exposed]  # that are scaled
    # Gradients and losses outside of loops, branches and `jax.shard_map`, and the operands of those that contain some.
    given: dict[Place, list[Any]]


def evaluate(program: core.ClosedJaxpr, inputs: Sequence[Any], gradients: Gradients) -> Evaluated:
    """Evaluates a program, with the same operations."""
    evaluation = _Evaluation(gradients)
    outputs, found = evaluation.run(program, inputs, ())
    return Evaluated(outputs, [x for x in found if not x.is_loss], [x for x in found if x.is_loss], evaluation.given)


class _Evaluation:
    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.given: dict[Place, list[Any]] = {}

    def run(
        self, program: core.ClosedJaxpr, inputs: Iterable[Any], place: Place | None = None
    ) -> tuple[list[Any], list[Exposed]]:
        """Returns the outputs, and what is exposed; `place` is given for a program that runs once."""
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        wanted, losses = self._gradients.variables(jaxpr)
        found: list[Exposed] = []

        def read(x: Any) -> Any:
            return np.asarray(x.val, type_of(x).dtype) if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            if self._gradients.are_in(eqn):
                results, inner = self._holder(eqn, list(map(read, eqn.invars)), place)
                found += inner
            else:
                results = evaluate_equation(eqn, [x if isinstance(x, core.Literal) else values[x] for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            for x in eqn.outvars:
                if x in wanted or x in losses:
                    found.append(Exposed(x, x in losses, values[x]))
                if (x in wanted or x in losses) and place is not None:
                    self.given[(*place, id(x))] = [values[x]]
        return list(map(read, jaxpr.outvars)), [x._replace(value=in_current_mesh(x.value)) for x in found]

    def _holder(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place | None) -> tuple[list[Any], list[Exposed]]:
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        run = special.get(eqn.primitive.name)
        inner = None if place is None else (*place, id(eqn))
        if run and inner is not None:
            self.given[inner] = inputs
        with eqn.ctx.manager:
            return run(eqn, inputs) if run else self.run(called_jaxpr(eqn), inputs, inner)

    def _with_sums(
        self, body: core.ClosedJaxpr, *inputs: Any
    ) -> tuple[list[Exposed], list[jax.Array], Callable[..., tuple[list[Any], list[jax.Array]]]]:
        """Returns what a body exposes, without values, zeros for their sums, and a function that adds to sums."""
        exposed: list[Exposed] = []

        def values(*inputs: Any) -> list[jax.Array]:
            _, found = self.run(body, inputs)
            exposed[:] = _without_values(found)
            return [_in_float32(x.value) for x in found]

        zeros = [full_like(x, 0) for x in jax.eval_shape(values, *inputs)]

        def add(sums: Sequence[jax.Array], *inputs: Any) -> tuple[list[Any], list[jax.Array]]:
            outputs, found = self.run(body, inputs)
            return outputs, [total + _in_float32(x.value) for total, x in zip(sums, found, strict=True)]

        return exposed, zeros, add

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Exposed]]:
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        params = eqn.params
        exposed, zeros, add = self._with_sums(params["jaxpr"], *consts, *carry, *[x[0] for x in xs])

        def step(state: tuple[list[Any], list[Any]], x: list[Any]) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
            carry, sums = state
            outputs, sums = add(sums, *consts, *carry, *x)
            return (outputs[: len(carry)], sums), outputs[len(carry) :]

        (carry, sums), ys = jax.lax.scan(step, (carry, zeros), xs, length=params["length"], reverse=params["reverse"])
        return [*carry, *ys], _with_values(exposed, sums)

    def _while(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Exposed]]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        cond_consts, body_consts, carry = split_while_inputs(eqn, inputs)
        exposed, zeros, add = self._with_sums(body, *body_consts, *carry)

        def test(state: tuple[list[Any], list[Any]]) -> Any:
            return self.run(cond, [*cond_consts, *state[0]])[0][0]

        def step(state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            return add(state[1], *body_consts, *state[0])

        carry, sums = jax.lax.while_loop(test, step, (carry, zeros))
        return carry, _with_values(exposed, sums)

    def _cond(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Exposed]]:
        index, *operands = inputs
        parts = [self._with_sums(branch, *operands) for branch in eqn.params["branches"]]
        zeros = [zeros for _, zeros, _ in parts]

        def branch(i: int) -> Callable[..., tuple[list[Any], list[list[jax.Array]]]]:
            def run(*operands: Any) -> tuple[list[Any], list[list[jax.Array]]]:
                outputs, sums = parts[i][2](zeros[i], *operands)
                return outputs, [*zeros[:i], sums, *zeros[i + 1 :]]

            return run

        outputs, sums = jax.lax.switch(index, list(map(branch, range(len(parts)))), *operands)
        return outputs, [
            x for (exposed, *_), found in zip(parts, sums, strict=True) for x in _with_values(exposed, found)
        ]

    def _shard_map(self, eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Exposed]]:
        """Exposes gradients with a leading axis of the devices over which they differ, and the mean of the losses."""
        params = eqn.params
        axes = axes_of_shard_map(eqn)
        exposed: list[Exposed] = []

        def body(*args: Any) -> tuple[list[Any], list[jax.Array]]:
            outputs, found = self.run(closed(params["jaxpr"]), args)
            exposed[:] = _without_values(found)
            values = [as_varying(x.value, axes) if params["check_vma"] else x.value for x in found]
            return outputs, [x[None] for x in values]

        outputs, values = jax.shard_map(
            body,
            mesh=params["mesh"],
            axis_names=set(axes),
            check_vma=params["check_vma"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), jax.P(axes)),
        )(*inputs)
        means = [_in_float32(x).mean(0) if e.is_loss else x for x, e in zip(values, exposed, strict=True)]
        return outputs, _with_values(exposed, means)


def _without_values(found: Sequence[Exposed]) -> list[Exposed]:
    return [x._replace(value=None) for x in found]  # which are values of a trace that ends


def _with_values(exposed: Sequence[Exposed], values: Sequence[Any]) -> list[Exposed]:
    return [x._replace(value=value) for x, value in zip(exposed, values, strict=True)]


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, np.float32))
