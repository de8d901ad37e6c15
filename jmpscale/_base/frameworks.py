"""The names of Flax, Equinox and optax that the package recognizes without importing them.

Only this module looks for these libraries, among the modules that the program has imported. The exception is
`with_loss_scaling`, which is written for optax and imports it.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

# A warning names the first line of the stack that is not in one of these packages.
PACKAGES = {"jmpscale", "jax", "optax", "flax", "equinox", "chex", "contextlib", "functools"}

# The names of the variables of Flax's fp8 layers, for which a backward pass returns new values in place of gradients:
# their collection (flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT), and pairs such as input_scale and input_amax_history.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_SCALE, _HISTORY = "_scale", "_amax_history"


def _imported(module: str, *names: str) -> Any:
    """Returns the first of some names that a module has; None if the program has not imported the module."""
    # While another thread is still importing the module, it exists without its names.
    found = sys.modules.get(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def is_nnx_object(node: object) -> bool:
    """Tests whether a node of a tree is a Flax NNX object, which is changed in place."""
    return isinstance(node, _imported("flax.nnx", "Pytree", "Object") or ())


def nnx_variable_class() -> type[Any] | None:
    """Returns `flax.nnx.Variable` if the program has imported it."""
    return _imported("flax.nnx", "Variable")


def is_nnx(node: object) -> bool:
    """Tests whether a node of a tree is a Flax NNX object or variable, which is changed in place."""
    return is_nnx_object(node) or isinstance(node, nnx_variable_class() or ())


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


def clone_nnx_objects(objects: list[Any]) -> list[Any]:
    """Returns copies of Flax NNX objects. Variables that the objects share are also shared by the copies."""
    return sys.modules["flax.nnx"].clone(objects)


def nnx_lifting() -> Any:
    """Returns the module of Flax that passes the state of NNX objects into transformed functions, and out of them."""
    return importlib.import_module("flax.nnx.transforms.general")  # the module that created the objects has imported it


def nnx_value_and_grad() -> Any:
    """Returns `flax.nnx.value_and_grad` if the program has imported it."""
    return _imported("flax.nnx", "value_and_grad")


def equinox_module_class() -> type[Any] | None:
    """Returns `equinox.Module` if the program has imported it."""
    return _imported("equinox", "Module")


def register_serialization(kind: type, to_state_dict: Callable[..., Any], from_state_dict: Callable[..., Any]) -> None:
    """Registers a class with `flax.serialization` if the program has imported it."""
    if register := _imported("flax.serialization", "register_serialization_state"):
        register(kind, to_state_dict, from_state_dict, override=True)


def fp8_statistics(paths: Sequence[tuple[Any, ...]]) -> set[int]:
    """Returns the indices of the scales and histories of Flax's fp8 layers, even outside their named collection."""
    found = {i for i, path in enumerate(paths) if any(_key_name(key) == _OVERWRITE_WITH_GRADIENT for key in path)}
    names = [_key_name(path[-1]) if path else None for path in paths]
    histories = [i for i, name in enumerate(names) if isinstance(name, str) and name.endswith(_HISTORY)]
    for i in histories:
        scale = str(names[i]).removesuffix(_HISTORY) + _SCALE
        siblings = [j for j, name in enumerate(names) if name == scale and paths[j][:-1] == paths[i][:-1]]
        found |= {i, *siblings} if siblings else set()
    return found


def _key_name(key: object) -> object:
    return getattr(key, "key", getattr(key, "name", None))


def multi_steps_sums(tree: Any) -> list[Any]:
    """Returns the leaves of the gradients that `optax.MultiSteps` has accumulated, recognized by their field's name."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf for path, leaf in entries if any(getattr(key, "name", "") == "acc_grads" for key in path)]
