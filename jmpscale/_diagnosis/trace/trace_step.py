"""Traces a training step as a program of the loss scale, which returns the loss, the gradients and results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jmpscale._base.tree import PyTree, check_no_refs
from jmpscale._diagnosis.trace.averages import find_stalled_averages
from jmpscale._diagnosis.trace.exchanges import find_exchanges
from jmpscale._diagnosis.trace.expose import evaluate
from jmpscale._diagnosis.trace.lost_factors import find_lost_factors
from jmpscale._diagnosis.trace.outputs import find_losses, name_gradients, select_compared, with_outputs
from jmpscale._diagnosis.trace.passes import Passes
from jmpscale._diagnosis.trace.program import Program, Result
from jmpscale._diagnosis.trace.repeatable import repeatable
from jmpscale._diagnosis.trace.rollouts import run_rollouts
from jmpscale._diagnosis.trace.rounded import find_rounded
from jmpscale._diagnosis.trace.step_arrays import StepArrays
from jmpscale._diagnosis.trace.trace_observed import Axes
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._programs.source import place_of_error
from jmpscale._step.call import StepCall, reads_values
from jmpscale._step.dependence import StepDependence
from jmpscale._step.state import match_state


def trace_step(call: StepCall, axes: Axes) -> TracedStep:
    """Traces a step once, in the scope of `axes`, as a function of the loss scale of its scalers."""
    try:
        out, closed = call.trace(axes)
    except Exception as error:
        _explain_error(error)
        raise
    return _traced_step(call, out, closed)


def _traced_step(call: StepCall, out: PyTree, traced: core.ClosedJaxpr) -> TracedStep:
    check_no_refs(traced.consts, "the values that step closes over")
    written = traced.replace(jaxpr=repeatable(traced.jaxpr))
    # A lone array that may be data, such as an image beside its reconstruction, is compared as a result.
    matches = [x for x in match_state(call, out, written) if x.is_certain or not jax.tree_util.all_leaves([x.tree])]
    arrays = StepArrays(call, out, matches, StepDependence(call, out, written))
    exposed = _expose_gradients(written, arrays)
    leaves = arrays.leaves(Passes(written.jaxpr, 0).inputs_in_forward)
    program, results, has_loss = _select_outputs(exposed, arrays.results)
    program = run_rollouts(program)
    return TracedStep(
        program,
        tuple(name_gradients(written.jaxpr, exposed.gradients_as_written, leaves)),
        tuple(find_exchanges(program, results)),
        tuple(match.name for match in matches),
        has_loss,
        arrays.named,
        tuple(find_stalled_averages(written.jaxpr, leaves)),
        tuple(find_lost_factors(written.jaxpr, leaves)),
        tuple(find_rounded(program, {id(x): name for name, x in arrays.named})),
    )


class _Exposed(NamedTuple):
    """A step as a program of the loss scale, and the variables of this program that it may return."""

    program: core.ClosedJaxpr
    losses: list[Any]  # that are scaled
    gradients: list[Any]
    results: list[Any]
    gradients_as_written: list[Any]  # the variables of the gradients in the step as it is written


def _expose_gradients(written: core.ClosedJaxpr, arrays: StepArrays) -> _Exposed:
    as_written: list[Any] = []

    def outputs(scale: jax.Array) -> tuple[list[Any], list[Any], list[Any]]:
        values, gradients, losses = evaluate(written, arrays.inputs(scale))
        as_written[:] = [x.variable for x in gradients]
        return [x.value for x in losses], [x.value for x in gradients], [values[i] for i in arrays.outputs]

    program, types = jax.make_jaxpr(outputs, return_shape=True)(jnp.float32(1.0))
    losses, gradients, results = jax.tree.unflatten(jax.tree.structure(types), program.jaxpr.outvars)
    return _Exposed(program, losses, gradients, results, as_written)


def _select_outputs(step: _Exposed, results: Sequence[Result]) -> tuple[Program, list[Result], bool]:
    """Returns a program with the outputs that are compared, the results among them, and whether there is a loss.

    The loss is a result of the step, or else a value that it scales.
    """
    jaxpr = step.program.jaxpr
    found = find_losses(with_outputs(jaxpr, step.results), results)
    losses = [*[step.results[i] for i in found], *step.losses]
    one = core.Literal(np.float32(1.0), jax.typeof(np.float32(1.0)))
    first = [losses[0] if losses else one, *step.gradients]
    kept = [(x, variable) for x, variable in zip(results, step.results, strict=True) if variable is not first[0]]
    whole = with_outputs(jaxpr, [*first, *[variable for _, variable in kept]])
    selected = select_compared(whole, len(first), [x for x, _ in kept])
    compared = [(x, variable) for x, (_, variable) in zip(selected, kept, strict=True) if x is not None]
    outvars = [*first, *[variable for _, variable in compared]]
    needed, _ = partial_eval.dce_jaxpr(with_outputs(jaxpr, outvars), [True] * len(outvars), instantiate=True)
    return Program(needed, list(step.program.consts), len(first)), [x for x, _ in compared], bool(losses)


def _explain_error(error: Exception) -> None:
    """Says what to do about an error of a training step that is traced."""
    if reads_values(error):
        error.add_note(
            "diagnose_step traces the step, as jax.jit does, so Python must not read the values of arrays in it, as it "
            f"does{place_of_error(error)}. Pass the part of the step that jax.jit accepts: the function that computes "
            "the gradients and the update."
        )
    elif isinstance(error, TypeError) and "lowered and compiled" in str(error):
        error.add_note("The step was compiled ahead of time. Pass the function that was compiled to diagnose_step.")
    elif isinstance(error, NameError) and "axis name" in str(error):
        error.add_note(
            "The step uses an axis of jax.pmap, jax.shard_map or jax.vmap: pass the function that maps it, with the "
            "arguments of all devices."
        )
