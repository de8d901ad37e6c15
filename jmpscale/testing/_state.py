"""The state of a training step, as one tree with the names of the step's arguments, and the step as its function."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend import core

from jmpscale._base.text import describe
from jmpscale._base.tree import (
    PyTree,
    bit_pattern,
    check_has_values,
    find_instances,
    flatten_matching,
    is_array,
    is_traced,
    named_leaves,
)
from jmpscale._guards.checks import check_leaf_types
from jmpscale._programs.compile import compiled, has_long_loop
from jmpscale._state import ScalerState
from jmpscale._step.call import StepCall
from jmpscale._step.dependence import StepDependence
from jmpscale._step.parts import Match
from jmpscale._step.state import changed_types, match_state
from jmpscale.testing._replicated import check_addressable

_OF_STATE = (
    "Or write the step as a function of its state: check_step(lambda state: train_step(*state, batch)[:2])((params, "
    "opt_state))."
)
_NUMBER = (
    "check_step cannot check a loss scale that is a number: run a few steps with the number 2.0**60, of which "
    "total_skips must count every one."
)


class _Name:
    """The key of a part of a state, so that the path of a leaf is `params['w']`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._name)


@jax.tree_util.register_pytree_with_keys_class
class StepState:
    """The parts of the arguments of a step that it returns, with their names."""

    def __init__(self, names: tuple[str, ...], parts: Sequence[PyTree]) -> None:
        self.names = names
        self.parts = parts

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, PyTree]], tuple[str, ...]]:
        return list(zip(map(_Name, self.names), self.parts, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], parts: Sequence[PyTree]) -> "StepState":
        return cls(names, parts)


class StepOfState:
    """A step as a function of its state, which keeps its argument, and raises if the types of the state change.

    Attributes:
      state: the state in the call.
      recomputed: the paths of the leaves of the state whose new value is not computed from their old one, such as the
        copies of other leaves in half precision.
    """

    def __init__(
        self,
        call: StepCall,
        out: PyTree,
        matches: Sequence[Match],
        program: core.ClosedJaxpr | None,
        dependence: StepDependence,
    ) -> None:
        self._call = call
        self._run = call.run if program is None or call.is_compiled else _compile(call, program)
        self._size = len(jax.tree.leaves(out))
        self._matches = [match for match in matches if match.is_certain]
        self._others = [match for match in matches if not match.is_certain]
        parts = [match.tree for match in self._matches]
        self.state = copy(StepState(tuple(match.name for match in self._matches), parts))
        self.recomputed = self._find_recomputed(dependence) if dependence.is_known else frozenset[str]()

    def __call__(self, state: StepState) -> StepState:
        results = self._results(state)
        parts = [
            jax.tree.unflatten(jax.tree.structure(part), [results[i] for i in match.new])
            for match, part in zip(self._matches, state.parts, strict=True)
        ]
        after = copy(StepState(state.names, parts))
        check_leaf_types(state, after, "state", "step", root="")
        return after

    def _find_recomputed(self, dependence: StepDependence) -> frozenset[str]:
        pairs = [pair for match in self._matches for pair in zip(match.new, match.old, strict=True)]
        leaves = zip(named_leaves(self.state), pairs, strict=True)
        # A Python number is a constant of the program.
        return frozenset(
            path for (path, x), (new, old) in leaves if is_array(x) and not dependence.depends([new], [old])
        )

    @property
    def others(self) -> list[str]:
        """The names of the arguments that come back, but may be data."""
        return [match.name for match in self._others]

    def changed_others(self, state: StepState) -> list[str]:
        """Returns the names of the arguments that come back changed, but may be data."""
        results = self._results(state)

        def is_changed(match: Match) -> bool:
            pairs = zip(jax.tree.leaves(match.tree), match.new, strict=True)
            return any(bit_pattern(leaf) != bit_pattern(results[i]) for leaf, i in pairs)

        return [match.name for match in filter(is_changed, self._others)]

    def _results(self, state: StepState) -> list[Any]:
        """Returns the leaves of what the step returns from a state."""
        leaves, structure = jax.tree.flatten(self._call.arguments)
        for match, part in zip(self._matches, state.parts, strict=True):
            for position, leaf in zip(match.old, jax.tree.leaves(part), strict=True):
                leaves[position] = leaf
        arguments = jax.tree.unflatten(structure, map(copy, leaves))
        is_inside_trace = any(map(is_traced, leaves))  # where JAX accepts no options of the compiler
        results = jax.tree.leaves((self._call.run if is_inside_trace else self._run)(arguments))
        if len(results) != self._size:
            raise TypeError(f"step returned {self._size} leaves in one call, and {len(results)} in another one.")
        return results


def _compile(call: StepCall, program: core.ClosedJaxpr) -> Callable[[PyTree], PyTree]:
    """Compiles a step, as a function of its arguments; a loop that is not compiled takes many times as long."""
    optimize = has_long_loop(program.jaxpr.eqns)
    programs: dict[tuple[bool, ...], Callable[..., PyTree]] = {}  # by which leaves are arrays

    def compile_for(unflatten: Callable[..., PyTree]) -> Callable[..., PyTree]:
        unflatten_outputs: Callable[..., PyTree] = tuple

        def outputs(*arrays: Any) -> list[Any]:
            nonlocal unflatten_outputs
            found, unflatten_outputs = flatten_matching(call.run(unflatten(arrays)), is_array)
            return found

        run_program = compiled(outputs, optimize=optimize)

        def run(arrays: Sequence[Any]) -> PyTree:
            found = run_program(*arrays)
            return unflatten_outputs(found)

        return run

    def run(arguments: PyTree) -> PyTree:
        arrays, unflatten = flatten_matching(arguments, is_array)
        are_arrays = tuple(map(is_array, jax.tree.leaves(arguments)))  # a count may begin as a Python number
        if are_arrays not in programs:
            programs[are_arrays] = compile_for(unflatten)
        return programs[are_arrays](arrays)

    return run


def step_of_state(step: Callable[..., PyTree], args: Sequence[Any], kwargs: dict[str, Any]) -> StepOfState:
    """Returns a step as a function of its state.

    Raises:
      TypeError: no argument comes back, or one with other dtypes; or an argument is abstract or traced.
      ValueError: no argument that comes back contains a scaler; an argument was donated to a compiled function; or
        other processes hold a part of an argument.
    """
    call = StepCall(step, args, kwargs)
    for name, argument in zip(call.names, call.arguments, strict=True):
        check_has_values(argument, name, "check_step")
        check_addressable(argument, name)
    program = None
    try:
        out, program = call.trace()
    except Warning:  # that a filter turns into an error
        raise
    except Exception:  # if JAX only cannot trace the step, it runs
        out = call.run(jax.tree.map(copy, call.arguments))
    dependence = StepDependence(call, out, program)
    matches = match_state(call, out, dependence)
    for name, old, new in changed_types(call, out, matches, dependence):
        _raise_for_types(name, old, new)
    parts = [match.tree for match in matches if match.is_certain]
    if not parts:
        raise TypeError(
            f"step must return its state, but it returned {describe(out[0])}, of which no part has the structure and "
            f"the types of an argument: {', '.join(call.names)}. {_OF_STATE}"
        )
    if not find_instances(parts, ScalerState):
        _raise_for_scaler(call, matches)
    return StepOfState(call, out, matches, program, dependence)


def copy(state: PyTree) -> PyTree:
    """Returns a copy of a state, because a step may donate its arrays, or change variables of Flax NNX in place."""

    def new(x: Any) -> Any:
        if isinstance(x, jax.Array) and not is_traced(x):  # x.copy() would compile a program for each shape
            return jax.device_put(x, x.sharding if x.committed else None, may_alias=False)
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x

    return jax.tree.map(new, state)


def _raise_for_types(name: str, old: PyTree, new: PyTree) -> NoReturn:
    """Raises for an argument that comes back with other dtypes."""
    pairs = zip(named_leaves(old), jax.tree.leaves(new), strict=True)
    texts = [(f"{name}{path}", describe(x), describe(y)) for (path, x), y in pairs]
    path, was, now = next(text for text in texts if text[1] != text[2])
    raise TypeError(
        f"step must return its state with the same dtypes, but {path} was {was} and is {now}. Convert it in step."
    )


def _raise_for_scaler(call: StepCall, matches: Sequence[Match]) -> NoReturn:
    """Raises for a step of which no argument that comes back contains a scaler."""
    pairs = zip(call.names, call.arguments, strict=True)
    lost = [name for name, argument in pairs if find_instances(argument, ScalerState)]
    if lost:
        raise ValueError(f"step must return {lost[0]}, which contains the scaler. {_OF_STATE}")
    names = ", ".join(match.name for match in matches)
    raise ValueError(
        f"the state of step must contain a scaler, got none: {names}. Pass and return the scaler, or the state of "
        f"with_loss_scaling. For a step without loss scaling, call jmpscale.diagnose_step. {_NUMBER}"
    )
