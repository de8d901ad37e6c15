"""The algorithm of loss scaling: scale the loss, unscale and check the gradients, adjust the scale.

Every function is pure. A scaler keeps its structure, dtypes, weak types and shardings, so that it can be the carry of a
`jax.lax.scan` and does not cause a second compilation.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmpscale._base.axes import (
    AxisName,
    all_reduce_and,
    as_axes,
    check_no_partial_sums,
    untyped_axes,
    warn_if_unsynchronized,
)
from jmpscale._base.check import COUNTER_LIMIT, check_flag, warn_user
from jmpscale._base.compat import is_compiling, unreduced_axes
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, Tree, check_no_refs, flatten_gradients, is_real, is_traced, named_leaves
from jmpscale._find_scaler import check_scaler, find_scaler
from jmpscale._finite import all_finite, all_finite_here
from jmpscale._state import ScalerState, SkipReason


def scale(scaler: PyTree, tree: Tree) -> Tree:
    """Multiplies a loss, or a pytree of losses, by the loss scale.

    The product is at least float32, because the default scale is infinite in float16.

    Args:
      scaler: the scaler, or any pytree that contains exactly one. Unscale the gradients with the same scaler.
      tree: pytree of floating-point arrays of any shape. The loss should be float32: the backward pass of a float16
        loss starts from the scale in float16, which is infinite from 2^16 on.

    Returns:
      The scaled tree; leaves narrower than float32 become float32. With `disabled()`, the tree itself.

    Raises:
      TypeError: a leaf does not have a floating-point dtype.
      ValueError: `scaler` contains no scaler, more than one, or a batch of scalers.

    Warns:
      UserWarning: a traced leaf has a dtype that cannot hold large scales, such as float16.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.scale(jmpscale.dynamic(2.0**16), jnp.float16(3.0))
    Array(196608., dtype=float32)
    """
    state = find_scaler(scaler)
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    for path, leaf in named_leaves(tree):
        if not is_real(leaf):
            raise TypeError(
                f"scale takes losses of a floating-point dtype, got {describe(leaf)} at tree{path}. "
                "Pass only the losses, or convert with .astype(jnp.float32)."
            )
        if is_traced(leaf) and needs_wider_gradient(leaf):
            warn_about_narrow_loss(leaf)
    return _scale_leaves(state.loss_scale, tree)


def warn_about_narrow_loss(loss: jax.Array) -> None:
    """Warns about a loss whose dtype cannot hold large scales."""
    warn_user(
        f"the loss is {loss.dtype}, so the backward pass starts from the loss scale in {loss.dtype}, where large "
        "scales are infinite. Return the loss in float32: convert the model's output with .astype(jnp.float32) "
        "before the loss is computed. jmpscale.diagnose lists the operations that are in float16."
    )


@jax.jit
def _scale_leaves(loss_scale: jax.Array, tree: PyTree) -> PyTree:
    def scale_leaf(x: ArrayLike) -> jax.Array:
        dtype = _at_least_float32(jnp.result_type(x))
        return jnp.asarray(x, dtype) * jnp.asarray(loss_scale, dtype)

    return jax.tree.map(scale_leaf, tree)


def unscale(scaler: PyTree, tree: Tree) -> Tree:
    """Divides gradients by the loss scale.

    Gradients in float16 and float8 become float32, because the small values that scaling has preserved would underflow
    again. The function is differentiable, so that gradient penalties can use it.

    Args:
      scaler: the scaler that scaled the loss, before its update, or any pytree that contains exactly one.
      tree: pytree of gradients. Leaves that are not floating-point or complex are unchanged, and so are the new scales
        and histories that Flax's fp8 layers return in place of gradients.

    Returns:
      The unscaled gradients. With `disabled()`, the tree itself.

    Raises:
      TypeError: a leaf is a partial sum or a `jax.Ref`.
      ValueError: `scaler` contains no scaler, more than one, or a batch of scalers.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.unscale(jmpscale.dynamic(2.0**16), {"w": jnp.float16(2.0), "step": 3})
    {'step': 3, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_scaler(scaler)
    check_no_refs(tree)
    if state.config.mode == "disabled":
        return tree
    check_no_partial_sums(tree)
    # Only gradients pass through jit, which converts float0 to bool and raises for Python objects.
    grads, unflatten = flatten_gradients(tree)
    return unflatten(unscale_leaves(grads, state.loss_scale))


@jax.jit
def unscale_leaves(grads: Sequence[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    """Divides arrays by the loss scale; `unscaled_dtype` gives the dtypes of the results."""
    loss_scale = jnp.asarray(loss_scale)
    inverse = {dtype: 1 / loss_scale.astype(dtype) for dtype in map(_real_dtype, grads)}
    return [_product(x, inverse[_real_dtype(x)], unscaled_dtype(jnp.result_type(x))) for x in grads]


def multiply_leaf(x: ArrayLike, factor: jax.Array) -> jax.Array:
    """Multiplies a floating-point or complex array by a real number, and keeps its dtype."""
    return _product(x, factor.astype(_real_dtype(x)), jnp.result_type(x))


def multiply_gradients(grads: Tree, factor: jax.Array) -> Tree:
    """Multiplies gradients by a real number, and keeps their dtypes."""
    leaves, unflatten = flatten_gradients(grads)
    return unflatten(multiply_leaf(x, factor) for x in leaves)


def _product(x: ArrayLike, factor: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Multiplies in at least float32 and rounds once, to `dtype`."""
    if axes := unreduced_axes(x):  # JAX multiplies partial sums only by values of a type that shows these axes
        factor = jax.sharding.reshard(factor, jax.P(reduced=axes))
    if jnp.iscomplexobj(x):  # part by part: inf * (factor + 0j) is NaN
        return jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    if jax.typeof(x).weak_type:
        return jax.lax.mul(x, jax.lax.full_like(x, factor))  # weakly typed as well
    return (jnp.asarray(x, factor.dtype) * factor).astype(dtype)


def _real_dtype(x: ArrayLike) -> np.dtype:
    """Returns the real dtype in which a leaf is multiplied: at least float32."""
    return _at_least_float32(jnp.finfo(jnp.result_type(x)).dtype)


def unscaled_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of an unscaled gradient: float32 for float16 and float8, otherwise the dtype itself."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else _at_least_float32(dtype)


def needs_wider_gradient(x: ArrayLike) -> bool:
    """Tests whether a leaf is float16 or float8, which cannot hold unscaled gradients."""
    return unscaled_dtype(jnp.result_type(x)) != jnp.result_type(x)


def _at_least_float32(dtype: DTypeLike) -> np.dtype:
    return np.dtype(np.float32) if jnp.finfo(dtype).bits < 32 else np.dtype(dtype)


def unscale_and_check(scaler: PyTree, grads: Tree, *, axis_name: AxisName = None) -> tuple[Tree, jax.Array]:
    """Divides gradients by the loss scale and tests whether all of them are finite, on all devices.

    The unscaled values are tested, because unscaling by a scale below 1 can make finite gradients infinite.

    Args:
      scaler: the scaler that scaled the loss, before its update, or any pytree that contains exactly one.
      grads: pytree of gradients, as in `unscale`.
      axis_name: the mapped axes over which to combine the result, as in `all_finite`.

    Returns:
      The unscaled gradients, and `finite`, bool[]. Pass `finite` to `apply_if` and to `update`. With `disabled()`, the
      gradients themselves and True.

    Raises:
      TypeError: a leaf is a partial sum or a `jax.Ref`.
      ValueError: `scaler` contains no scaler, more than one, or a batch of scalers; or an axis is not mapped here.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> grads, finite = jmpscale.unscale_and_check(jmpscale.dynamic(4.0), jnp.array([8.0, jnp.inf]))
    >>> grads, bool(finite)
    (Array([ 2., inf], dtype=float32), False)
    """
    grads = unscale(scaler, grads)
    return grads, all_finite(grads, scaler=scaler, axis_name=axis_name)


def update(scaler: ScalerState, finite: ArrayLike, *, loss: PyTree = None, axis_name: AxisName = None) -> ScalerState:
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
        total_skips += 1
        consecutive_skips += 1
        if the loss is given and not finite:
            last_skip_reason = LOSS
        else:
            last_skip_reason = MIN_SCALE if loss_scale <= min_scale else GRADIENTS
            finite_steps = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                loss_scale = max(loss_scale * backoff_factor, min_scale)
    ```

    With `hysteresis=1` each overflow backs the scale off, and `hysteresis_left` stays 1. A static scaler counts steps
    and skips. Its scale and its hysteresis do not change.

    Args:
      scaler: the scaler from before the step.
      finite: bool[], from `all_finite` or `unscale_and_check`.
      loss: the unscaled loss, of any shape, or a pytree of unscaled losses. A skipped step whose loss is not finite
        does not change the scale. A non-finite loss alone never causes a skip.
      axis_name: the mapped axes over which to combine `finite` and the finiteness of the loss, as in `all_finite`. If
        it is given and does not name every axis of `jax.pmap`, `jax.vmap(axis_name=...)` and `check_vma=False` around
        the call, the loss is ignored: along the other axes it may differ between devices, whose scales would then
        diverge.

    Returns:
      The scaler for the next step, with the structure, dtypes, weak types and shardings of `scaler`.

    Raises:
      TypeError: `scaler` is not a `ScalerState`, or `finite` is not a boolean.
      ValueError: `scaler` is a batch of scalers outside `jax.vmap`, `finite` is not a scalar, or an axis is not mapped
        here.

    Warns:
      UserWarning: the scaler is a constant of a compiled program, which creates it or closes over it, so every step
        would start from the same scale.

    >>> import jmpscale
    >>> scaler = jmpscale.update(jmpscale.dynamic(1024.0), False)
    >>> float(scaler.loss_scale), int(scaler.total_skips)
    (512.0, 1)

    With `hysteresis=1` this is the rule of `torch.amp.GradScaler` (PyTorch 2.13), with limits. With hysteresis it is
    the rule of Megatron-LM and DeepSpeed, and with `hysteresis_reset="finite"` the rule of apex and NeMo.
    """
    check_scaler(scaler)
    flag = check_flag(finite)
    if scaler.config.mode == "disabled":
        return scaler
    warn_if_constant(scaler, finite)
    if loss is not None:
        warn_if_unsynchronized(axis_name)
    return apply_rule(scaler, *all_reduce_outcome(flag, loss, axis_name))


def warn_if_constant(scaler: ScalerState, values: PyTree, name: str = "scaler") -> None:
    """Warns if a compiled step contains its scaler, because every call would then start from the same state.

    Args:
      scaler: the scaler of the step.
      values: the flag or the gradients of the step, which are traced if it is compiled.
      name: what holds the scaler in the user's program.
    """
    traced = [x for x in jax.tree.leaves(values) if is_traced(x)]
    if not traced or not is_compiling() or any(map(is_traced, jax.tree.leaves(scaler))):
        return
    # A step that a compiled program differentiates, or maps over a batch, may start from a constant. Such a
    # transformation traces values of a type of its own; a new array has the type of the program's values.
    own_type = type(jnp.zeros(()))
    if all(type(x) is own_type for x in traced):
        warn_user(
            f"the {name} is a constant of the compiled program, so every call starts from the same one: the compiled "
            f"function creates the {name}, or closes over it. Create the {name} before, pass it to the compiled "
            f"function as an argument, and return the new one. If the function is a whole training run, carry the "
            f"{name} through jax.lax.scan."
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
    return axis_name is not None and not untyped_axes() <= set(as_axes(axis_name))


@jax.jit
def apply_rule(scaler: ScalerState, finite: jax.Array, loss_finite: jax.Array | None) -> ScalerState:
    """Applies the rule of `update` to flags that are equal on all devices."""
    reason = jnp.where(finite, scaler.last_skip_reason, _reason_of_skip(scaler, loss_finite))
    # The reason depends on the scale, and the new scale depends on the reason. XLA on GPUs would compute both from the
    # old scale, in two kernels in any order, and copy the old scale first. The barrier orders them.
    reason = jax.lax.optimization_barrier(reason)
    skipped = scaler._replace(
        total_skips=_increment(scaler.total_skips), consecutive_skips=_increment(scaler.consecutive_skips)
    )
    after_skip = _after_overflow(skipped)
    if loss_finite is not None:
        after_skip = _select(reason == int(SkipReason.LOSS), skipped, after_skip)
    return _select(finite, _after_finite(scaler), after_skip)._replace(last_skip_reason=reason)


def _reason_of_skip(scaler: ScalerState, loss_finite: jax.Array | None) -> jax.Array:
    # The constants are computed from the state: JAX 0.7 cannot select one of two constants by a sharded flag.
    reasons = {reason: scaler.last_skip_reason * 0 + int(reason) for reason in SkipReason}
    reason = reasons[SkipReason.GRADIENTS]
    if scaler.config.mode == "dynamic":
        at_limit = scaler.loss_scale <= scaler.config.min_scale
        reason = jnp.where(at_limit, reasons[SkipReason.MIN_SCALE], reason)
    return reason if loss_finite is None else jnp.where(loss_finite, reason, reasons[SkipReason.LOSS])


def _select(flag: jax.Array, if_true: ScalerState, if_false: ScalerState) -> ScalerState:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(flag, a, b), if_true, if_false)


def _after_finite(scaler: ScalerState) -> ScalerState:
    config = scaler.config
    finite_steps = _increment(scaler.finite_steps)
    scaler = scaler._replace(finite_steps=finite_steps, consecutive_skips=jnp.zeros_like(scaler.consecutive_skips))
    if config.mode == "static":
        return scaler
    grow = finite_steps >= config.growth_interval
    grown = jnp.minimum(scaler.loss_scale * config.growth_factor, config.max_scale)
    scaler = scaler._replace(
        loss_scale=jnp.where(grow, grown, scaler.loss_scale), finite_steps=jnp.where(grow, 0, finite_steps)
    )
    if config.hysteresis == 1:
        return scaler
    reset = True if config.hysteresis_reset == "finite" else grow
    return scaler._replace(hysteresis_left=jnp.where(reset, config.hysteresis, scaler.hysteresis_left))


def _after_overflow(scaler: ScalerState) -> ScalerState:
    config = scaler.config
    scaler = scaler._replace(finite_steps=jnp.zeros_like(scaler.finite_steps))
    if config.mode == "static":
        return scaler
    reduced = jnp.maximum(scaler.loss_scale * config.backoff_factor, config.min_scale)
    # With a hysteresis of 1 the rule does not depend on the count. On GPUs each scalar that changes costs a kernel.
    if config.hysteresis == 1:
        return scaler._replace(loss_scale=reduced)
    hysteresis_left = jnp.maximum(scaler.hysteresis_left - 1, 0)
    return scaler._replace(
        loss_scale=jnp.where(hysteresis_left == 0, reduced, scaler.loss_scale), hysteresis_left=hysteresis_left
    )


def _increment(counter: jax.Array) -> jax.Array:
    return jnp.where(counter < COUNTER_LIMIT, counter + 1, counter)
