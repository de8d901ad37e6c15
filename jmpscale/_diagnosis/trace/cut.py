"""Evaluates a training step with gradients that are given, so that the rest can be compared with itself in float32.

A loss that the step scales is given, too: it is compared with the gradients.

In a loop, a branch or a `jax.shard_map` that computes gradients, the step runs twice, side by side: as it is written,
which gives the gradients, and with them, times a factor. The factor is 1, except in a run with other gradients. So that
a run with other arguments has the same gradients, the step as it is written reads constants of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.as_written import as_written
from jmpscale._base.compat import axes_of_shard_map
from jmpscale._diagnosis.trace.expose import Place
from jmpscale._diagnosis.trace.gradients import Gradients
from jmpscale._diagnosis.trace.program import Program, without_dead_code
from jmpscale._programs.float32 import evaluate_equation
from jmpscale._programs.jaxpr import called_jaxpr, closed, split_scan_inputs, split_while_inputs, type_of

GIVES_GRADIENTS = "jmpscale_gives_gradients"  # the scope of the step as it is written, beside the compared one


@contextlib.contextmanager
def _gives_gradients() -> Iterator[None]:
    with as_written(), jax.named_scope(GIVES_GRADIENTS):
        yield


class UpdateProgram(NamedTuple):
    """What a step computes from its gradients, as a program whose last constants are given."""

    program: Program  # has no values of these constants
    given: tuple[int, ...]  # which of the values that `evaluate` gives they are
    gradients: frozenset[int] = frozenset()  # which of its constants are gradients, or the factor of some
    arguments: int = 0  # how many of its constants are arguments of the step: the first ones; the next ones are copies

    @property
    def written(self) -> frozenset[int]:
        """Which of its constants only the step as it is written reads, in loops that compute gradients."""
        count = len(self.program.consts)
        copies = range(self.arguments, 2 * self.arguments)
        return frozenset([*copies, *range(count, count + len(self.given))]) - self.gradients

    def with_given(self, values: Sequence[Any]) -> Program:
        """Returns the program with values for all that `evaluate` gives."""
        program = self.program
        variables = program.jaxpr.constvars[len(program.consts) :]
        chosen = [jnp.asarray(values[i]).astype(type_of(x).dtype) for i, x in zip(self.given, variables, strict=True)]
        return program._replace(consts=[*program.consts, *chosen], names=(*program.names, *[""] * len(chosen)))


def cut(program: Program, given: Sequence[Any], gradients: Sequence[Any], arguments: int) -> UpdateProgram:
    """Replaces variables of a program by constants.

    Its first constants are the arguments of the step, copies of them, and the factor of gradients in loops.
    """
    jaxpr = program.jaxpr
    bound = {*jaxpr.constvars, *jaxpr.invars}
    numbers = {x: i for i, x in enumerate(given) if isinstance(x, core.Var) and x not in bound}

    def without(eqn: core.JaxprEqn) -> core.JaxprEqn:
        if numbers.keys().isdisjoint(eqn.outvars):
            return eqn
        return eqn.replace(outvars=[core.Var(type_of(x)) if x in numbers else x for x in eqn.outvars])

    eqns = list(map(without, jaxpr.eqns))
    names = [*jaxpr.constvars, *numbers]
    closed = core.ClosedJaxpr(jaxpr.replace(constvars=names, eqns=eqns), [*program.consts, *[None] * len(numbers)])
    are_gradients = {len(program.consts) + i for i, x in enumerate(numbers) if x in gradients}
    needed, factor = without_dead_code(closed.jaxpr), 2 * arguments
    if any(needed.constvars[factor] in eqn.invars for eqn in needed.eqns):
        are_gradients.add(factor)
    return UpdateProgram(program._replace(jaxpr=needed), tuple(numbers.values()), frozenset(are_gradients), arguments)


def evaluate_given(
    program: core.ClosedJaxpr,
    inputs: Sequence[Any],
    gradients: Gradients,
    given: Mapping[Place, Sequence[Any]],
    factor: Any,
    outputs: Sequence[int],
) -> list[Any]:
    """Returns some outputs of a program whose gradients are given: the values `Evaluated.given` of `evaluate`.

    Gradients that a loop, a branch or a `jax.shard_map` computes are multiplied by a scalar `factor`.
    """
    needed = [i in outputs for i in range(len(program.jaxpr.outvars))]
    found = _Evaluation(gradients, given, factor).run(program, inputs, (), needed)
    return [found[i] for i in outputs]


class _Pair(NamedTuple):
    """A value in the two runs of a loop."""

    written: Any
    compared: Any


class _Evaluation:
    def __init__(self, gradients: Gradients, given: Mapping[Place, Sequence[Any]], factor: Any) -> None:
        self._gradients, self._given, self._factor = gradients, given, factor

    def run(self, program: core.ClosedJaxpr, inputs: Sequence[Any], place: Place, needed: Sequence[bool]) -> list[Any]:
        """Runs the equations on which the needed outputs depend; the other outputs are None."""
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        given = {x: self._given[*place, id(x)][0] for x in frozenset.union(*self._gradients.variables(jaxpr))}
        values.update(given)
        outvars = [x if is_needed else None for x, is_needed in zip(jaxpr.outvars, needed, strict=True)]
        for eqn, wanted in _live(jaxpr, outvars, given):
            operands = [x if isinstance(x, core.Literal) else values[x] for x in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, operands, place, wanted), strict=True))
            values.update(given)
        return [None if x is None else _read(x, values) for x in outvars]

    def _equation(self, eqn: core.JaxprEqn, operands: list[Any], place: Place, wanted: Sequence[bool]) -> list[Any]:
        if not self._gradients.are_in(eqn):
            return evaluate_equation(eqn, operands)
        inputs = [_value(x) if isinstance(x, core.Literal) else x for x in operands]
        inner = (*place, id(eqn))
        with eqn.ctx.manager:
            if inner not in self._given:
                return self.run(called_jaxpr(eqn), inputs, inner, wanted)
            pairs = list(map(_Pair, self._given[inner], inputs))
            return [x.compared for x in _PairEvaluation(self._gradients, self._factor).run_holder(eqn, pairs)]


def _live(
    jaxpr: core.Jaxpr, outvars: Sequence[Any], given: Mapping[Any, Any]
) -> list[tuple[core.JaxprEqn, list[bool]]]:
    """Returns the equations on which some variables depend, with which of the results of each are needed."""
    needed = {x for x in outvars if isinstance(x, core.Var)}.difference(given)
    found = []
    for eqn in reversed(jaxpr.eqns):
        wanted = [x in needed for x in eqn.outvars]
        if any(wanted) or eqn.effects:
            found.append((eqn, wanted))
            needed.update(x for x in eqn.invars if isinstance(x, core.Var) and x not in given)
    return found[::-1]


class _PairEvaluation:
    """Runs a program twice: the second run has the losses of the first one, and its gradients, times a factor."""

    def __init__(self, gradients: Gradients, factor: Any) -> None:
        self._gradients, self._factor = gradients, factor

    def run(self, program: core.ClosedJaxpr, inputs: Sequence[_Pair]) -> list[_Pair]:
        jaxpr = program.jaxpr
        values: dict[Any, _Pair] = {x: _Pair(y, y) for x, y in zip(jaxpr.constvars, program.consts, strict=True)}
        values.update(zip(jaxpr.invars, inputs, strict=True))
        gradients, losses = self._gradients.variables(jaxpr)
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [_read_pair(x, values) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            values.update({x: _Pair(values[x].written, values[x].written) for x in eqn.outvars if x in losses})
            with eqn.ctx.manager:
                values.update({x: self._multiplied(values[x].written) for x in eqn.outvars if x in gradients})
        return [_read_pair(x, values) for x in jaxpr.outvars]

    def _multiplied(self, gradient: Any) -> _Pair:
        wide = jnp.promote_types(gradient.dtype, np.float32)
        with _gives_gradients():  # a factor of 1 changes nothing
            return _Pair(gradient, (gradient.astype(wide) * self._factor.astype(wide)).astype(gradient.dtype))

    def _equation(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        if self._gradients.are_in(eqn):
            with eqn.ctx.manager:
                return self.run_holder(eqn, inputs)
        with _gives_gradients():
            written = evaluate_equation(eqn, [x.written for x in inputs])
        return list(map(_Pair, written, evaluate_equation(eqn, [x.compared for x in inputs])))

    def run_holder(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        run = special.get(eqn.primitive.name)
        return run(eqn, inputs) if run else self.run(called_jaxpr(eqn), inputs)

    def _scan(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        consts, carry, xs = split_scan_inputs(eqn, inputs)

        def step(carry: list[_Pair], x: list[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
            outputs = self.run(eqn.params["jaxpr"], [*consts, *carry, *x])
            return outputs[: len(carry)], outputs[len(carry) :]

        carry, ys = jax.lax.scan(step, carry, xs, length=eqn.params["length"], reverse=eqn.params["reverse"])
        return [*carry, *ys]

    def _while(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        cond_consts, body_consts, carry = split_while_inputs(eqn, inputs)

        def test(carry: list[_Pair]) -> Any:  # of the program as it is written
            return self.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry])[0].written

        def step(carry: list[_Pair]) -> list[_Pair]:
            return self.run(eqn.params["body_jaxpr"], [*body_consts, *carry])

        return jax.lax.while_loop(test, step, carry)

    def _cond(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        """Runs the branch of each run; a branch that only the second one takes has the gradients of this branch."""
        index, *operands = inputs

        def branch(program: core.ClosedJaxpr) -> Callable[..., list[_Pair]]:
            return lambda *operands: self.run(program, operands)

        branches = list(map(branch, eqn.params["branches"]))
        written, compared = (jax.lax.switch(i, branches, *operands) for i in index)
        return [_Pair(x.written, y.compared) for x, y in zip(written, compared, strict=True)]

    def _shard_map(self, eqn: core.JaxprEqn, inputs: list[_Pair]) -> list[_Pair]:
        params = eqn.params

        def specs(name: str) -> list[_Pair]:
            return [_Pair(spec, spec) for spec in params[name]]

        return jax.shard_map(
            lambda *inputs: self.run(closed(params["jaxpr"]), inputs),
            mesh=params["mesh"],
            axis_names=set(axes_of_shard_map(eqn)),
            check_vma=params["check_vma"],
            in_specs=tuple(specs("in_specs")),
            out_specs=specs("out_specs"),
        )(*inputs)


def _value(x: core.Literal) -> Any:
    return np.asarray(x.val, type_of(x).dtype)


def _read(x: Any, values: Mapping[Any, Any]) -> Any:
    return _value(x) if isinstance(x, core.Literal) else values[x]


def _read_pair(x: Any, values: Mapping[Any, _Pair]) -> _Pair:
    return _Pair(_value(x), _value(x)) if isinstance(x, core.Literal) else values[x]
