"""Traces a training step: its loss, its gradients and its results, as a program of the loss scale."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jmpscale._base.jaxpr import Caller, type_of
from jmpscale._base.source import is_backward, is_differentiated, line_of_error
from jmpscale._base.step_call import UNREADABLE, StepCall, is_array_type
from jmpscale._base.step_state import Match, match_state
from jmpscale._base.tree import PyTree, check_no_refs, is_real, named_leaves
from jmpscale._diagnosis import flow
from jmpscale._diagnosis.averages import Average, find_stalled_averages
from jmpscale._diagnosis.gradients import Exposed, evaluate
from jmpscale._diagnosis.lossless import find_exchanges
from jmpscale._diagnosis.operations import moves_values, narrow_dtype
from jmpscale._diagnosis.passes import Pass, Passes
from jmpscale._diagnosis.program import Leaf, Program, Result
from jmpscale._diagnosis.repeatable import repeatable
from jmpscale._diagnosis.rounded import Rounded, find_rounded
from jmpscale._diagnosis.trace_again import Axes
from jmpscale._interpreter.interpret import ENTERED
from jmpscale._state import is_scaler


class TracedStep(NamedTuple):
    """A training step with what it returns."""

    program: Program  # its outputs are the loss, the gradients and the results
    gradients: tuple[str, ...]  # their names
    parameters: frozenset[str] = frozenset()  # the names of the arguments that they change, if these are known
    results: tuple[Result, ...] = ()  # those that half precision may change other than through the gradients
    state: tuple[str, ...] = ()  # the arguments that the step returns
    has_loss: bool = True  # otherwise the first output is 1
    arguments: tuple[tuple[str, Any], ...] = ()  # the arrays that the step takes, with their names
    stalled: tuple[Average, ...] = ()  # averages in half precision that stop moving
    rounded: tuple[Rounded, ...] = ()  # what is in half precision before the step begins
    ignores_scaler: bool = False  # whether no gradient depends on the scale of a dynamic scaler
    kept: tuple[str, ...] = ()  # the matmuls that autocast leaves in float32, with the reason


def trace_step(call: StepCall) -> TracedStep:
    """Traces a step once, as a function of the loss scale of its scalers."""
    try:
        out, closed = call.trace()
    except Exception as error:
        _explain_error(error)
        raise
    return _traced_step(call, out, closed)


def trace_gradients_again(call: StepCall, axes: Axes) -> Program:
    """Traces the loss and the gradients of a step that has been traced, in a scope."""
    out, closed = trace_call_again(call, axes)
    return _traced_step(call, out, closed).program.of_gradients()


def trace_call_again(call: StepCall, axes: Axes) -> tuple[PyTree, core.ClosedJaxpr]:
    """Traces a call that has been traced, in a scope; returns its result, and the program."""
    traced: list[tuple[PyTree, core.ClosedJaxpr]] = []
    jax.make_jaxpr(lambda: traced.append(call.trace()), axis_env=list(axes))()
    return traced[0]


def _traced_step(call: StepCall, out: PyTree, traced: core.ClosedJaxpr) -> TracedStep:
    check_no_refs(traced.consts, "the values that step closes over")
    program = traced.replace(jaxpr=repeatable(traced.jaxpr))
    arrays = _Arrays(call, out, match_state(call, out, program))
    exposed: list[list[Exposed]] = []

    def outputs(scale: jax.Array) -> list[Any]:
        values, gradients, losses = evaluate(program, arrays.inputs(scale))
        exposed[:] = [gradients, losses]
        return [x.value for x in (*losses, *gradients)] + [values[i] for i in arrays.outputs]

    closed = jax.make_jaxpr(outputs)(jnp.float32(1.0))
    gradients, losses = exposed
    outvars, count = list(closed.jaxpr.outvars), len(losses) + len(gradients)
    of_losses, of_gradients, of_results = outvars[: len(losses)], outvars[len(losses) : count], outvars[count:]
    results = arrays.results()
    loss = next(iter([*_losses(closed.jaxpr, results, of_results), *of_losses]), None)
    kept = [(x, y) for x, y in zip(results, of_results, strict=True) if y is not loss]
    one = core.Literal(np.float32(1.0), jax.typeof(np.float32(1.0)))
    first = [one if loss is None else loss, *of_gradients]
    compared = _compared(_with_outputs(closed.jaxpr, [*first, *[y for _, y in kept]]), len(first), [x for x, _ in kept])
    outvars = [*first, *[y for (_, y), result in zip(kept, compared, strict=True) if result]]
    jaxpr, _ = partial_eval.dce_jaxpr(_with_outputs(closed.jaxpr, outvars), [True] * len(outvars), instantiate=True)
    leaves = arrays.leaves(Passes(program.jaxpr, 0).inputs_in_forward)
    compared_program = Program(jaxpr, list(closed.consts), len(first))
    names = _names_of_gradients(program, [x.variable for x in gradients], leaves)
    return TracedStep(
        compared_program,
        tuple(names),
        frozenset(names).intersection(name for name, _ in arrays.named),
        tuple(find_exchanges(compared_program, list(filter(None, compared)))),
        tuple(match.name for match in arrays.matches),
        loss is not None,
        arrays.named,
        tuple(find_stalled_averages(program.jaxpr, leaves)),
        tuple(find_rounded(compared_program, {id(x): name for name, x in arrays.named})),
    )


class _Arrays:
    """The arrays that a step takes and returns, by their positions."""

    def __init__(self, call: StepCall, out: PyTree, matches: list[Match]) -> None:
        self.matches = matches
        leaves = jax.tree.leaves(call.arguments)
        places = [i for i, leaf in enumerate(leaves) if is_array_type(leaf)]
        self._values = [jnp.asarray(leaves[i]) for i in places]
        names = [name + path for name, x in zip(call.names, call.arguments, strict=True) for path, _ in named_leaves(x)]
        self.named = tuple((names[i], x) for i, x in zip(places, self._values, strict=True))
        self.number = {place: i for i, place in enumerate(places)}  # of an array among the inputs of the program
        self._scales, self._of_scalers = _places_of_scalers(call.arguments)
        named = [(i, path, leaf) for i, (path, leaf) in enumerate(named_leaves(out)) if is_array_type(leaf)]
        old_of = {new: (match, k) for match in matches for k, new in enumerate(match.new)}
        self._results: list[Result] = []
        self.outputs: list[int] = []  # the positions of results among the outputs of the program
        self.inputs_of: list[int | None] = []  # the positions of their old values among its inputs
        scalers_out = _places_of_scalers(out)[1]
        for number, (i, path, leaf) in enumerate(named):
            if not is_real_type(leaf) or i in scalers_out:
                continue
            if i not in old_of:
                self._add(Result(_name_of_result(path), leaf.dtype), number, None)
                continue
            match, k = old_of[i]
            old = leaves[match.old[k]]
            if is_array_type(old) and match.old[k] not in self._of_scalers and is_real(old):
                name, position = match.name + named_leaves(match.tree)[k][0], self.number[match.old[k]]
                self._add(Result(name, leaf.dtype, self._values[position]), number, position)

    def _add(self, result: Result, output: int, input: int | None) -> None:
        self._results.append(result)
        self.outputs.append(output)
        self.inputs_of.append(input)

    def results(self) -> list[Result]:
        return list(self._results)

    def leaves(self, is_read: Sequence[bool]) -> list[Leaf]:
        """Returns the leaves of the state; `is_read` says which inputs of the program the forward pass reads."""
        found = zip(self._results, self.inputs_of, self.outputs, strict=True)
        return [Leaf(x, i, output, is_read[i]) for x, i, output in found if i is not None]

    def inputs(self, scale: jax.Array) -> list[Any]:
        """Returns the inputs of the program, in which the scale of the first scaler is a number."""
        values = list(self._values)
        numbers = [self.number[place] for place in self._scales if place in self.number]
        for i in numbers:
            ratio = np.asarray(self._values[i]) / np.asarray(self._values[numbers[0]])
            values[i] = scale if ratio == 1 else scale * ratio
        return values


def _places_of_scalers(tree: PyTree) -> tuple[list[int], set[int]]:
    """Returns the positions of the loss scales among the leaves of a tree, and those of all leaves of scalers."""
    scales: list[int] = []
    inside: set[int] = set()
    position = 0
    for node in jax.tree.leaves(tree, is_leaf=is_scaler):
        count = len(jax.tree.leaves(node))
        if is_scaler(node) and node.config.mode != "disabled":
            scales.append(position)
            inside.update(range(position, position + count))
        position += count
    return scales, inside


def is_real_type(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)


def _name_of_result(path: str) -> str:
    # `out` is a pair of the result and the values of Flax NNX objects.
    return "result" + path.removeprefix("[0]")


def _with_outputs(jaxpr: core.Jaxpr, outvars: Sequence[Any]) -> core.Jaxpr:
    debug_info: Any = jaxpr.debug_info
    return jaxpr.replace(outvars=list(outvars), debug_info=debug_info._replace(result_paths=("",) * len(outvars)))


_FROM_FORWARD, _FROM_BACKWARD = frozenset(["forward"]), frozenset(["backward"])


def _losses(jaxpr: core.Jaxpr, results: Sequence[Result], variables: Sequence[Any]) -> list[Any]:
    """Returns the results that may be the loss: scalars of a differentiated function, first those with this name."""

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        found = operands if eqn.primitive.name in ENTERED else flow.of_operands(eqn, operands)
        if caller.backward or is_backward(eqn):
            return [_FROM_BACKWARD] * len(found)
        return [_FROM_FORWARD] * len(found) if is_differentiated(eqn) else found

    labels = flow.follow(_with_outputs(jaxpr, variables), [flow.NONE] * len(jaxpr.invars), rule)
    scalars = [
        (result.name, x)
        for result, x, found in zip(results, variables, labels, strict=True)
        if result.old is None and type_of(x).shape == () and found == _FROM_FORWARD
    ]
    return [x for _, x in sorted(scalars, key=lambda pair: "loss" not in pair[0].lower())]


def _compared(jaxpr: core.Jaxpr, count: int, results: Sequence[Result]) -> list[Result | None]:
    """Returns the results that may differ from float32 if the gradients are right, and None for all others."""
    passes = Passes(jaxpr, count)

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        found = operands if eqn.primitive.name in ENTERED else flow.of_operands(eqn, operands)
        which = passes.of(eqn, caller)
        labels: set[Any] = {which} if which is Pass.BACKWARD else set()
        if eqn.primitive.name not in ENTERED and any(map(narrow_dtype, eqn.outvars)) and not moves_values(eqn):
            labels |= {"half", which}
        return [x | labels for x in found]

    labels = flow.follow(jaxpr, [flow.NONE] * len(jaxpr.invars), rule)[count:]

    def compared(result: Result, found: flow.Labels) -> Result | None:
        is_led = Pass.BACKWARD in found
        return result._replace(is_gradient_led=is_led) if (Pass.UPDATE if is_led else "half") in found else None

    return [compared(*x) for x in zip(results, labels, strict=True)]


def _names_of_gradients(program: core.ClosedJaxpr, variables: Sequence[Any], leaves: Sequence[Leaf]) -> list[str]:
    """Names gradients after the parameters that they change.

    A gradient changes a parameter if it reaches its new value by operations that do not reduce it to a scalar, as a
    norm does. A parameter is a leaf of the state that a differentiated function reads.
    """
    indices: dict[Any, set[int]] = {}
    for i, variable in enumerate(variables):
        indices.setdefault(variable, set()).add(i)

    def size(x: Any) -> int:
        return int(np.prod(getattr(type_of(x), "shape", ())))

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        found = operands
        if eqn.primitive.name not in ENTERED:
            pairs = list(zip(eqn.invars, operands, strict=True))
            found = [
                flow.union([labels for x, labels in pairs if size(x) >= size(y) > 1 or size(x) == size(y)])
                for y in eqn.outvars
            ]
        return [x | indices.get(y, set()) for x, y in zip(found, eqn.outvars, strict=True)]

    inputs = [flow.NONE] * len(program.jaxpr.invars)
    labels = flow.follow(program.jaxpr, inputs, rule)
    parameters = [x for x in leaves if x.is_parameter] or leaves
    names = []
    taken: set[str] = set()
    for i, variable in enumerate(variables):
        shape = type_of(variable).shape
        candidates = [x.result for x in parameters if i in labels[x.output]]
        fitting = [x for x in candidates if x.old.shape == shape] or candidates
        fresh = [x for x in fitting if x.name not in taken] or fitting
        names.append(fresh[0].name if fresh else f"the gradient of {type_of(variable).strip_weak_type()}")
        taken.add(names[-1])
    return names


def _explain_error(error: Exception) -> None:
    """Says what to do about an error of a training step that is traced."""
    if isinstance(error, UNREADABLE):
        error.add_note(
            "diagnose_step traces the step, as jax.jit does, so Python cannot read the values of arrays, as it does at "
            f"{line_of_error(error)}. Pass the part of the step that jax.jit accepts: the function that computes the "
            "gradients and the update."
        )
    elif isinstance(error, TypeError) and "lowered and compiled" in str(error):
        error.add_note("The step was compiled ahead of time. Pass the function that was compiled to diagnose_step.")
    elif isinstance(error, NameError) and "axis name" in str(error):
        error.add_note(
            "The step uses an axis of jax.pmap, jax.shard_map or jax.vmap: pass the function that maps it, with the "
            "arguments of all devices."
        )
