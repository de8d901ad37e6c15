"""The loss and its gradients in true units, with a backward pass that runs on the scaled loss."""

import functools
import sys
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._gate import check_no_nnx_objects
from jmpscale._scaling import scale, unscale
from jmpscale._state import ScalerState, describe
from jmpscale._tree import PyTree, check_one_scaler, find_instances, get_scaler, is_inexact, named_leaves

ValueAndGrad = Callable[..., tuple[Any, Any]]


@overload
def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> ValueAndGrad: ...
@overload
def value_and_grad(
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[[Callable[..., Any]], ValueAndGrad]: ...
def value_and_grad(
    fun: Callable[..., Any] | None = None,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Any:
    """Creates a function that returns the loss and its gradients, computed by a scaled backward pass.

    Like `jax.value_and_grad`, except that the new function takes a scaler before the arguments of `fun`. The backward
    pass runs on the loss times the loss scale. The gradients are unscaled before they are returned.

    Also a decorator with options: `@jmpscale.value_and_grad(has_aux=True)`.

    Args:
      fun: returns a scalar floating-point loss, or a pair of the loss and auxiliary data if `has_aux` is true. Return
        the loss in float32.
      argnums: which positional arguments of `fun` to differentiate with respect to: an int, a sequence of ints, or
        whatever else `transform` takes, such as `nnx.DiffState(0, nnx.LoRAParam)`.
      has_aux: whether `fun` returns a pair.
      transform: the `value_and_grad` of the model's framework: `flax.nnx.value_and_grad`, which keeps batch statistics
        and random streams up to date, or `equinox.filter_value_and_grad`, which takes whole models.

    Returns:
      `f(holder, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` if `has_aux` is true. `holder` is a
      `ScalerState`, or any pytree that contains exactly one, such as the optimizer state of `with_loss_scaling`. The
      value is that of `fun`, bit for bit. The gradients are in true units: of the dtype of the argument, or float32 if
      that is float16 or narrower. They are not finite where the backward pass overflowed.

    Raises:
      TypeError: `fun` is not callable or does not return what `has_aux` says; an argument that is differentiated is a
        Flax NNX object, or contains leaves without gradients, and `transform` is `jax.value_and_grad`; or as
        `transform` raises.
      ValueError: `holder` contains no scaler, more than one, or a batch of scalers; or as `transform` raises.

    >>> from jmpscale import dynamic
    >>> loss, grad = value_and_grad(lambda w, x: (w * x) ** 2)(dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if fun is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, transform=transform)
    if not callable(fun) or isinstance(argnums, ScalerState):
        raise TypeError(
            f"fun must be the loss function, got {describe(fun)}. The scaler is the first argument of the new "
            "function: value_and_grad(loss_fn)(scaler, params, batch)."
        )
    # equinox.filter_value_and_grad has no argnums, and nnx.value_and_grad takes it by keyword only.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    def value_and_grad_fun(holder: PyTree, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        state = get_scaler(holder)
        check_one_scaler(state, "holder")
        if transform is jax.value_and_grad:
            _check_differentiable(args, argnums)

        # With the signature of fun, by which nnx.value_and_grad finds the positions of keyword arguments.
        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            out = fun(*args, **kwargs)
            out = _as_pair(out) if has_aux else out
            loss = out[0] if has_aux else out
            return scale(state, loss) if _is_real_scalar(loss) else loss, out

        (_, out), grads = transform(scaled_fun, has_aux=True, **options)(*args, **kwargs)
        return out, unscale(state, grads)

    # Not functools.wraps: the signature of fun lacks the holder, and jax.jit(..., static_argnames=...) reads it.
    value_and_grad_fun.__name__ = f"value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return value_and_grad_fun


def _as_pair(out: Any) -> tuple[Any, Any]:
    """Returns the loss and the auxiliary data as a tuple: JAX would not look inside a subclass of it."""
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"fun must return a pair (loss, aux) because has_aux is true, got {describe(out)}. Return both, or omit "
            "has_aux."
        )
    loss, aux = out
    return loss, aux


def _is_real_scalar(loss: Any) -> bool:
    """Tests whether a loss can be scaled; for any other, `transform` raises the error of its framework."""
    return is_inexact(loss) and jnp.shape(loss) == () and not jnp.iscomplexobj(loss)


def _check_differentiable(args: tuple[Any, ...], argnums: Any) -> None:
    """Raises for models of which `jax.value_and_grad` would lose a part silently (NNX) or that it refuses (Equinox)."""
    positions = np.atleast_1d(np.asarray(argnums)).tolist()
    differentiated = [args[i] for i in positions if isinstance(i, int) and -len(args) <= i < len(args)]
    check_no_nnx_objects(
        differentiated,
        "the differentiated arguments",
        "Pass transform=flax.nnx.value_and_grad, which keeps batch statistics and random streams up to date.",
    )
    # While another thread is still importing Equinox, the module exists without its classes.
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:
        return
    for model in find_instances(differentiated, module):
        for path, leaf in named_leaves(model):
            if not is_inexact(leaf):
                raise TypeError(
                    f"argument {argnums} must have gradients for all leaves, got an Equinox {type(model).__name__} "
                    f"with {describe(leaf)} at {path}. Pass transform=equinox.filter_value_and_grad."
                )
