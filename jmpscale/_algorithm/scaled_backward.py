"""Unscaled gradients for training loops that compute the gradients themselves."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jmpscale._algorithm.finite import all_finite_here
from jmpscale._algorithm.grad import loss_and_output
from jmpscale._algorithm.scaling import is_whole_loss, jmpscale_unscale, one_if_finite
from jmpscale._base.axes import map_like
from jmpscale._base.cotangents import divide_cotangent, multiply_cotangent
from jmpscale._base.multiply import multiply_leaf
from jmpscale._base.options import requires_names_in
from jmpscale._base.text import describe
from jmpscale._base.trace import lift_nnx, trace
from jmpscale._base.tree import (
    PyTree,
    flatten_gradients,
    flatten_matching,
    is_array,
    is_inexact,
    is_real_scalar,
    is_traced,
)
from jmpscale._get_scaler import find_scaler
from jmpscale._guards import scaled_backward as guards
from jmpscale._monitoring.gradient_warning import warn_unless_finite
from jmpscale._state import static

P = ParamSpec("P")
T = TypeVar("T")
_Residuals = tuple[jax.Array, list[tuple[()] | None]]  # the loss scale, and () for each input that is differentiated


@requires_names_in("scaled_backward(fun, scale)(*args)")
def scaled_backward(
    fun: Callable[P, T], scale: Any, *, has_aux: bool = False, warn_if_not_finite: bool = False
) -> Callable[P, T]:
    """Creates a function with the values and gradients of `fun`, and a scaled backward pass.

    Use it for training loops that take a loss function and differentiate it themselves. The backward pass runs at the
    scale, and the loop receives unscaled gradients. If a scalar result is not finite, its gradients are NaN,
    except where a comparison, as in a ReLU or `jnp.where`, selects a derivative of zero. To skip steps that overflow,
    give the loop the optimizer `with_loss_scaling(tx, static(1.0))`, or `with_loss_scaling(tx)` if `scale` can read the
    optimizer state.

    Args:
      fun: the loss function, traced in every call. It returns the loss in float32. Its inputs are its arguments
        (pytrees, Equinox modules, Flax NNX objects) and the values that it closes over. Differentiated inputs must not
        be float16 or float8, so convert parameters to float16 inside `fun`.
      scale: the loss scale, a Python number or an array f32[]; a scaler, or a pytree that contains exactly one; or a
        function of the arguments of `fun`, as the loop passes them, that returns any of these. The scale is not
        differentiated.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data.
      warn_if_not_finite: whether to warn from inside the compiled program if the gradients are not finite; for
        training loops that change the gradients before the optimizer, which could hide an overflow. A warning that a
        filter turns into an error is logged, because an error on one device would leave the others waiting.

    Returns:
      A function with the signature of `fun`. It supports reverse-mode differentiation, to any order and with respect to
      different values at each order; its gradients also support forward mode and `jax.experimental.jet`. With
      `disabled()` it calls `fun`.

    Raises:
      TypeError: an argument has the wrong type, or `fun` does not return a pair although `has_aux` is true. When
        differentiated: a differentiated value is float16 or float8, or the differentiation is in forward mode.
      ValueError: `scale` is out of range, or does not contain exactly one scaler. When differentiated: the scale
        differs between devices that share a parameter.

    Warns:
      UserWarning: the loss, or every output, has a dtype that cannot hold large scales, such as float16; a dynamic
        scale is a constant of a compiled program; or, with `warn_if_not_finite`, the gradients are not finite.

    >>> import jax
    >>> import jmpscale
    >>> loss_fn = jmpscale.scaled_backward(lambda w, x: (w * x) ** 2, 2.0**16)
    >>> loss, grad = jax.value_and_grad(loss_fn)(3.0, 2.0)
    >>> float(loss), float(grad)
    (36.0, 24.0)
    """
    guards.created(fun)
    if isinstance(scale, (int, float)):
        scale = static(scale)
    elif is_array(scale) and is_real_scalar(scale) and not is_traced(scale):
        scale = static(float(scale))  # raises for a scale of 0, which would make every gradient NaN
    name = f"{describe(fun)} in jmpscale.scaled_backward"

    def fun_of_args(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        loss, out = loss_and_output(fun(*args, **kwargs), has_aux)
        guards.fun_returned(loss)
        return out

    # Has the signature of fun, in which nnx.value_and_grad finds the positions of keyword arguments.
    @functools.wraps(fun, updated=())
    def scaled_backward_fun(*args: P.args, **kwargs: P.kwargs) -> T:
        loss_scale = _read_loss_scale(scale, args, kwargs)
        if loss_scale is None:
            return fun(*args, **kwargs)
        transform = functools.partial(_scale_backward_pass, loss_scale, name, warn_if_not_finite)
        return lift_nnx(transform, fun_of_args, args, kwargs)

    return scaled_backward_fun


def reads_arguments(scale: Any) -> bool:
    """Tests whether a scale is a function of the arguments of `fun`; a container of arrays may be callable, too."""
    return callable(scale) and not any(map(is_array, jax.tree.leaves(scale)))


def _read_loss_scale(scale: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> jax.Array | None:
    """Returns the loss scale, f32[], or None if scaling is disabled."""
    is_function = reads_arguments(scale)
    source = scale(*args, **kwargs) if is_function else scale
    leaves = jax.tree.leaves(source)  # an nnx.Variable is a container of one array
    if len(leaves) == 1 and is_array(leaves[0]):
        value, adapts = leaves[0], is_function
    else:
        state = static(source) if isinstance(source, (int, float)) else find_scaler(source, "scale")
        if state.config.mode == "disabled":
            return None
        value, adapts = state.loss_scale, state.config.mode == "dynamic"
    guards.scale_read(source, value, adapts)
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))


def _scale_backward_pass(
    loss_scale: jax.Array, name: str, is_watched: bool, fun: Callable[..., Any], *args: PyTree
) -> Any:
    """Calls `fun`, with output cotangents multiplied by the scale, and input cotangents divided by the scale.

    JAX applies a custom derivative rule at the innermost differentiation in which one of its operands takes part.
    Derivatives of derivatives are right only if both rules apply at the same one. Therefore the rule for the inputs
    also returns a constant, which takes part in every differentiation of the inputs, and which the rule for the outputs
    has as an operand, although it does not read it. Errors and warnings call the function `name`.

    JAX forgets the rules in derivatives of higher order, which differentiate what the rules compute. There, too, the
    cotangent of a value inside the function is at the scale, and the cotangent of a value outside is unscaled, so
    that all gradients of one value have one scale, and none underflows because of it. Therefore the rules divide or
    multiply the cotangents of all values that enter or leave the function: of its inputs and outputs, and of its
    cotangents. A cotangent inside holds the scale as a factor, so its own cotangent at the scale is the cotangent of
    the value without this factor.
    """
    traced = trace(fun, *args, name=name)
    paths = {id(leaf): path for path, leaf in jax.tree_util.tree_leaves_with_path(args)}
    gradients = {id(leaf) for leaf in flatten_gradients(args)[0]}

    def has_gradient(x: object) -> bool:  # the cotangents of other arguments are new statistics of Flax's fp8 layers
        return is_traced(x) and is_inexact(x) and (id(x) in gradients or id(x) not in paths)

    inputs, replace_inputs = flatten_matching(traced.inputs, has_gradient)
    names = tuple(_input_name(paths.get(id(x))) for x in inputs)
    with guards.differentiating(inputs):
        results: Any = _unscale_cotangents(names, name if is_watched else None, loss_scale, inputs)
    unscaled, link = results
    outputs: Any = traced._replace(inputs=replace_inputs(unscaled)).evaluate()
    # Each output has a rule of its own. In one rule for all outputs, JAX 0.8 to 0.10 cannot transpose a scan of whose
    # stacked outputs some are not differentiated.
    differentiable, replace_outputs = flatten_matching(outputs, is_inexact)
    scaled: Any = [_scale_cotangent(loss_scale, y, link) for y in differentiable]
    guards.scaled(scaled)
    outputs = replace_outputs(scaled)
    return traced.unflatten(outputs)


def _input_name(path: Any) -> str:
    """Returns the name of an input in errors; only arguments have a path."""
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) if path else "a value that fun closes over"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _unscale_cotangents(
    names: tuple[str, ...], watched: str | None, loss_scale: jax.Array, inputs: list[jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the inputs, and divides their cotangents by the loss scale; warns if gradients of `watched` overflow.

    The second result is a constant, which is differentiated wherever an input is.
    """
    return [map_like(x, loss_scale) for x in inputs], jnp.zeros(())


def _unscale_cotangents_fwd(
    names: tuple[str, ...], watched: str | None, loss_scale: CustomVJPPrimal, inputs: list[CustomVJPPrimal]
) -> tuple[tuple[list[jax.Array], jax.Array], _Residuals]:
    guards.differentiated(inputs, names, loss_scale)
    # Flags would become arrays, so the structure of the residuals shows which inputs are differentiated.
    differentiated = [() if x.perturbed else None for x in inputs]
    scale = loss_scale.value
    entering = [divide_cotangent(map_like(x.value, scale), scale) for x in inputs]
    return (entering, jnp.zeros(())), (scale, differentiated)


def _unscale_cotangents_bwd(
    names: tuple[str, ...],
    watched: str | None,
    residuals: _Residuals,
    cotangents: tuple[list[jax.Array | SymbolicZero], SymbolicZero],
) -> tuple[None, list[jax.Array | None]]:
    loss_scale, differentiated = residuals
    leaving = [None if isinstance(ct, SymbolicZero) else multiply_cotangent(ct, loss_scale) for ct in cotangents[0]]
    grads = jmpscale_unscale(leaving, loss_scale)
    # The compiler removes the cotangents of inputs that are not differentiated, unless they are read.
    checked = [g for g, flag in zip(grads, differentiated, strict=True) if flag is not None and g is not None]
    if watched is not None and checked:
        grads = warn_unless_finite(all_finite_here(checked), grads, checked, watched)
    guards.unscaled(grads, loss_scale)
    return None, grads


_unscale_cotangents.defvjp(_unscale_cotangents_fwd, _unscale_cotangents_bwd, symbolic_zeros=True)


@jax.custom_vjp
def _scale_cotangent(loss_scale: jax.Array, output: jax.Array, link: jax.Array) -> jax.Array:
    """Returns an output, and multiplies its cotangent by the loss scale; by NaN if it is a loss that is not finite."""
    return output


def _scale_cotangent_fwd(
    loss_scale: CustomVJPPrimal, output: CustomVJPPrimal, link: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    leaving = multiply_cotangent(output.value, loss_scale.value)
    return leaving, (loss_scale.value, output.value if is_whole_loss(output.value) else None)


def _scale_cotangent_bwd(
    residuals: tuple[jax.Array, jax.Array | None], cotangent: jax.Array | SymbolicZero
) -> tuple[None, jax.Array | None, None]:
    # An output that is not differentiated has no cotangent. A zero in its place could become NaN (0 * inf).
    if isinstance(cotangent, SymbolicZero):
        return None, None, None
    loss_scale, loss = residuals
    scaled = divide_cotangent(multiply_leaf(cotangent, loss_scale), loss_scale)
    return None, scaled if loss is None else scaled * one_if_finite(loss), None


_scale_cotangent.defvjp(_scale_cotangent_fwd, _scale_cotangent_bwd, symbolic_zeros=True)
