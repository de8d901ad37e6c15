"""Guards of `value_and_grad`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.frameworks import AVERAGES, averages_of_gradients, imported
from jmpscale._base.marks import Mark, has_mark, mark
from jmpscale._base.text import describe, enumerate_names, type_name
from jmpscale._base.tree import (
    PyTree,
    check_no_nnx_objects,
    find_instances,
    first_leaf,
    is_array,
    is_inexact,
    is_named,
    is_real_scalar,
    is_traced,
    named_leaves,
)
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import only_scaler, states_beside_wrapper, warn_if_constant, warn_if_inside_another
from jmpscale._state import ScalerState, WithLossScalingState

Function = Callable[..., Any]

_SCALER_COMES_FIRST = (
    "The scaler is the first positional argument of the new function: value_and_grad(loss_fn)(scaler, params, batch). "
    "It may also be the state of an optimizer that is wrapped in with_loss_scaling."
)
_SELF_COMES_FIRST = "A decorated method receives self before the scaler. Call value_and_grad(self.{})(scaler, batch)."
_NOT_THE_STEP = "Pass the loss function itself, not a training step or a function that returns gradients."
_REDUCE_THE_LOSS = "Reduce it with .sum() or .mean(), or use scale, jax.vjp and unscale."
_TRANSFORMS = "Pass jax.value_and_grad, flax.nnx.value_and_grad or equinox.filter_value_and_grad, not grad."
_RETURN_THE_LOSS = f"Return the loss. {_NOT_THE_STEP} Auxiliary data require has_aux=True."


def created(fun: object, argnums: Any, overwrite_with_gradient: Any, transform: object) -> None:
    if not callable(fun):
        raise TypeError(f"fun must be the loss function, got {describe(fun)}. {_SCALER_COMES_FIRST}")
    if any(is_array(leaf) and is_inexact(leaf) for leaf in jax.tree.leaves(argnums)):
        raise TypeError(f"value_and_grad takes the loss function, but not its arguments. {_SCALER_COMES_FIRST}")
    unwrapped = getattr(fun, "__wrapped__", fun)  # jax.jit and autocast wrap functions
    if getattr(unwrapped, "__qualname__", "") == "value_and_grad.<locals>.value_and_grad_fun":
        raise TypeError(f"fun must be the loss function, got a result of value_and_grad. {_NOT_THE_STEP}")
    if not callable(transform):
        raise TypeError(f"transform must be a function, got {describe(transform)}. {_TRANSFORMS}")
    names = overwrite_with_gradient
    if not (isinstance(names, str) or (isinstance(names, Sequence) and all(isinstance(x, str) for x in names))):
        raise TypeError(
            "overwrite_with_gradient must be a path in the gradients, or several, got "
            f"{describe(names)}. Pass strings, such as \"['amax']\" for the leaf grads['amax']."
        )


def called(scaler: PyTree, name: str) -> None:
    """Checks the first argument in a call of the new function; `name` is the name of the loss function."""
    is_self = hasattr(type(scaler), name)
    only_scaler(scaler, "scaler", _SELF_COMES_FIRST.format(name) if is_self else _SCALER_COMES_FIRST)


def differentiating(
    scaler: PyTree, state: ScalerState, args: tuple[PyTree, ...], argnums: Any, transform: Function
) -> None:
    _check_differentiable(args, argnums, transform)
    warn_if_inside_another(scaler)
    if state.config.mode == "dynamic":
        warn_if_constant(state, args, "scaler" if isinstance(scaler, ScalerState) else "optimizer state")


def fun_returned(out: object, has_aux: bool) -> None:
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"fun must return a pair (loss, aux) because has_aux is true, got {describe(out)}. Return both, or omit "
            "has_aux; collect several auxiliary values in one aux."
        )


def loss_computed(loss: object, state: ScalerState, transform: Function) -> None:
    # diagnose may be given a function with scaled_backward, and has a static scaler.
    by_scaled_backward = has_mark(Mark.SCALED_BACKWARD, loss) and state.config.mode == "dynamic"
    if by_scaled_backward or (has_mark(Mark.SCALED, loss) and state.config.mode != "disabled"):
        warn_user(
            "the loss is scaled twice, because value_and_grad scales it. Remove "
            f"{'scaled_backward' if by_scaled_backward else 'scale from the loss'}."
        )
    # Without scaling, another `transform` may accept other losses.
    if not is_real_scalar(loss) and (state.config.mode != "disabled" or transform is jax.value_and_grad):
        remedy = _REDUCE_THE_LOSS if is_inexact(loss) else _RETURN_THE_LOSS
        raise TypeError(f"fun must return a real floating-point scalar as the loss, got {describe(loss)}. {remedy}")


def transform_returned(result: object, kind: type, others: Sequence[str]) -> None:
    """Checks the result of `transform`; `kind` is the class of the auxiliary data that it must return.

    `others` are the paths of leaves that are not gradients.
    """
    match result:
        case ((_, aux), grads) if isinstance(aux, kind):
            _check_paths(others, grads)
            return
    raise TypeError(
        "transform must return ((value, aux), grads) as jax.value_and_grad does, but it returned another structure. "
        f"{_TRANSFORMS}"
    )


def _check_paths(others: Sequence[str], grads: PyTree) -> None:
    """Raises if a path names no leaf of the gradients."""
    paths = [path for path, _ in named_leaves(grads)] if others else []
    if unknown := [name for name in others if not any(is_named(path, [name]) for path in paths)]:
        raise ValueError(
            f"overwrite_with_gradient must name leaves of the gradients, got {describe(unknown[0])}. "
            f"The paths are {enumerate_names(list(map(describe, paths)), limit=8)}."
        )


def computed(loss: object, grads: PyTree, scaler: PyTree, state: ScalerState) -> None:
    mark(Mark.LOSS, loss)
    if not is_traced(state.loss_scale):
        mark(Mark.KNOWN_SCALE, (loss, grads))  # `differentiating` has warned if the scale should be traced
    if state.config.mode != "disabled":
        _warn_if_optimizer_is_beside_wrapper(scaler, grads)


def _warn_if_optimizer_is_beside_wrapper(state: PyTree, grads: PyTree) -> None:
    """Warns if `optax.chain` contains an optimizer with averages of these gradients beside the wrapper.

    A tuple of the states of two optimizers looks like a chain. So the wrapped optimizer must have no state, as
    `optax.identity` has none, and the averages must have the shapes of the gradients.
    """
    shapes = list(map(jnp.shape, jax.tree.leaves(grads)))

    def has_averages(neighbor: PyTree) -> bool:
        averages = [averages_of_gradients(neighbor, [name]) for name in AVERAGES]
        return any(list(map(jnp.shape, arrays)) == shapes for arrays in averages if arrays)

    has_own_state = any(jax.tree.leaves(x.inner_state) for x in find_instances(state, WithLossScalingState))
    if not has_own_state and any(map(has_averages, states_beside_wrapper(state))):
        warn_user(
            "an optimizer is beside with_loss_scaling in optax.chain, where a skipped step changes its averages and "
            "the parameters. Place it inside: with_loss_scaling(optax.chain(...))."
        )


def _check_differentiable(args: tuple[PyTree, ...], argnums: Any, transform: Function) -> None:
    """Raises for leaves without a derivative, and for models whose state `jax.value_and_grad` would silently lose."""
    of_nnx = transform is imported("flax.nnx", "value_and_grad")
    of_equinox = transform is imported("equinox", "filter_value_and_grad")
    if not (transform is jax.value_and_grad or of_nnx or of_equinox):
        return
    for position in np.atleast_1d(np.asarray(argnums)).tolist():
        if not isinstance(position, int) or position < -len(args):
            continue  # JAX raises
        if position >= len(args):
            raise TypeError(
                f"argnums must be positions of arguments of fun, without the scaler, got {position} in a call with "
                f"{len(args)} positional arguments after it. Pass arguments by position to differentiate them."
            )
        if not of_nnx:
            check_no_nnx_objects(
                args[position],
                "the differentiated arguments",
                "Pass transform=flax.nnx.value_and_grad, which keeps batch statistics and random streams up to date.",
            )
        models = find_instances(args[position], imported("equinox", "Module"))
        if of_equinox or (of_nnx and not models):
            continue
        if found := first_leaf(args[position], lambda leaf: not is_inexact(leaf)):
            path, leaf = found
            got = f"{describe(leaf)} at {path}" if path else describe(leaf)
            remedy = "argnums does not count the scaler. Pass integers and other objects in another argument."
            if models:
                got = f"an Equinox {type_name(models[0])} with {got}"
                remedy = "Pass transform=equinox.filter_value_and_grad."
            raise TypeError(f"argument {position} must have only differentiable leaves, got {got}. {remedy}")
