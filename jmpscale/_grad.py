"""Gradients in true units, computed by a scaled backward pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.compat import axis_names_in_scope
from jmpscale._base.frameworks import imported
from jmpscale._base.gradients import observe
from jmpscale._base.marks import Mark, has_mark, mark
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import (
    PyTree,
    check_no_nnx_objects,
    find_instances,
    first_leaf,
    is_array,
    is_inexact,
    is_real_scalar,
)
from jmpscale._scaler_of_tree import find_scaler, is_scaler, warn_if_constant
from jmpscale._scaling import scale_losses, unscale_gradients

T = TypeVar("T")
Function = Callable[..., Any]

_SCALER_COMES_FIRST = (
    "The scaler is the first positional argument of the new function: value_and_grad(loss_fn)(scaler, params, batch). "
    "It may also be the state of an optimizer that is wrapped in with_loss_scaling."
)
_SELF_COMES_FIRST = "A decorated method receives self before the scaler. Call value_and_grad(self.{})(scaler, batch)."
_NOT_THE_STEP = "Pass the loss function itself, not a training step or a function that returns gradients."
_REDUCE_THE_LOSS = "Reduce it with .sum() or .mean(), or use scale, jax.vjp and unscale."
_RETURN_THE_LOSS = f"Return the loss. {_NOT_THE_STEP} Auxiliary data require has_aux=True."


@overload
def value_and_grad(
    fun: Callable[..., T], argnums: Any = 0, has_aux: bool = False, *, transform: Function = jax.value_and_grad
) -> Callable[..., tuple[T, PyTree]]: ...
@overload
def value_and_grad(
    *, argnums: Any = 0, has_aux: bool = False, transform: Function = jax.value_and_grad
) -> Callable[[Callable[..., T]], Callable[..., tuple[T, PyTree]]]: ...
def value_and_grad(
    fun: Function | None = None,
    argnums: Any = 0,
    has_aux: bool = False,
    *_arguments: object,
    transform: Function = jax.value_and_grad,
) -> Function:
    """Creates a function that returns the loss and its gradients, computed by a scaled backward pass.

    It replaces `jax.value_and_grad`; the new function takes a scaler before the arguments of `fun`. The backward pass
    runs on the loss times the loss scale. As a decorator it takes options: `@jmpscale.value_and_grad(has_aux=True)`.

    Args:
      fun: the loss function. It returns a scalar loss in float32.
      argnums: which positional arguments of `fun`, without the scaler, to differentiate with respect to: an int, a
        sequence of ints, or whatever else `transform` takes, such as `nnx.DiffState(0, nnx.LoRAParam)`.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data.
      transform: the `value_and_grad` of the model's framework, such as `flax.nnx.value_and_grad`, which keeps batch
        statistics and random streams up to date, or `equinox.filter_value_and_grad`.

    Returns:
      `f(scaler, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` if `has_aux` is true. The first
      argument is the scaler, or any pytree that contains exactly one, such as the optimizer state of
      `with_loss_scaling`. The value is the result of `fun`, bit for bit. The gradients are in true units, and not
      finite where the backward pass overflowed. If the loss is not finite, they are NaN; under `jax.shard_map`,
      `jax.pmap` and `jax.vmap(axis_name=...)`, a comparison may hide that from some of them, so check
      `all_finite((loss, grads))`. They have the dtype of the argument, or float32 if the argument is float16 or float8.

    Raises:
      TypeError: an argument has the wrong type; `fun` returns a loss that is not a real floating-point scalar, or does
        not return a pair although `has_aux` is true; or a differentiated argument is a model of Flax NNX or Equinox,
        and `transform` is not the `value_and_grad` of this framework.
      ValueError: the first argument does not contain exactly one scaler.

    Warns:
      UserWarning: a dynamic scaler is a constant of a compiled program, so every call would use the same scale; or
        `fun` scales the loss itself.

    >>> import jmpscale
    >>> loss, grad = jmpscale.value_and_grad(lambda w, x: (w * x) ** 2)(jmpscale.dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if fun is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, transform=transform)
    if not callable(fun):
        raise TypeError(f"fun must be the loss function, got {describe(fun)}. {_SCALER_COMES_FIRST}")
    if _arguments or any(is_array(leaf) and is_inexact(leaf) for leaf in jax.tree.leaves(argnums)):
        raise TypeError(f"value_and_grad takes the loss function, but not its arguments. {_SCALER_COMES_FIRST}")
    unwrapped = getattr(fun, "__wrapped__", fun)  # jax.jit and autocast wrap functions
    if getattr(unwrapped, "__qualname__", "") == "value_and_grad.<locals>.value_and_grad_fun":
        raise TypeError(f"fun must be the loss function, got a result of value_and_grad. {_NOT_THE_STEP}")
    name = str(getattr(fun, "__name__", "fun"))
    # equinox.filter_value_and_grad has no argnums, and nnx.value_and_grad takes it by keyword only.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    # A parameter of fun may also be called scaler, so the scaler is positional only.
    def value_and_grad_fun(scaler: PyTree = None, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        observe(fun, argnums, has_aux, transform, scaler, args, kwargs)  # by diagnose_step
        is_self = hasattr(type(scaler), name)
        state = find_scaler(scaler, remedy=_SELF_COMES_FIRST.format(name) if is_self else _SCALER_COMES_FIRST)
        _check_differentiable(args, argnums, transform)
        if state.config.mode == "dynamic":
            warn_if_constant(state, args, "scaler" if is_scaler(scaler) else "optimizer state")
        # Devices that compute their own losses may have gradients in common, so the backward pass carries the check of
        # the loss. Elsewhere, the backward pass need not wait for a loss that is summed over devices.
        is_mapped = bool(axis_names_in_scope())

        # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[Any, _Output]:
            loss, out = loss_and_output(fun(*args, **kwargs), has_aux)
            # diagnose may be given a function with loss_scaled, and has a static scaler.
            by_loss_scaled = has_mark(Mark.SCALED_BACKWARD, loss) and state.config.mode == "dynamic"
            if by_loss_scaled or (has_mark(Mark.SCALED, loss) and state.config.mode != "disabled"):
                warn_user(
                    "the loss is scaled twice, because value_and_grad scales it. Remove "
                    f"{'loss_scaled' if by_loss_scaled else 'scale from the loss'}."
                )
            if is_real_scalar(loss):
                return scale_losses(state, loss, with_check=is_mapped), _Output(out)
            # Without scaling, another `transform` may accept other losses.
            if state.config.mode == "disabled" and transform is not jax.value_and_grad:
                return loss, _Output(out)
            remedy = _REDUCE_THE_LOSS if is_inexact(loss) else _RETURN_THE_LOSS
            raise TypeError(f"fun must return a real floating-point scalar as the loss, got {describe(loss)}. {remedy}")

        match transform(scaled_fun, has_aux=True, **options)(*args, **kwargs):
            case ((_, _Output(out)), grads):
                loss = out[0] if has_aux else out
                mark(Mark.LOSS, loss)
                return out, unscale_gradients(state, grads, None if is_mapped else loss)
        raise TypeError(
            "transform must return ((value, aux), grads) as jax.value_and_grad does, but it returned another "
            "structure. Pass jax.value_and_grad, flax.nnx.value_and_grad or equinox.filter_value_and_grad, not grad."
        )

    # functools.wraps would show jax.jit(..., static_argnames=...) the signature of fun, which lacks the scaler.
    value_and_grad_fun.__name__ = f"value_and_grad_of_{name}"
    return value_and_grad_fun


class _Output(NamedTuple):
    """The output of the loss function, which `transform` returns as auxiliary data."""

    value: Any


def loss_and_output(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss and the output; a pair becomes a plain tuple, because JAX does not look inside a subclass."""
    if not has_aux:
        return out, out
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"fun must return a pair (loss, aux) because has_aux is true, got {describe(out)}. Return both, or omit "
            "has_aux; collect several auxiliary values in one aux."
        )
    return out[0], tuple(out)


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
