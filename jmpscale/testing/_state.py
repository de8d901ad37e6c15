"""The state of a training step, as one tree with the names of the step's arguments, and the step as its function."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jmpscale._base.step_call import StepCall
from jmpscale._base.step_state import Match, changed_types, match_state
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_has_values, find_instances, is_traced, named_leaves
from jmpscale._guards.checks import check_leaf_types
from jmpscale._state import ScalerState
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
    """A step as a function of its state, which keeps its argument, and raises if the types of the state change."""

    def __init__(self, call: StepCall, out: PyTree, matches: Sequence[Match]) -> None:
        self._call = call
        self._matches = matches
        self._size = len(jax.tree.leaves(out))
        self.state = copy(StepState(tuple(match.name for match in matches), [match.tree for match in matches]))

    def __call__(self, state: StepState) -> StepState:
        leaves, structure = jax.tree.flatten(self._call.arguments)
        for match, part in zip(self._matches, state.parts, strict=True):
            for position, leaf in zip(match.old, jax.tree.leaves(part), strict=True):
                leaves[position] = leaf
        results = jax.tree.leaves(self._call.run(jax.tree.unflatten(structure, map(copy, leaves))))
        if len(results) != self._size:
            raise TypeError(f"step returned {self._size} leaves in one call, and {len(results)} in another one.")
        parts = [
            jax.tree.unflatten(jax.tree.structure(part), [results[i] for i in match.new])
            for match, part in zip(self._matches, state.parts, strict=True)
        ]
        after = copy(StepState(state.names, parts))
        check_leaf_types(state, after, "state", "step", root="")
        return after


def step_of_state(step: Callable[..., PyTree], args: Sequence[Any], kwargs: dict[str, Any]) -> StepOfState:
    """Returns a step as a function of its state.

    Raises:
      TypeError: no argument comes back, or one with other types; or an argument is abstract or traced.
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
    matches = match_state(call, out, program)
    for name, old, new in changed_types(call, out, matches, program):
        _raise_for_types(name, old, new)
    if not matches:
        raise TypeError(
            f"step must return its state, but it returned {describe(out[0])}, of which no part has the structure and "
            f"the types of an argument: {', '.join(call.names)}. {_OF_STATE}"
        )
    if not find_instances([match.tree for match in matches], ScalerState):
        _raise_for_scaler(call, matches)
    return StepOfState(call, out, matches)


def copy(state: PyTree) -> PyTree:
    """Returns a copy of a state, because a step may donate its arrays, or change variables of Flax NNX in place."""

    def new(x: Any) -> Any:
        if isinstance(x, jax.Array) and not is_traced(x):  # x.copy() would compile a program for each shape
            return jax.device_put(x, x.sharding if x.committed else None, may_alias=False)
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x

    return jax.tree.map(new, state)


def _raise_for_types(name: str, old: PyTree, new: PyTree) -> NoReturn:
    """Raises for an argument that comes back with other shapes or dtypes."""
    pairs = zip(named_leaves(old), jax.tree.leaves(new), strict=True)
    texts = [(f"{name}{path}", describe(x), describe(y)) for (path, x), y in pairs]
    path, was, now = next(text for text in texts if text[1] != text[2])
    raise TypeError(
        f"step must return its state with the same shapes and dtypes, but {path} was {was} and is {now}. Convert it in "
        "step."
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
