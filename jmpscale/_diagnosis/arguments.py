"""The arguments of a call that is diagnosed: their names, what their values must be, and the errors that it accepts."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmpscale._base.arguments import check_in_range
from jmpscale._base.tree import PyTree, check_has_values, check_no_refs, is_inexact, named_leaves
from jmpscale._diagnosis.thresholds import AcceptedErrors
from jmpscale._step.call import argument_names


def accepted_errors(accepted_error: float | None) -> AcceptedErrors:
    """Returns the largest errors that are accepted, given the `accepted_error` of a diagnosis, or raises."""
    if accepted_error is None:
        return AcceptedErrors()
    remedy = "It is a relative error, which is 1 for gradients of zeros. Pass 0.1 to accept 10%."
    error = check_in_range("accepted_error", accepted_error, 1e-6, 0.99, remedy)
    return AcceptedErrors(error, error, error, error, error, is_chosen=True)


def check_arguments(trees: dict[str, PyTree], function: str) -> None:
    """Raises if an argument of `function` has no values, or is used without the context of its mesh."""
    for name, tree in trees.items():
        check_no_refs(tree, name)
        check_has_values(tree, name, function)
        for path, leaf in named_leaves(tree):
            mesh: Any = getattr(getattr(leaf, "sharding", None), "mesh", jax.sharding.get_abstract_mesh())
            if jax.sharding.AxisType.Explicit in mesh.axis_types and jax.sharding.get_abstract_mesh().empty:
                raise ValueError(
                    f"{name} must be used in the context of its mesh, got an array on a mesh with Explicit axes at "
                    f"{name}{path}. Call {function} in the context of jax.set_mesh(mesh)."
                )


def named_arguments(
    fun: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[tuple[str, Any]]:
    """Returns the leaves of the arguments of a call with their names, such as `batch['image']`."""
    trees = zip(argument_names(fun, args, kwargs), (*args, *kwargs.values()), strict=True)
    return [(name + path, leaf) for name, tree in trees for path, leaf in named_leaves(tree)]


def gradients_by_argument(
    grads: PyTree, argnums: Any, fun: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[tuple[str, Any]]:
    """Returns the leaves of the gradients of a call with the names of the arguments that they belong to."""
    names = argument_names(fun, args, kwargs)[: len(args)]
    trees = [("", grads)]
    if isinstance(argnums, int):
        trees = [(names[argnums], grads)]
    elif isinstance(argnums, (tuple, list)) and all(isinstance(i, int) for i in argnums):
        trees = [(names[i], tree) for i, tree in zip(argnums, grads, strict=True)]
    return [(name + path, leaf) for name, tree in trees for path, leaf in named_leaves(tree)]


def non_finite(arguments: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns the names of the arguments with infinities or NaN."""
    return [name for name, leaf in arguments if is_inexact(leaf) and not bool(jnp.isfinite(leaf).all())]
