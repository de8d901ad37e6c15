"""Recognizes objects of Flax, Equinox, optax and Levanter without importing these libraries.

`imported` looks up their names among the modules that the program has imported.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import jax

# A warning names the first line of the stack that is not in one of these packages.
PACKAGES = {"jmpscale", "jax", "optax", "flax", "equinox", "chex", "contextlib", "functools"}

# The names of the variables of Flax's fp8 layers, for which a backward pass returns new values in place of gradients:
# their collection (flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT), and pairs such as input_scale and input_amax_history.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_SCALE, _HISTORY = "_scale", "_amax_history"


def imported(module: str, *names: str) -> Any:
    """Returns the first of some names that a module defines; an empty tuple if the program has not imported it."""
    # While another thread is still importing the module, it exists without its names.
    found = sys.modules.get(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), ())


def is_nnx_object(node: object) -> bool:
    """Tests whether a node of a tree is a Flax NNX object, which is changed in place."""
    return isinstance(node, imported("flax.nnx", "Pytree", "Object"))


def is_nnx(node: object) -> bool:
    """Tests whether a node of a tree is a Flax NNX object or variable, which is changed in place."""
    return is_nnx_object(node) or isinstance(node, imported("flax.nnx", "Variable"))


def is_outer_nnx(node: object) -> bool:
    """Tests whether a Flax NNX object or variable belongs to an outer trace, in which case Flax forbids changes."""
    nnx = sys.modules["flax.nnx"]
    try:
        nnx.update([node], nnx.state([node]))  # assigns the values that the node has; never raises in Flax 0.11
    except Exception as error:
        if is_trace_error(error):
            return True
        raise
    return False


def is_trace_error(error: Exception) -> bool:
    """Tests whether Flax has raised an error because an object of an outer trace would be changed."""
    return type(error).__name__ == "TraceContextError"


def fp8_statistics(paths: Sequence[tuple[Any, ...]]) -> set[int]:
    """Returns the indices of the scales and histories of Flax's fp8 layers, even outside their named collection."""
    found = {i for i, path in enumerate(paths) if any(_key_name(key) == _OVERWRITE_WITH_GRADIENT for key in path)}
    places = {(path[:-1], _key_name(path[-1])): i for i, path in enumerate(paths) if path}
    for (parent, name), i in places.items():
        scale = parent, str(name).removesuffix(_HISTORY) + _SCALE
        if str(name).endswith(_HISTORY) and scale in places:
            found |= {i, places[scale]}
    return found


def _key_name(key: object) -> object:
    return getattr(key, "key", getattr(key, "name", None))


class AnyAuxData:
    """The auxiliary data of a node that Levanter's checkpointer has rebuilt with paths in place of its arrays.

    The checkpointer rebuilds a named tuple by its fields, with None for a field without leaves, and maps the result
    together with the original. JAX allows this only if their auxiliary data are equal.
    """

    def __eq__(self, other: object) -> bool:
        return other is not None

    def __hash__(self) -> int:
        return hash(AnyAuxData)


def aux_data_of_paths(children: Sequence[Any]) -> AnyAuxData | None:
    """Returns auxiliary data that equal all others if the children of a node are paths; None if they are values.

    Paths cannot be arguments of a compiled function, for which JAX would look up a program by these auxiliary data.
    """
    return AnyAuxData() if children and all(isinstance(child, str) for child in children) else None


def is_optax_state(node: object) -> bool:
    """Tests whether a node of a tree is the state of one of optax's transformations."""
    return type(node).__module__.partition(".")[0] == "optax"


# The names of averages of gradients in optax's states, and the hyperparameters that are their decays.
_DECAYS = {"mu": ("b1",), "nu": ("b2",), "trace": ("momentum", "decay"), "ema": ("decay",)}


AVERAGES = "mu", "nu", "trace"  # the fields of the averages that every optimizer changes in every step


def averages_of_gradients(state: Any, names: Collection[str] = AVERAGES) -> list[Any]:
    """Returns the leaves of optax's states that hold averages of gradients, such as `mu` of Adam, or of their squares.

    `names` are the fields of the states.
    """

    def averages(node: Any) -> list[Any]:
        return [getattr(node, name) for name in names if is_optax_state(node) and hasattr(node, name)]

    return jax.tree.leaves([averages(x) for x in jax.tree.leaves(state, is_leaf=lambda x: bool(averages(x)))])


def known_decays(state: Any) -> list[tuple[str, Any, list[Any]]]:
    """Returns the decays that `optax.inject_hyperparams` stores in a state: a name, the value, and its averages."""

    def hyperparameters(node: Any) -> dict[str, Any]:
        return getattr(node, "hyperparams", {}) if is_optax_state(node) else {}

    nodes = [x for x in jax.tree.leaves(state, is_leaf=lambda x: bool(hyperparameters(x))) if hyperparameters(x)]
    return [
        (name, hyperparameters(node)[name], averages_of_gradients(node.inner_state, [average]))
        for node in nodes
        for average, names in _DECAYS.items()
        for name in names
        if name in hyperparameters(node)
    ]
