"""Unscaled gradients, computed by a scaled backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax

from jmpscale._algorithm.scaling import is_whole_loss, scale_losses, unscale_gradients
from jmpscale._base.compat import axis_names_in_scope
from jmpscale._base.options import requires_names_in
from jmpscale._base.tree import PyTree
from jmpscale._get_scaler import find_scaler
from jmpscale._guards import grad as guards

T = TypeVar("T")
Function = Callable[..., Any]


@overload
def value_and_grad(
    fun: Callable[..., T],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    overwrite_with_gradient: str | Sequence[str] = (),
    transform: Function = jax.value_and_grad,
) -> Callable[..., tuple[T, PyTree]]: ...
@overload
def value_and_grad(
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    overwrite_with_gradient: str | Sequence[str] = (),
    transform: Function = jax.value_and_grad,
) -> Callable[[Callable[..., T]], Callable[..., tuple[T, PyTree]]]: ...
@requires_names_in("value_and_grad(fun)(scaler, *args)")
def value_and_grad(
    fun: Function | None = None,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    overwrite_with_gradient: str | Sequence[str] = (),
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
      overwrite_with_gradient: the leaves whose "gradient" is a new value, such as an amax, which a custom backward pass
        returns and the caller stores. They are neither unscaled nor made NaN because of the loss. One path or several
        in the gradients, in the notation of `jax.tree_util.keystr`, each of a leaf or of a node that contains leaves:
        `"['amax']"` names `grads['amax']`; `"[1]"` names all leaves of `grads[1]`, the gradients of argument 2 if
        `argnums` is `(0, 2)`. The scales and histories of Flax's fp8 layers need no path.
      transform: the `value_and_grad` of the model's framework, such as `flax.nnx.value_and_grad`, which keeps batch
        statistics and random streams up to date, or `equinox.filter_value_and_grad`.

    Returns:
      `f(scaler, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` if `has_aux` is true. The first
      argument is the scaler, or any pytree that contains exactly one, such as the optimizer state of
      `with_loss_scaling`. The value is the result of `fun`, bit for bit. The gradients are unscaled, and not
      finite where the backward pass overflowed. If the loss is not finite, they are NaN; under `jax.shard_map`,
      `jax.pmap` and `jax.vmap(axis_name=...)`, a comparison may hide that from some of them, so check
      `all_finite((loss, grads))`. They have the dtype of the argument, or float32 if the argument is float16 or float8.

    Raises:
      TypeError: an argument has the wrong type; `fun` returns a loss that is not a real floating-point scalar, or does
        not return a pair although `has_aux` is true; or a differentiated argument is a model of Flax NNX or Equinox,
        and `transform` is not the `value_and_grad` of this framework.
      ValueError: the first argument does not contain exactly one scaler, or `overwrite_with_gradient` names no leaf.

    Warns:
      UserWarning: a dynamic scaler is a constant of a compiled program, so every call would use the same scale; `fun`
        scales the loss itself; or the optimizer state shows that `with_loss_scaling` is inside `optax.MultiSteps`,
        `masked`, `partition` or `apply_if_finite`, or beside an optimizer in `optax.chain`.

    >>> import jmpscale
    >>> loss, grad = jmpscale.value_and_grad(lambda w, x: (w * x) ** 2)(jmpscale.dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if fun is None:
        return functools.partial(
            value_and_grad,
            argnums=argnums,
            has_aux=has_aux,
            overwrite_with_gradient=overwrite_with_gradient,
            transform=transform,
        )
    guards.created(fun, argnums, overwrite_with_gradient, transform)
    others = (overwrite_with_gradient,) if isinstance(overwrite_with_gradient, str) else tuple(overwrite_with_gradient)
    name = str(getattr(fun, "__name__", "fun"))
    # equinox.filter_value_and_grad has no argnums, and nnx.value_and_grad takes it by keyword only.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    # A parameter of fun may also be called scaler, so the scaler is positional only.
    def value_and_grad_fun(scaler: PyTree = None, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        guards.called(scaler, name)
        state = find_scaler(scaler)
        guards.differentiating(scaler, state, args, argnums, transform)
        # Devices that compute their own losses may have gradients in common, so the backward pass carries the check of
        # the loss. Elsewhere, the backward pass need not wait for a loss that is summed over devices.
        is_mapped = bool(axis_names_in_scope())

        # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[Any, _Output]:
            loss, out = loss_and_output(fun(*args, **kwargs), has_aux)
            guards.loss_computed(loss, state, transform)
            return scale_losses(state, loss, with_check=is_mapped), _Output(out)

        result = transform(scaled_fun, has_aux=True, **options)(*args, **kwargs)
        guards.transform_returned(result, _Output, others)
        (_, output), grads = result
        loss = output.value[0] if has_aux else output.value
        checked = loss if is_whole_loss(loss) and not is_mapped else None
        grads = unscale_gradients(state, grads, checked, others)
        guards.computed(loss, grads, scaler, state)
        return output.value, grads

    # functools.wraps would show jax.jit(..., static_argnames=...) the signature of fun, which lacks the scaler.
    value_and_grad_fun.__name__ = f"value_and_grad_of_{name}"
    return value_and_grad_fun


class _Output(NamedTuple):
    """The output of the loss function, which `transform` returns as auxiliary data."""

    value: Any


def loss_and_output(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss and the output; a pair becomes a plain tuple, because JAX does not look inside a subclass."""
    guards.fun_returned(out, has_aux)
    return (out[0], tuple(out)) if has_aux else (out, out)
