"""The loss and its gradients, with the backward pass run on the scaled loss; like `jax.value_and_grad`."""

import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._finite import AxisName
from jmpscale._gate import refuse_nnx_objects
from jmpscale._scaling import scale, unscale_and_check
from jmpscale._state import ScalerState, shown
from jmpscale._tree import get_scaler, is_inexact, named_leaves, partition, require_one_scaler


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    axis_name: AxisName = None,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Makes a function that returns the loss, its unscaled gradients, and whether these are finite.

    Like `jax.value_and_grad`, but the result takes a scaler before `fun`'s own arguments, and the backward pass runs
    on the scaled loss.

    Args:
      fun: returns a scalar floating-point loss, or a pair of it and auxiliary data if `has_aux`.
      argnums: which of `fun`'s own positional arguments to differentiate with respect to; an int, several, or
        whatever else `transform` takes, such as `nnx.DiffState(0, nnx.LoRAParam)`.
      has_aux: whether `fun` returns a pair: a tuple or a list of two.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`.
      transform: the `value_and_grad` of the framework that the model belongs to: `flax.nnx.value_and_grad`, which
        keeps batch statistics and random streams, or `equinox.filter_value_and_grad`, which takes models whole.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads, finite)`, or `((value, aux), grads, finite)` with `has_aux`. The
      value is `fun`'s own, bit for bit, never scaled. `grads` and `finite` are as from `unscale_and_check`.

    Raises:
      TypeError: as `transform` does, and as `unscale_and_check` does; a Flax NNX object, or what has no gradient (as
        in an Equinox model), is given to `jax.value_and_grad`.
      ValueError: likewise.

    >>> from jmpscale import dynamic
    >>> loss, grad, finite = value_and_grad(lambda w, x: (w * x) ** 2)(dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad), bool(finite)
    (36.0, 24.0, True)
    """
    scaled_value_and_grad_of_fun = scaled_value_and_grad(fun, argnums, has_aux, transform=transform)

    def value_and_grad_of_fun(state: ScalerState, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        require_one_scaler(state)
        value, grads = scaled_value_and_grad_of_fun(state, *args, **kwargs)
        return value, *unscale_and_check(state, grads, axis_name=axis_name)

    value_and_grad_of_fun.__name__ = f"value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return value_and_grad_of_fun


def scaled_value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns the loss and its scaled gradients, as `with_loss_scaling` takes them.

    Like `jax.value_and_grad`, but the result takes the scaler, or what holds it, before `fun`'s own arguments, and the
    backward pass runs on the scaled loss.

    Args:
      fun: as in `value_and_grad`, as are all that follow.
      argnums: see `value_and_grad`.
      has_aux: see `value_and_grad`.
      transform: see `value_and_grad`.

    Returns:
      `f(holder, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` with `has_aux`. `holder` is a
      `ScalerState`, or a pytree with exactly one in it: the optimizer state of `with_loss_scaling`, a train state.
      The value is `fun`'s own, bit for bit; the gradients are still multiplied by the loss scale.

    Raises:
      TypeError: as `value_and_grad`.
      ValueError: as `transform` does; `holder` contains no scaler, or several, or a batch of them.

    >>> import optax
    >>> from jmpscale import static, with_loss_scaling
    >>> tx = with_loss_scaling(optax.sgd(0.5), static(8.0))
    >>> opt_state = tx.init(3.0)
    >>> loss, grad = scaled_value_and_grad(lambda w: w**2)(opt_state, 3.0)
    >>> updates, opt_state = tx.update(grad, opt_state, 3.0, value=loss)
    >>> float(loss), float(grad), float(updates)
    (9.0, 48.0, -3.0)
    """
    if isinstance(fun, ScalerState) or isinstance(argnums, ScalerState):
        raise TypeError(
            "fun must be the loss function, got a ScalerState. The scaler is the first argument of the function that "
            "comes back: value_and_grad(loss_fn)(scaler, params, batch)."
        )
    # Equinox takes no argnums, NNX no positional ones.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}
    transform(fun, has_aux=has_aux, **options)  # raises for a bad fun or argnums now, as JAX does, and not when called

    def scaled_value_and_grad_of_fun(holder: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        state = get_scaler(holder)
        require_one_scaler(state, "holder")
        if transform is jax.value_and_grad:
            _refuse_models(args, kwargs, argnums)

        def scaled(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            if not has_aux:
                return _scale_loss(state, out), out
            if not (isinstance(out, (tuple, list)) and len(cast(tuple[Any, ...], out)) == 2):
                return cast(Any, out)  # not a pair: JAX's own error says so
            return _scale_loss(state, out[0]), tuple(cast(tuple[Any, ...], out))

        (_, out), grads = transform(scaled, has_aux=True, **options)(*args, **kwargs)
        return out, grads

    # Not functools.wraps: it would pass off fun's signature, which lacks the scaler, as this function's, and
    # jax.jit(..., static_argnames=...) would count from there.
    scaled_value_and_grad_of_fun.__name__ = f"scaled_value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return scaled_value_and_grad_of_fun


def _refuse_models(args: tuple[Any, ...], kwargs: Any, argnums: Any) -> None:
    """Raises for models that `jax.value_and_grad` would lose a part of in silence, or refuse without the way out."""
    remedy = "Pass transform=flax.nnx.value_and_grad, which keeps batch statistics and random streams."
    refuse_nnx_objects((args, kwargs), "arguments", remedy)
    equinox: Any = sys.modules.get("equinox")
    if equinox is None:
        return

    def is_module(node: Any) -> bool:
        return isinstance(node, equinox.Module)

    differentiated = [args[i] for i in np.atleast_1d(argnums) if -len(args) <= i < len(args)]
    for model in partition(differentiated, is_module, is_leaf=is_module)[0]:
        for path, leaf in named_leaves(model):
            if not is_inexact(leaf):
                raise TypeError(
                    f"argument {argnums} has an Equinox {type(model).__name__} with a leaf that has no gradient, "
                    f"{shown(leaf)} at {path}. Pass transform=equinox.filter_value_and_grad, which goes around it."
                )


def _scale_loss(state: ScalerState, value: Any) -> Any:
    """Scales a loss; leaves what is no real scalar to JAX, whose error says what is wrong with it."""
    if not is_inexact(value):
        return value
    is_loss = jnp.shape(value) == () and jnp.issubdtype(jnp.result_type(value), np.floating)
    return scale(state, value) if is_loss else value
