"""Gradients in true units, computed by a scaled backward pass.

`value_and_grad` computes the gradients. `loss_scaled` is for training loops that compute the gradients themselves.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._finite import varying_axes, warn_user
from jmpscale._jaxpr import lift_nnx, trace
from jmpscale._scaling import divide, is_narrow, multiply, scale, unscale, warn_if_narrow
from jmpscale._state import ScalerState, describe, static
from jmpscale._tree import (
    PyTree,
    check_no_nnx_objects,
    check_no_refs,
    check_one_scaler,
    find_instances,
    find_scaler,
    is_array,
    is_compiling,
    is_gradient,
    is_inexact,
    is_traced,
    named_leaves,
)

P = ParamSpec("P")
T = TypeVar("T")
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
      `f(holder, *args, **kwargs) -> (value, grads)`, or `((value, aux), grads)` if `has_aux` is true. `holder` is a
      `ScalerState`, or any pytree that contains exactly one, such as the optimizer state of `with_loss_scaling`. The
      value is the result of `fun`, bit for bit. The gradients are in true units. They have the dtype of the argument,
      or float32 if the argument is float16 or float8. They are not finite where the backward pass overflowed.

    Raises:
      TypeError: `fun` is not callable, or does not return a pair although `has_aux` is true; or `transform` is
        `jax.value_and_grad`, and a differentiated argument is a Flax NNX object or contains leaves that are not
        differentiable.
      ValueError: `holder` contains no scaler, more than one, or a batch of scalers.

    >>> from jmpscale import dynamic
    >>> loss, grad = value_and_grad(lambda w, x: (w * x) ** 2)(dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if fun is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, transform=transform)
    remedy = "The scaler is the first argument of the new function: value_and_grad(loss_fn)(scaler, params, batch)."
    if not callable(fun):
        raise TypeError(f"fun must be the loss function, got {describe(fun)}. {remedy}")
    if isinstance(argnums, ScalerState):
        raise TypeError(f"argnums must be an int or a sequence of ints, got a ScalerState. {remedy}")
    # equinox.filter_value_and_grad has no argnums, and nnx.value_and_grad takes it by keyword only.
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    def value_and_grad_fun(holder: PyTree, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        state = find_scaler(holder, "holder")
        check_one_scaler(state, "holder")
        if transform is jax.value_and_grad:
            _check_differentiable(args, argnums)

        # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            out = fun(*args, **kwargs)
            out = _as_pair(out) if has_aux else out
            loss = out[0] if has_aux else out
            return scale(state, loss) if _is_real_scalar(loss) else loss, out

        (_, out), grads = transform(scaled_fun, has_aux=True, **options)(*args, **kwargs)
        return out, unscale(state, grads)

    # functools.wraps would show jax.jit(..., static_argnames=...) the signature of fun, which lacks the holder.
    value_and_grad_fun.__name__ = f"value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return value_and_grad_fun


def _as_pair(out: Any) -> tuple[Any, Any]:
    """Returns the loss and the auxiliary data as a plain tuple: JAX does not look inside a subclass of tuple."""
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
    """Raises for models whose state `jax.value_and_grad` would silently lose (NNX) or for which it raises (Equinox)."""
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
                    f"argument {argnums} must have only differentiable leaves, got an Equinox {type(model).__name__} "
                    f"with {describe(leaf)} at {path}. Pass transform=equinox.filter_value_and_grad."
                )


def loss_scaled(fun: Callable[P, T], scale: Any, *, has_aux: bool = False) -> Callable[P, T]:
    """Creates a function with the values and gradients of `fun`, and a scaled backward pass.

    Use it for training loops that take a loss function and differentiate it themselves. In the backward pass, the
    cotangents of the outputs are multiplied by the scale, and the cotangents of all inputs are divided by it. The loop
    therefore receives gradients in true units, as from `jmpscale.value_and_grad`. To skip steps that overflow, give
    the loop the optimizer `with_loss_scaling(tx, static(1.0))`, or `with_loss_scaling(tx)` if `scale` can read the
    optimizer state.

    `fun` is traced in every call, so it must be a function that `jax.jit` accepts.

    Args:
      fun: the loss function. Return the loss in float32. Its inputs are its arguments (pytrees, Equinox modules, Flax
        NNX objects) and the values that it closes over. Differentiated inputs must not be float16 or float8, so convert
        parameters to float16 inside `fun`.
      scale: the loss scale, a Python number or an array f32[]; a scaler, or a pytree that contains exactly one; or a
        function of the arguments of `fun`, as the loop passes them, that returns any of these. The scale is not
        differentiated.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data.

    Returns:
      A function with the signature of `fun`. It supports reverse-mode differentiation, to any order. With `disabled()`
      it calls `fun`.

    Raises:
      TypeError: `fun` is not callable, `scale` is a bool or not a real scalar, `fun` does not return a pair although
        `has_aux` is true, or an argument is a `jax.Ref`. When differentiated: a differentiated value is float16 or
        float8, in which an unscaled gradient would underflow; or differentiation is in forward mode.
      ValueError: `scale` is out of range, or contains no scaler, more than one, or a batch of scalers. When
        differentiated: the scale differs between devices that share a parameter.

    Warns:
      UserWarning: the loss has a dtype that cannot hold large scales, such as float16; or a dynamic scale is a constant
        of a compiled program.

    >>> loss_fn = loss_scaled(lambda w, x: (w * x) ** 2, 2.0**16)
    >>> loss, grad = jax.value_and_grad(loss_fn)(3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be the loss function, got {describe(fun)}. Pass the function: loss_scaled(fun, scale)."
        )
    if isinstance(scale, (int, float)):
        scale = static(scale)

    # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
    @functools.wraps(fun, updated=())
    def loss_scaled_fun(*args: P.args, **kwargs: P.kwargs) -> T:
        loss_scale = _read_loss_scale(scale, args, kwargs)
        if loss_scale is None:
            return fun(*args, **kwargs)
        check_no_refs(args, "args")
        check_no_refs(kwargs, "kwargs")
        transform = functools.partial(_scale_backward_pass, loss_scale)
        return lift_nnx(transform, _with_checked_output(fun, has_aux), args, kwargs)

    return loss_scaled_fun


def _read_loss_scale(scale: Any, args: Any, kwargs: Any) -> jax.Array | None:
    """Returns the loss scale, f32[], or None if scaling is disabled."""
    is_function = callable(scale) and not any(map(is_array, jax.tree.leaves(scale)))  # containers may be callable too
    holder = scale(*args, **kwargs) if is_function else scale
    leaves = jax.tree.leaves(holder)  # an nnx.Variable is a container of one array
    if len(leaves) == 1 and is_array(leaves[0]):
        value, adapts = leaves[0], is_function
        if jnp.shape(value) != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"scale must be a floating-point scalar, got {describe(value)}. Pass the loss scale.")
    else:
        state = static(holder) if isinstance(holder, (int, float)) else find_scaler(holder, "scale")
        check_one_scaler(state, "scale")
        if state.config.mode == "disabled":
            return None
        value, adapts = state.loss_scale, state.config.mode == "dynamic"
    if adapts and not is_traced(value) and is_compiling():
        warn_user(
            "the loss scale is a constant of the compiled program, so it will not adapt: scale does not read it from "
            "the arguments of fun. Pass a function that does, such as `lambda model, *args, **kwargs: "
            "model.loss_scale`; or pass a number, or static(...)."
        )
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))


def _with_checked_output(fun: Callable[..., Any], has_aux: bool) -> Callable[[Any, Any], Any]:
    def checked(args: Any, kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        out = _as_pair(out) if has_aux else out
        for loss in jax.tree.leaves(out[0] if has_aux else out):
            warn_if_narrow(loss)
        return out

    return checked


def _scale_backward_pass(loss_scale: jax.Array, fun: Callable[..., Any], *args: Any) -> Any:
    """Calls `fun`, with output cotangents multiplied by the scale, and input cotangents divided by the scale."""
    traced = trace(fun, *args)
    paths = {id(leaf): path for path, leaf in jax.tree_util.tree_leaves_with_path(args)}
    inputs = [_unscale_if_differentiable(x, loss_scale, paths.get(id(x), ())) for x in traced.inputs]
    outputs = traced._replace(inputs=inputs).evaluate()
    return traced.unflatten(_scale_cotangent(y, loss_scale) if is_inexact(y) else y for y in outputs)


def _unscale_if_differentiable(x: Any, loss_scale: jax.Array, path: tuple[Any, ...]) -> Any:
    if not (is_traced(x) and is_gradient(path, x)):
        return x
    name = "a value that fun closes over"
    if path:
        name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
    try:
        return _unscale_cotangent(x, loss_scale, name)
    except TypeError as error:
        if "forward-mode" in str(error):
            error.add_note("loss_scaled supports only reverse mode. In forward mode, differentiate fun itself.")
        raise


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unscale_cotangent(x: jax.Array, loss_scale: jax.Array, name: str) -> jax.Array:
    """Returns `x`, and divides its cotangent by the loss scale."""
    return x


def _unscale_cotangent_fwd(x: jax.Array, loss_scale: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    # This runs only for values that are differentiated.
    if is_narrow(x):
        raise TypeError(
            f"differentiated values must not be float16 or float8, got {name} of {describe(x)}: unscaled "
            f"gradients underflow in {x.dtype}. Keep it in float32 and convert it inside fun, with jmpscale.cast for "
            "example; or take the gradients with jmpscale.value_and_grad, which returns them in float32."
        )
    if axes := varying_axes(loss_scale) - varying_axes(x):
        raise ValueError(
            f"scale must be equal on all devices that share {name}, but it may differ along the mesh axes "
            f"{sorted(axes)}. Pass the scaler into jax.shard_map with in_specs=jax.P()."
        )
    return x, loss_scale


def _unscale_cotangent_bwd(name: str, loss_scale: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return divide([cotangent], loss_scale)[0], None


@jax.custom_vjp
def _scale_cotangent(x: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """Returns `x`, and multiplies its cotangent by the loss scale."""
    return x


def _scale_cotangent_fwd(x: jax.Array, loss_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, loss_scale


def _scale_cotangent_bwd(loss_scale: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return multiply(cotangent, loss_scale), None


_unscale_cotangent.defvjp(_unscale_cotangent_fwd, _unscale_cotangent_bwd)
_scale_cotangent.defvjp(_scale_cotangent_fwd, _scale_cotangent_bwd)
