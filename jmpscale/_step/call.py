"""A call of a training step, as a function of values.

`StepCall.run` changes no argument: an object of Flax NNX among the arguments is replaced by its values before and after
the step. The names of the arguments are the names of the parameters of the step, such as `params`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from jax.extend import core

from jmpscale._base.frameworks import imported, is_nnx_object
from jmpscale._base.text import type_name
from jmpscale._base.tree import PyTree, flatten_matching, is_array, is_named_tuple

_UNREADABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class StepCall:
    """A call `step(*args, **kwargs)` of a training step.

    `names` and `arguments` are the names and the values of the arguments, in the order of the call. The values of an
    object of Flax NNX are a copy of it; a variable that occurs in several places occurs in one of them, in the state of
    an optimizer if it is in one, and is None in all other ones.

    Raises:
      TypeError: JAX cannot flatten a Flax NNX object, as with Flax before 0.12.
    """

    def __init__(self, step: Callable[..., PyTree], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        step, args, kwargs = _without_bound_objects(step, args, kwargs)
        self.step = step  # without the objects that `functools.partial` binds, which are arguments here
        self.positional, self._keywords = len(args), tuple(kwargs)
        self.names = argument_names(step, args, kwargs)
        given = [*args, *kwargs.values()]
        self._objects, self._replace = flatten_matching(given, is_nnx_object, is_nnx_object)
        for node in self._objects:
            if any(leaf is node for leaf in jax.tree.leaves(node)):
                raise TypeError(
                    f"the step must take values, got a Flax NNX {type_name(node)}, which Flax before 0.12 does not "
                    "register as a pytree. Pass nnx.state(model), and put it into a clone of the model in the step."
                )
        self._is_repeated = _repeated(self._objects)
        self.arguments: list[PyTree] = self._replace(self._values(self._objects))
        self.is_nnx = [bool(flatten_matching(x, is_nnx_object, is_nnx_object)[0]) for x in given]

    @property
    def is_compiled(self) -> bool:
        """Whether `jax.jit`, `jax.pmap` or a framework compiles the step."""
        step = self.step
        while isinstance(step, functools.partial):
            step = step.func
        return hasattr(step, "lower")

    def run(self, arguments: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
        """Calls the step with other values of the same structure; they may be traced.

        Returns:
          The result of the step, and the values of the arguments that contain objects of Flax NNX, after the step.
        """
        args, keywords = self.given(arguments)
        objects, replace = flatten_matching([*args, *keywords.values()], is_nnx_object, is_nnx_object)
        result = self.step(*args, **keywords)
        after = replace(self._values(objects))
        return result, [x for x, is_nnx in zip(after, self.is_nnx, strict=True) if is_nnx]

    def given(self, arguments: Sequence[PyTree]) -> tuple[list[Any], dict[str, Any]]:
        """Returns what the step is called with for other values of the arguments, with new objects of Flax NNX."""
        values, replace = flatten_matching(list(arguments), is_nnx_object, is_nnx_object)
        objects = sys.modules["flax.nnx"].clone(self._objects) if self._objects else []
        for (path, new), (_, old) in zip(_places(values), _places(objects), strict=True):
            if new is not None:
                _write(objects, path, old, new)
        given = replace(objects)
        return given[: self.positional], dict(zip(self._keywords, given[self.positional :], strict=True))

    def trace(self, axes: Sequence[tuple[str, int]] = ()) -> tuple[PyTree, core.ClosedJaxpr]:
        """Traces the step, once, in the scope of some axes. Python numbers among the arguments remain numbers.

        Returns:
          What `run` returns, with the types of the arrays in place of the arrays; and a program that computes these
          arrays from the arrays of the arguments, in the order of the leaves.
        """
        arrays, unflatten = flatten_matching(self.arguments, is_array)
        unflatten_outputs: Callable[..., PyTree] = tuple

        def outputs(*arrays: Any) -> list[Any]:
            nonlocal unflatten_outputs
            found, unflatten_outputs = flatten_matching(self.run(unflatten(arrays)), is_array)
            return found

        program, types = jax.make_jaxpr(outputs, axis_env=list(axes), return_shape=True)(*arrays)
        return unflatten_outputs(types), program

    def _values(self, objects: list[Any]) -> list[Any]:
        """Returns copies of objects, without variables that occur in an earlier place too."""
        repeated = iter(self._is_repeated)
        # A new variable, with the value that it has now.
        return jax.tree.map(
            lambda x: None if next(repeated) else jax.tree.map(lambda y: y, x), objects, is_leaf=_is_place
        )


def reads_values(error: Exception) -> bool:
    """Tests whether an error shows that Python reads the values of an array of a program that is traced."""
    if isinstance(error, _UNREADABLE):
        return True
    # Of a format string, as in f"{loss:.3f}", and of a shape.
    return isinstance(error, TypeError) and any(x in str(error) for x in ("Tracer.__format__", "concrete values"))


def is_array_type(leaf: object) -> TypeGuard[jax.Array | jax.ShapeDtypeStruct]:
    """Tests whether a leaf is an array, or the type of an array in a result of `StepCall.trace`."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _without_bound_objects(
    step: Callable[..., PyTree], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., PyTree], Sequence[Any], dict[str, Any]]:
    """Returns a call whose arguments include the Flax NNX objects that `functools.partial` binds.

    They are part of the state of the step.
    """
    if not isinstance(step, functools.partial):
        return step, args, kwargs
    bound = [*step.args, *step.keywords.values()]
    if not flatten_matching(bound, is_nnx_object, is_nnx_object)[0]:
        return step, args, kwargs
    return _without_bound_objects(step.func, (*step.args, *args), {**step.keywords, **kwargs})


def argument_names(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Returns the names of the arguments of a call, such as `params`, or `args[0]` where the function has no name."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # fun has no signature
        parameters = []
    known = [x.name for x in parameters if x.kind in {x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD}]
    others = next((x.name for x in parameters if x.kind is x.VAR_POSITIONAL), "args")
    return [*known[: len(args)], *[f"{others}[{i}]" for i in range(len(args) - len(known))], *kwargs]


def _is_variable(node: object) -> bool:
    return isinstance(node, imported("flax.nnx", "Variable"))


def _is_place(node: object) -> bool:
    """Tests whether a node of an object is a variable, or the None that stands for one."""
    return node is None or _is_variable(node)


def _places(objects: PyTree) -> list[tuple[Any, Any]]:
    """Returns the variables and the arrays that are not variables, each with its path."""
    return jax.tree_util.tree_leaves_with_path(objects, is_leaf=_is_place)


def _repeated(objects: list[Any]) -> list[bool]:
    """Tests for each place of some objects whether it holds a variable that belongs to another place."""
    # A model may hold the loss scale of the optimizer's state, to which it belongs: a scaler must be complete.
    nodes = jax.tree_util.tree_leaves_with_path(objects, is_leaf=is_named_tuple)
    states = [path for path, node in nodes if is_named_tuple(node)]
    places = _places(objects)
    inside = [i for i, (path, _) in enumerate(places) if any(path[: len(state)] == state for state in states)]
    owners: dict[int, int] = {}
    for i in (*inside, *range(len(places))):
        owners.setdefault(id(places[i][1]), i)
    return [_is_variable(node) and owners[id(node)] != i for i, (_, node) in enumerate(places)]


def _write(objects: list[Any], path: tuple[Any, ...], old: Any, new: Any) -> None:
    """Gives a variable, or an array outside of the variables, of some objects another value."""
    if _is_variable(old):
        nnx = sys.modules["flax.nnx"]
        nnx.update([old], nnx.state([new]))
        return
    *outer, last = path
    holder = objects
    for key in outer:
        holder = getattr(holder, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else holder[_index(key)]
    if isinstance(last, jax.tree_util.GetAttrKey):
        setattr(holder, last.name, new)
    else:
        holder[_index(last)] = new


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key
