"""A training step that is traced once for all steps of a run: its state, its loss, and its program."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.frameworks import is_nnx_object
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_no_refs, is_array, named_leaves
from jmpscale._base.types import is_unchanged
from jmpscale._diagnosis.trace.outputs import find_losses
from jmpscale._diagnosis.trace.program import Result, with_outputs
from jmpscale._diagnosis.trace.repeatable import repeatable
from jmpscale._programs.jaxpr import type_of
from jmpscale._state import is_scaler
from jmpscale._step.call import StepCall, is_array_type
from jmpscale._step.dependence import StepDependence
from jmpscale._step.explain import explain_error
from jmpscale._step.state import match_state

_CALL = (
    "diagnose_run calls step(*state, batch), and passes the state that it returns to the next call. If the step takes "
    "or returns something else, pass a function that calls it: lambda params, batch: train_step(params, *batch)."
)


class Leaf(NamedTuple):
    """A leaf of the state that the step returns."""

    name: str
    value: Any  # before the run
    input: int  # its position among the arrays of the state
    output: int  # the position of its new value among the outputs of the program
    is_of_scaler: bool
    counts_skips: bool  # whether it is the number of skips of a scaler


class TracedRun:
    """A step, traced for batches of one type.

    Attributes:
      names: the parts of the state that the step returns.
      constant: the arguments apart from the batch of which it returns nothing.
      values: the arrays of the arguments apart from the batch, before the run.
      leaves: the arrays of `values` that the step returns.
      loss: the position of the loss among the outputs, and its name; None if the step returns none.
    """

    def __init__(self, step: Callable[..., Any], state: Sequence[PyTree], batch: PyTree) -> None:
        call, out, traced = _trace(step, (*state, as_arrays(batch)))
        check_no_refs(traced.consts, "the values that step closes over")
        self._call, self.program = call, traced.replace(jaxpr=repeatable(traced.jaxpr))
        leaves = jax.tree.leaves(call.arguments)
        arguments = [i for i, x in enumerate(call.arguments) for _ in jax.tree.leaves(x)]  # the argument of each leaf
        batch_argument = call.positional - 1
        self._places = [i for i, x in enumerate(leaves) if is_array(x)]
        self._is_batch = [arguments[i] == batch_argument for i in self._places]
        of_state = [i for i in self._places if arguments[i] != batch_argument]
        self.values = [jnp.asarray(leaves[i]) for i in of_state]
        found = match_state(call, out, StepDependence(call, out, self.program))
        matches = [x for x in found if x.old and arguments[x.old[0]] != batch_argument]
        if not matches:
            got = describe(out[0])
            raise TypeError(f"step must return its state, got {got}, of which no part has the types of one. {_CALL}")
        self.names = [match.name for match in matches]
        pairs = {old: new for match in matches for old, new in zip(match.old, match.new, strict=True)}
        returned = {arguments[i] for i in pairs}
        self.constant = [call.names[i] for i in dict.fromkeys(arguments[k] for k in of_state) if i not in returned]
        self.leaves = _leaves(call, out, pairs, of_state, self.values)
        self.loss = _find_loss(self.program, out, set(pairs.values()), self.leaves)

    def inputs(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the program, given its arrays of the state and of the batch."""
        own, data = iter(state), iter(batch)
        return [next(data) if is_batch else next(own) for is_batch in self._is_batch]

    def arguments(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Callable[..., Any], list[Any], dict]:
        """Returns the step, and its arguments with other arrays."""
        leaves, structure = jax.tree.flatten(self._call.arguments)
        for place, x in zip(self._places, self.inputs(state, batch), strict=True):
            leaves[place] = x
        args, keywords = self._call.given(jax.tree.unflatten(structure, leaves))
        return self._call.step, args, keywords


def _leaves(
    call: StepCall, out: PyTree, pairs: Mapping[int, int], of_state: Sequence[int], values: Sequence[Any]
) -> list[Leaf]:
    """Returns the leaves that the step returns, given the positions of their new values."""
    names = [name + path for name, x in zip(call.names, call.arguments, strict=True) for path, _ in named_leaves(x)]
    of_scalers, skips = _places_of_scalers(call.arguments)
    number = {place: k for k, place in enumerate(of_state)}
    outputs = [i for i, x in enumerate(jax.tree.leaves(out)) if is_array_type(x)]
    output = {place: k for k, place in enumerate(outputs)}
    return [
        Leaf(names[old], values[number[old]], number[old], output[new], old in of_scalers, old in skips)
        for old, new in pairs.items()
        if old in number and new in output
    ]


def arrays_of(batch: PyTree) -> list[Any]:
    """Returns the arrays of a batch, also for Python numbers."""
    return list(filter(is_array, jax.tree.leaves(as_arrays(batch))))


def as_arrays(tree: PyTree) -> PyTree:
    """Converts Python numbers to arrays, as `jax.jit` does."""
    return jax.tree.map(lambda x: jnp.asarray(x) if _is_number(x) else x, tree, is_leaf=is_nnx_object)


def _is_number(x: object) -> bool:
    """Tests whether a leaf is a Python number."""
    return isinstance(x, bool | int | float | complex)


def _trace(step: Callable[..., Any], args: Sequence[PyTree]) -> tuple[StepCall, PyTree, core.ClosedJaxpr]:
    """Traces a step; numbers of its state that it changes, such as a count in Python, become arrays."""
    _check_call(step, args)
    call = StepCall(step, args, {})
    out, program = _traced(call)
    leaves, tree = jax.tree.flatten(call.arguments)
    new = jax.tree.leaves(out)
    pairs = [
        pair
        for match in match_state(call, out, StepDependence(call, out, program))
        for pair in zip(match.old, match.new, strict=True)
    ]
    changed = [i for i, k in pairs if _is_number(leaves[i]) and not is_unchanged(leaves[i], new[k])]
    if not changed:
        return call, out, program
    for i in changed:
        leaves[i] = jnp.asarray(leaves[i])
    call = StepCall(call.step, *call.given(jax.tree.unflatten(tree, leaves)))
    return call, *_traced(call)


def _traced(call: StepCall) -> tuple[PyTree, core.ClosedJaxpr]:
    try:
        return call.trace()
    except Exception as error:
        explain_error(error, "diagnose_run")
        raise


def _check_call(step: Callable[..., Any], args: Sequence[PyTree]) -> None:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # step has none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(f"step must accept (*state, batch), but {describe(step)} does not: {error}. {_CALL}") from error


def _places_of_scalers(tree: PyTree) -> tuple[set[int], set[int]]:
    """Returns the positions of the leaves of scalers among the leaves of a tree, and of their numbers of skips."""
    inside: set[int] = set()
    skips: set[int] = set()
    position = 0
    for node in jax.tree.leaves(tree, is_leaf=is_scaler):
        count = len(jax.tree.leaves(node))
        if is_scaler(node):
            inside.update(range(position, position + count))
            places = [position + i for i, x in enumerate(jax.tree.leaves(node)) if x is node.total_skips]
            skips.update(places)
        position += count
    return inside, skips


def _find_loss(
    program: core.ClosedJaxpr, out: PyTree, of_state: set[int], leaves: Sequence[Leaf]
) -> tuple[int, str] | None:
    """Returns the loss that `diagnose_step` takes; of a step for stacked devices, one loss for each of them."""
    named = [(place, path, x) for place, (path, x) in enumerate(named_leaves(out)) if is_array_type(x)]
    floats = [
        (i, Result("result" + path.removeprefix("[0]"), x.dtype, i), x.shape)
        for i, (place, path, x) in enumerate(named)
        if place not in of_state and jnp.issubdtype(x.dtype, np.floating)
    ]
    for shape in [(), *_stacked(leaves)]:
        fitting = [(i, result) for i, result, found in floats if found == shape]
        jaxpr = with_outputs(program.jaxpr, [program.jaxpr.outvars[i] for i, _ in fitting])
        if losses := find_losses(_with_means(jaxpr) if shape else jaxpr, [result for _, result in fitting]):
            i, result = fitting[losses[0]]
            return i, result.name
    return None


def _with_means(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program that returns the means of its outputs."""

    def means(consts: list[Any], inputs: list[Any]) -> list[Any]:
        return list(map(jnp.mean, jax.core.eval_jaxpr(jaxpr, consts, *inputs)))

    consts, inputs = (
        [jax.ShapeDtypeStruct(type_of(x).shape, type_of(x).dtype) for x in variables]
        for variables in (jaxpr.constvars, jaxpr.invars)
    )
    return jax.make_jaxpr(means)(consts, inputs).jaxpr


def _stacked(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """Returns the first axis of all leaves, if they have one in common, as in `jax.pmap`, as the shape of a loss."""
    sizes = {np.shape(x.value)[:1] for x in leaves}
    return list(sizes) if len(sizes) == 1 and () not in sizes else []
