"""Gradients in true units, computed by a scaled backward pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.frameworks import equinox_module_class
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, check_no_nnx_objects, find_instances, is_inexact, is_real, named_leaves
from jmpscale._find_scaler import find_scaler
from jmpscale._scaling import scale as scale_loss
from jmpscale._scaling import unscale
from jmpscale._state import ScalerState

Function = Callable[..., Any]

_SCALER_COMES_FIRST = (
    "The scaler is the first positional argument of the new function: value_and_grad(loss_fn)(scaler, params, batch). "
    "It may also be the state of an optimizer that is wrapped in with_loss_scaling."
)


@overload
def value_and_grad(
    fun: Function, argnums: Any = 0, has_aux: bool = False, *, transform: Function = jax.value_and_grad
) -> Callable[..., tuple[Any, PyTree]]: ...
@overload
def value_and_grad(
    *, argnums: Any = 0, has_aux: bool = False, transform: Function = jax.value_and_grad
) -> Callable[[Function], Callable[..., tuple[Any, PyTree]]]: ...
def value_and_grad(
    fun: Function | None = None, argnums: Any = 0, has_aux: bool = False, *, transform: Function = jax.value_and_grad
) -> Function:
    """Creates a function that returns the loss and its gradients, computed by a scaled backward pass.

    It replaces `jax.value_and_grad`; the new function takes a scaler before the arguments of `fun`. The backward pass
    runs on the loss times the loss scale. The gradients are unscaled before they are returned.

    As a decorator it takes options: `@jmpscale.value_and_grad(has_aux=True)`.

    Args:
      fun: the loss function. It returns a scalar loss in float32, or a pair of the loss and auxiliary data if `has_aux`
        is true.
      argnums: which positional arguments of `fun` to differentiate with respect to: an int, a sequence of ints, or
        whatever else `transform` takes, such as `nnx.DiffState(0, nnx.LoRAParam)`.
      has_aux: whether `fun` returns a pair.
      transform: the `value_and_grad` of the model's framework: `flax.nnx.value_and_grad`, which keeps batch statistics
        and random streams up to date, or `equinox.filter_value_and_grad`, which takes whole models.

    Returns:
      `f(scaler, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` if `has_aux` is true. The first
      argument is the scaler, or any pytree that contains exactly one, such as the optimizer state of
      `with_loss_scaling`. The value is the result of `fun`, bit for bit. The gradients are in true units. They have the
      dtype of the argument, or float32 if the argument is float16 or float8. They are not finite where the backward
      pass overflowed.

    Raises:
      TypeError: the scaler is missing; `fun` is not callable, does not return a pair although `has_aux` is true, or
        returns a loss that is not a real floating-point scalar; `transform` is not a `value_and_grad`; or it is
        `jax.value_and_grad`, and a differentiated argument is a Flax NNX object or contains leaves that are not
        differentiable.
      ValueError: the first argument contains no scaler, more than one, or a batch of scalers.

    >>> import jmpscale
    >>> loss, grad = jmpscale.value_and_grad(lambda w, x: (w * x) ** 2)(jmpscale.dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if fun is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, transform=transform)
    if not callable(fun):
        raise TypeError(f"fun must be the loss function, got {describe(fun)}. {_SCALER_COMES_FIRST}")
    if isinstance(argnums, ScalerState):
        raise TypeError(f"argnums must be an int or a sequence of ints, got a ScalerState. {_SCALER_COMES_FIRST}")
    # equinox.filter_value_and_grad has no argnums, and nnx.value_and_grad takes it by keyword only.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    # A parameter of fun may also be called scaler, so the scaler is positional only.
    def value_and_grad_fun(scaler: PyTree = None, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        if scaler is None:
            raise TypeError(f"scaler must be given by position, got none. {_SCALER_COMES_FIRST}")
        state = find_scaler(scaler, remedy=_SCALER_COMES_FIRST)
        if transform is jax.value_and_grad:
            _check_differentiable(args, argnums)

        # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[Any, _Output]:
            out = fun(*args, **kwargs)
            out = as_pair(out) if has_aux else out
            loss = out[0] if has_aux else out
            if is_real_scalar(loss):
                return scale_loss(state, loss), _Output(out)
            losses_of_wrong_type.append(loss)  # most transformations raise the error of their framework
            return loss, _Output(out)

        losses_of_wrong_type: list[object] = []
        out, grads = _output_and_gradients(transform(scaled_fun, has_aux=True, **options)(*args, **kwargs))
        if losses_of_wrong_type and state.config.mode != "disabled":
            _raise_unscaled(losses_of_wrong_type[0])
        return out, unscale(state, grads)

    # functools.wraps would show jax.jit(..., static_argnames=...) the signature of fun, which lacks the scaler.
    value_and_grad_fun.__name__ = f"value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return value_and_grad_fun


class _Output(NamedTuple):
    """The output of the loss function, which `transform` returns as auxiliary data."""

    value: Any


def _output_and_gradients(result: Any) -> tuple[Any, PyTree]:
    """Takes the result of `transform` apart; raises if it is not a `value_and_grad`."""
    match result:
        case ((_, _Output(out)), grads):
            return out, grads
    raise TypeError(
        "transform must return ((value, aux), grads) as jax.value_and_grad does, but it returned another structure. "
        "Pass jax.value_and_grad, flax.nnx.value_and_grad or equinox.filter_value_and_grad, not grad."
    )


def _count(value: object) -> str:
    return f"{describe(value)} of {len(value)}" if isinstance(value, (tuple, list)) else describe(value)


def _raise_unscaled(loss: object) -> NoReturn:
    """Raises for a loss that cannot be scaled, because the gradients would be divided by the scale nevertheless."""
    raise TypeError(
        f"fun must return a real floating-point scalar as the loss, got {describe(loss)}, which transform accepts, but "
        "which cannot be scaled. Reduce it with .sum() or .mean(), or use scale, jax.vjp and unscale."
    )


def as_pair(out: object) -> tuple[Any, Any]:
    """Returns the loss and the auxiliary data as a plain tuple: JAX does not look inside a subclass of tuple."""
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"fun must return a pair (loss, aux) because has_aux is true, got {_count(out)}. Return both, or omit "
            "has_aux; collect several auxiliary values in one aux."
        )
    loss, aux = out
    return loss, aux


def is_real_scalar(loss: object) -> bool:
    """Tests whether a loss can be scaled."""
    return is_real(loss) and jnp.shape(loss) == ()


def _check_differentiable(args: tuple[PyTree, ...], argnums: Any) -> None:
    """Raises for models whose state `jax.value_and_grad` would silently lose (NNX) or for which it raises (Equinox)."""
    positions = np.atleast_1d(np.asarray(argnums)).tolist()
    differentiated = [args[i] for i in positions if isinstance(i, int) and -len(args) <= i < len(args)]
    check_no_nnx_objects(
        differentiated,
        "the differentiated arguments",
        "Pass transform=flax.nnx.value_and_grad, which keeps batch statistics and random streams up to date.",
    )
    module = equinox_module_class()
    if module is None:
        return
    for model in find_instances(differentiated, module):
        for path, leaf in named_leaves(model):
            if not is_inexact(leaf):
                raise TypeError(
                    f"argument {argnums} must have only differentiable leaves, got an Equinox {type_name(model)} with "
                    f"{describe(leaf)} at {path}. Pass transform=equinox.filter_value_and_grad."
                )
