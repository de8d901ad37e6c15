"""Traces a training step as a program of its loss scales, which returns the loss, the gradients and results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.tree import PyTree, check_no_refs
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.trace.choices import find_choices
from jmpscale._diagnosis.trace.cut import UpdateProgram, cut, evaluate_given
from jmpscale._diagnosis.trace.expose import evaluate
from jmpscale._diagnosis.trace.gradients import Gradients
from jmpscale._diagnosis.trace.outputs import find_losses, name_gradients, select_compared
from jmpscale._diagnosis.trace.passes import Passes
from jmpscale._diagnosis.trace.program import Program, Result, close_over, with_outputs
from jmpscale._diagnosis.trace.repeatable import repeatable
from jmpscale._diagnosis.trace.rollouts import run_rollouts
from jmpscale._diagnosis.trace.step_arrays import StepArrays
from jmpscale._diagnosis.trace.trace_observed import Axes
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._step.call import StepCall
from jmpscale._step.dependence import StepDependence
from jmpscale._step.explain import explain_error
from jmpscale._step.parts import Match, Part
from jmpscale._step.state import match_state


def trace_step(call: StepCall, axes: Axes) -> TracedStep:
    """Traces a step once, in the scope of `axes`, as a function of the loss scales of its scalers."""
    try:
        out, closed = call.trace(axes)
    except Exception as error:
        explain_error(error, "diagnose_step")
        raise
    return _traced_step(call, out, closed)


def _traced_step(call: StepCall, out: PyTree, traced: core.ClosedJaxpr) -> TracedStep:
    check_no_refs(traced.consts, "the values that step closes over")
    written = traced.replace(jaxpr=repeatable(traced.jaxpr))
    dependence = StepDependence(call, out, written)
    # A lone array that may be data, such as an image beside its reconstruction, is compared as a result.
    found = match_state(call, out, dependence)
    matches = [x for x in found if x.is_certain or not jax.tree_util.all_leaves([x.tree])]
    arrays = StepArrays(call, out, matches, dependence)
    exposed = _expose_gradients(written, arrays)
    loss, results = _separate_loss(exposed, arrays.results)
    update, results, exact_update, exact_leaves = _cut(exposed, results)
    one = core.Literal(np.float32(1.0), jax.typeof(np.float32(1.0)))
    is_read = Passes(written.jaxpr, 0).inputs_in_forward
    return TracedStep(
        exposed.program.with_outputs([one if loss is None else loss, *exposed.gradients, *exposed.given]),
        tuple(name_gradients(written.jaxpr, exposed.gradients_as_written, arrays.results, is_read)),
        update,
        tuple(results),
        exact_update,
        tuple(exact_leaves),
        tuple(match.name for match in matches),
        _may_be_state([x for x in found if x not in matches], out, dependence),
        loss is not None,
        tuple(zip(arrays.names, arrays.values, strict=True)),
        scalers=tuple(arrays.scalers),
        choices=tuple(find_choices(written.jaxpr)),
    )


def _may_be_state(matches: Sequence[Match], out: PyTree, dependence: StepDependence) -> tuple[str, ...]:
    """Returns the names of lone arrays in half precision whose new values are near the old ones."""
    results = jax.tree.leaves(out)

    def is_near(match: Match) -> bool:
        new = Part("", results[match.new[0]], match.new[0])
        return dependence.are_near([new], Part(match.name, match.tree, match.old[0]))[0]

    return tuple(x.name for x in matches if is_narrow(x.tree) and is_near(x))


class _Exposed(NamedTuple):
    """A step as a program of its loss scales, and variables of this program."""

    program: Program
    outputs: list[Any]  # the results of the step as it is written
    losses: list[Any]  # that are scaled
    gradients: list[Any]
    given: list[Any]  # the gradients, and what else `evaluate_given` needs
    results: list[Any]  # those that are compared, with the gradients given
    gradients_as_written: list[Any]  # the variables of the gradients in the step as it is written
    arguments: int  # the number of arguments, which are the first constants of the program


def _expose_gradients(written: core.ClosedJaxpr, arrays: StepArrays) -> _Exposed:
    gradients = Gradients(written.jaxpr)
    as_written: list[Any] = []

    count = len(arrays.values)

    def values(scales: jax.Array, *constants: Any) -> tuple[list[Any], ...]:
        inputs, factor = arrays.with_scales(constants[:count], scales), constants[-1]
        copies = {id(x): copy for x, copy in zip(constants[:count], constants[count:-1], strict=True)}
        found = evaluate(written, inputs, gradients)
        as_written[:] = [x.variable for x in found.gradients]
        given = {place: [copies.get(id(x), x) for x in group] for place, group in found.given.items()}
        results = evaluate_given(written, inputs, gradients, given, factor, [x.output for x in arrays.results])
        losses, exposed = ([x.value for x in group] for group in (found.losses, found.gradients))
        return found.outputs, losses, exposed, [x for group in found.given.values() for x in group], results

    constants = [*arrays.values, *arrays.values, np.float32(1)]
    closed, types = jax.make_jaxpr(values, return_shape=True)(arrays.ones(), *constants)
    variables = jax.tree.unflatten(jax.tree.structure(types), closed.jaxpr.outvars)
    jaxpr, consts = close_over(closed.jaxpr, closed.consts, constants)
    program = run_rollouts(Program(jaxpr, consts, (*arrays.names, *[""] * (len(consts) - count))))
    outputs, losses, exposed, given, results = variables
    return _Exposed(program, outputs, losses, exposed, given, results, as_written, count)


def _separate_loss(step: _Exposed, results: Sequence[Result]) -> tuple[Any, list[Result]]:
    """Returns the loss, and the results that are not the loss.

    The loss is a result of the step, or else a value that it scales; None if there is none.
    """
    variables = [step.outputs[x.output] for x in results]
    found = find_losses(with_outputs(step.program.jaxpr, variables), results, [frozenset(["scale"])])
    loss = next(iter([*[variables[i] for i in found], *step.losses]), None)
    others = [x._replace(output=i) for i, x in enumerate(results) if variables[i] is not loss]
    return loss, others


def _cut(
    exposed: _Exposed, results: Sequence[Result]
) -> tuple[UpdateProgram, list[Result], UpdateProgram, list[Result]]:
    """Returns the program of the results to which rounding makes a difference if the gradients are given, and them.

    It also returns the same for the leaves of the state to which it makes none.
    """
    program = exposed.program.with_outputs([exposed.results[x.output] for x in results])
    update = cut(program, exposed.given, exposed.gradients, exposed.arguments)
    jaxpr = update.program.jaxpr
    selected = select_compared(jaxpr, len(update.given), results)
    computed = {variable for eqn in jaxpr.eqns for variable in eqn.outvars}

    def is_exact(result: Result, found: Result | None, variable: Any) -> bool:
        is_computed = isinstance(variable, core.Var) and variable in computed
        return found is None and result.is_leaf and is_computed and jnp.issubdtype(result.dtype, np.inexact)

    def part(chosen: Sequence[Result | None]) -> tuple[UpdateProgram, list[Result]]:
        pairs = [(x, variable) for x, variable in zip(chosen, jaxpr.outvars, strict=True) if x is not None]
        program = update.program.with_outputs([variable for _, variable in pairs])
        return update._replace(program=program), [x for x, _ in pairs]

    triples = zip(results, selected, jaxpr.outvars, strict=True)
    exact = [x if is_exact(x, found, variable) else None for x, found, variable in triples]
    return *part(selected), *part(exact)
