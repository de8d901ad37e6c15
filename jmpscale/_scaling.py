"""The algorithm of loss scaling: scale the loss, unscale and check the gradients, adjust the scale.

Every function is pure. A state keeps its structure, dtypes, weak types and shardings, so that it can be the carry of a
`jax.lax.scan` and does not cause a second compilation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._finite import (
    AxisName,
    all_finite,
    all_finite_here,
    all_reduce_and,
    as_axes,
    check_no_partial_sums,
    manual_axes,
    warn_if_unsynchronized,
    warn_user,
)
from jmpscale._state import COUNTER_LIMIT, ScalerState, SkipReason, describe
from jmpscale._tree import (
    PyTree,
    Tree,
    check_no_refs,
    check_one_scaler,
    flatten_matching,
    is_compiling,
    is_gradient,
    is_inexact,
    is_traced,
    named_leaves,
)


def scale(state: ScalerState, tree: Tree) -> Tree:
    """Multiplies a loss, or a pytree of losses, by the loss scale.

    The product is at least float32, because the default scale is infinite in float16.

    Args:
      state: the scaler. Unscale the gradients with the same scaler.
      tree: pytree of floating-point arrays of any shape. The loss should be float32: the backward pass of a float16
        loss starts from the scale in float16, which is infinite from 2^16 on.

    Returns:
      The scaled tree; leaves narrower than float32 become float32. With `disabled()`, the tree itself.

    Raises:
      TypeError: `state` is not a `ScalerState`, or a leaf does not have a floating-point dtype.
      ValueError: `state` is a batch of scalers outside `jax.vmap`.

    Warns:
      UserWarning: a traced leaf has a dtype that cannot hold large scales, such as float16.

    >>> from jmpscale import dynamic
    >>> scale(dynamic(2.0**16), jnp.float16(3.0))
    Array(196608., dtype=float32)
    """
    check_one_scaler(state)
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    for path, leaf in named_leaves(tree):
        if not (is_inexact(leaf) and not jnp.iscomplexobj(leaf)):
            raise TypeError(
                f"scale takes losses of a floating-point dtype, got {describe(leaf)} at tree{path}. "
                "Pass only the losses, or convert with .astype(jnp.float32)."
            )
        warn_if_narrow(leaf)
    return _scale(state.loss_scale, tree)


def warn_if_narrow(loss: Any) -> None:
    """Warns if a loss that may be differentiated has a dtype that cannot hold large scales."""
    if is_traced(loss) and is_inexact(loss) and is_narrow(loss):
        warn_user(
            f"the loss is {loss.dtype}, so the backward pass starts from the loss scale in {loss.dtype}, where large "
            "scales are infinite. Return the loss in float32: convert the model's output with .astype(jnp.float32) "
            "before the loss is computed."
        )


@jax.jit
def _scale(loss_scale: jax.Array, tree: PyTree) -> PyTree:
    def multiply(x: Any) -> jax.Array:
        dtype = _at_least_float32(jnp.result_type(x))
        return jnp.asarray(x, dtype) * jnp.asarray(loss_scale, dtype)

    return jax.tree.map(multiply, tree)


def unscale(state: ScalerState, tree: Tree) -> Tree:
    """Divides gradients by the loss scale.

    Gradients in float16 and float8 become float32, because the small values that scaling has preserved would underflow
    again. The function is differentiable, so that gradient penalties can use it.

    Args:
      state: the scaler that scaled the loss, before its update.
      tree: pytree of gradients. Leaves that are not floating-point or complex are unchanged, and so are the values that
        Flax's fp8 layers return under `_overwrite_with_gradient`.

    Returns:
      The unscaled gradients. With `disabled()`, the tree itself.

    Raises:
      TypeError: `state` is not a `ScalerState`, or a leaf is a partial sum or a `jax.Ref`.
      ValueError: `state` is a batch of scalers outside `jax.vmap`.

    >>> from jmpscale import dynamic
    >>> unscale(dynamic(2.0**16), {"w": jnp.float16(2.0), "step": 3})
    {'step': 3, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    check_one_scaler(state)
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    check_no_partial_sums(tree)
    # Only gradients pass through jit, which converts float0 to bool and raises for Python objects.
    grads, unflatten = flatten_matching(tree, is_gradient)
    return unflatten(divide(grads, state.loss_scale))


@jax.jit
def divide(grads: list[Any], loss_scale: jax.Array) -> list[jax.Array]:
    """Divides arrays by the loss scale; `unscaled_dtype` gives the dtypes of the results."""
    loss_scale = jnp.asarray(loss_scale)
    inverse = {dtype: 1 / loss_scale.astype(dtype) for dtype in map(_real_dtype, grads)}
    return [_product(x, inverse[_real_dtype(x)], unscaled_dtype(jnp.result_type(x))) for x in grads]


def multiply(grads: PyTree, factor: jax.Array) -> PyTree:
    """Multiplies gradients by a real number and keeps their dtypes."""
    leaves, unflatten = flatten_matching(grads, is_gradient)
    return unflatten(_product(x, factor.astype(_real_dtype(x)), jnp.result_type(x)) for x in leaves)


def _product(x: Any, factor: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies in at least float32 and rounds once, to `dtype`."""
    if jnp.iscomplexobj(x):  # part by part: inf * (factor + 0j) is NaN
        return jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    if jax.typeof(x).weak_type:
        return x * jax.lax.full_like(x, factor)  # weakly typed as well
    return (jnp.asarray(x, factor.dtype) * factor).astype(dtype)


def _real_dtype(x: Any) -> Any:
    """Returns the real dtype in which a leaf is multiplied: at least float32."""
    return _at_least_float32(jnp.finfo(jnp.result_type(x)).dtype)


def unscaled_dtype(dtype: Any) -> Any:
    """Returns the dtype of an unscaled gradient: float32 for float16 and float8, otherwise the dtype itself."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else _at_least_float32(dtype)


def is_narrow(x: Any) -> bool:
    """Tests whether a leaf is float16 or float8, which cannot hold unscaled gradients."""
    return unscaled_dtype(jnp.result_type(x)) != jnp.result_type(x)


def _at_least_float32(dtype: Any) -> Any:
    return np.dtype(np.float32) if jnp.finfo(dtype).bits < 32 else np.dtype(dtype)


def unscale_and_check(state: ScalerState, grads: Tree, *, axis_name: AxisName = None) -> tuple[Tree, jax.Array]:
    """Divides gradients by the loss scale and tests whether all of them are finite, on all devices.

    The unscaled values are tested, because unscaling by a scale below 1 can make finite gradients infinite.

    Args:
      state: the scaler that scaled the loss, before its update.
      grads: pytree of gradients, as in `unscale`.
      axis_name: the mapped axes over which to combine the result, as in `all_finite`; needed only under `jax.pmap`,
        `jax.vmap(axis_name=...)` and `check_vma=False`.

    Returns:
      The unscaled gradients, and `finite`, bool[]. Pass `finite` to `apply_if` and to `update`. With `disabled()`, the
      gradients themselves and True.

    Raises:
      TypeError: `state` is not a `ScalerState`, or a leaf is a partial sum or a `jax.Ref`.
      ValueError: `state` is a batch of scalers outside `jax.vmap`, or an axis is not mapped here.

    >>> from jmpscale import dynamic
    >>> grads, finite = unscale_and_check(dynamic(4.0), jnp.array([8.0, jnp.inf]))
    >>> grads, bool(finite)
    (Array([ 2., inf], dtype=float32), False)
    """
    grads = unscale(state, grads)
    if state.config.mode == "disabled":
        return grads, jnp.array(True)
    return grads, all_finite(grads, axis_name=axis_name)


def update(state: ScalerState, finite: Any, *, loss: PyTree = None, axis_name: AxisName = None) -> ScalerState:
    """Adjusts the loss scale and the counters after a step.

    This is the rule of a dynamic scaler:

    ```text
    if finite:
        consecutive_skips = 0
        finite_steps += 1
        if hysteresis_reset == "finite":
            hysteresis_left = hysteresis
        if finite_steps >= growth_interval:
            finite_steps = 0
            hysteresis_left = hysteresis
            loss_scale = min(loss_scale * growth_factor, max_scale)
    else:
        skipped += 1
        consecutive_skips += 1
        if the loss is given and not finite:
            last_skip = LOSS
        else:
            last_skip = GRADIENTS
            finite_steps = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                loss_scale = max(loss_scale * backoff_factor, min_scale)
    ```

    A static scaler counts steps and skips. Its scale and its hysteresis do not change.

    Args:
      state: the scaler from before the step.
      finite: bool[], from `all_finite` or `unscale_and_check`.
      loss: the unscaled loss, of any shape, or a pytree of unscaled losses. A skipped step whose loss is not finite
        does not change the scale. A non-finite loss alone never causes a skip.
      axis_name: the mapped axes over which to combine `finite` and the finiteness of the loss, as in `all_finite`;
        needed only under `jax.pmap`, `jax.vmap(axis_name=...)` and `check_vma=False`. If the
        program maps further axes, by `jax.pmap` or with `check_vma=False`, the loss is ignored: along these axes it may
        differ between devices, whose scales would then diverge.

    Returns:
      The scaler for the next step, with the structure, dtypes, weak types and shardings of `state`.

    Raises:
      TypeError: `state` is not a `ScalerState`, or `finite` is not a boolean.
      ValueError: `state` is a batch of scalers outside `jax.vmap`, `finite` is not a scalar, or an axis is not mapped
        here.

    Warns:
      UserWarning: `state` is a constant of a compiled program, so every step would start from the same scale.

    >>> from jmpscale import dynamic
    >>> state = update(dynamic(1024.0), False)
    >>> float(state.loss_scale), int(state.skipped)
    (512.0, 1)

    With `hysteresis=1` this is the rule of `torch.amp.GradScaler` (PyTorch 2.13), with limits. With hysteresis it is
    the rule of Megatron-LM and DeepSpeed, and with `hysteresis_reset="finite"` the rule of apex and NeMo.
    """
    check_one_scaler(state)
    flag = check_flag(finite)
    if state.config.mode == "disabled":
        return state
    _warn_if_constant(state, finite)
    if loss is not None:
        warn_if_unsynchronized(axis_name)
    return adjust(state, *all_reduce_outcome(flag, loss, axis_name))


def _warn_if_constant(state: ScalerState, finite: Any) -> None:
    """Warns if a compiled step contains its scaler, because every call would then start from the same state."""
    if is_compiling() and is_traced(finite) and not any(map(is_traced, jax.tree.leaves(state))):
        warn_user(
            "state is a constant of the compiled program, so the scale never adapts and skips are not counted. Pass "
            "the scaler to the compiled function as an argument, and return the new scaler."
        )


def all_reduce_outcome(finite: jax.Array, loss: PyTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array | None]:
    """Returns whether the gradients and the loss are finite on all devices; None for a loss that is not used."""
    if loss is None or _loss_may_diverge(axis_name):
        return all_reduce_and(finite, axis_name=axis_name)[0], None
    finite, loss_finite = all_reduce_and(finite, all_finite_here(loss), axis_name=axis_name)
    return finite, loss_finite


def _loss_may_diverge(axis_name: AxisName) -> bool:
    """Tests whether the loss may differ along an axis that is not named.

    Gradients are equal along such an axis, after a `psum` for example. A loss that is not finite on one device would
    change the scale there, and on no other device.
    """
    return axis_name is not None and not set(manual_axes(typed=False)) <= set(as_axes(axis_name))


@jax.jit
def adjust(state: ScalerState, finite: jax.Array, loss_finite: jax.Array | None) -> ScalerState:
    """Applies the rule of `update` to flags that are equal on all devices."""
    skipped = state._replace(skipped=_increment(state.skipped), consecutive_skips=_increment(state.consecutive_skips))
    after_skip = _after_overflow(skipped)
    if loss_finite is not None:
        after_loss = skipped._replace(last_skip=jnp.full_like(state.last_skip, SkipReason.LOSS))
        after_skip = _select(loss_finite, after_skip, after_loss)
    return _select(finite, _after_finite(state), after_skip)


def _select(flag: jax.Array, if_true: ScalerState, if_false: ScalerState) -> ScalerState:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), if_true, if_false)


def _after_finite(state: ScalerState) -> ScalerState:
    config = state.config
    finite_steps = _increment(state.finite_steps)
    state = state._replace(finite_steps=finite_steps, consecutive_skips=jnp.zeros_like(state.consecutive_skips))
    if config.mode == "static":
        return state
    grow = finite_steps >= config.growth_interval
    grown = jnp.minimum(state.loss_scale * config.growth_factor, config.max_scale)
    reset = True if config.hysteresis_reset == "finite" else grow
    return state._replace(
        loss_scale=jnp.where(grow, grown, state.loss_scale),
        finite_steps=jnp.where(grow, 0, finite_steps),
        hysteresis_left=jnp.where(reset, config.hysteresis, state.hysteresis_left),
    )


def _after_overflow(state: ScalerState) -> ScalerState:
    config = state.config
    state = state._replace(
        finite_steps=jnp.zeros_like(state.finite_steps),
        last_skip=jnp.full_like(state.last_skip, SkipReason.GRADIENTS),
    )
    if config.mode == "static":
        return state
    hysteresis_left = jnp.maximum(state.hysteresis_left - 1, 0)
    reduced = jnp.maximum(state.loss_scale * config.backoff_factor, config.min_scale)
    return state._replace(
        loss_scale=jnp.where(hysteresis_left == 0, reduced, state.loss_scale), hysteresis_left=hysteresis_left
    )


def _increment(counter: jax.Array) -> jax.Array:
    return jnp.where(counter < COUNTER_LIMIT, counter + 1, counter)


def check_flag(finite: Any, name: str = "finite") -> jax.Array:
    """Returns `finite` as bool[], or raises if it is not a boolean scalar."""
    dtype = getattr(finite, "dtype", bool if isinstance(finite, bool) else None)
    if dtype is None or dtype != np.dtype(bool):
        raise TypeError(
            f"{name} must be a boolean, got {describe(finite)}. Pass the flag from all_finite or unscale_and_check, or "
            "a comparison."
        )
    if (shape := jnp.shape(finite)) != ():
        raise ValueError(f"{name} must be a scalar, got shape {shape}. Combine with .all(), or call under jax.vmap.")
    return jnp.asarray(finite)
