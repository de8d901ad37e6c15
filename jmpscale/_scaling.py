"""Loss scaling itself: multiply the loss, divide and check the gradients, adapt the scale.

Everything here is pure, jitted, and exact for scales that are powers of two. A state that comes out has the
structure, dtypes, weak types and shardings of the state that went in, so it is a `jax.lax.scan` carry and never
causes a second compilation.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._finite import AxisName, agree, all_finite, refuse_partial_sums, warn_if_alone
from jmpscale._state import COUNTER_LIMIT, ScalerState, shown
from jmpscale._tree import Tree, is_inexact, named_leaves, partition, partition_gradients, require_one_scaler


def scale(state: ScalerState, tree: Tree) -> Tree:
    """Multiplies the loss, or a pytree of losses, with the loss scale.

    `x.astype(wide) * loss_scale`, where `wide` is at least float32: in float16 the default scale itself is infinite.

    Args:
      state: the scaler; `unscale_and_check` the gradients with the same one.
      tree: pytree of floating-point arrays of any shape. Return the loss from the model in float32: the gradient of
        a loss that is computed in float16 is the scale itself in float16, and that is infinite from 2^16 on.

    Returns:
      The tree, multiplied; leaves narrower than float32 come back as float32. With `disabled()` the tree itself.

    Raises:
      TypeError: `state` is not a `ScalerState`, or a leaf is not of a floating-point dtype.
      ValueError: `state` is a batch of scalers outside `jax.vmap`.

    >>> from jmpscale import dynamic
    >>> scale(dynamic(2.0**16), jnp.float16(3.0))
    Array(196608., dtype=float32)
    """
    require_one_scaler(state)
    if state.config.mode == "disabled":
        return tree
    for path, leaf in named_leaves(tree):
        if not (is_inexact(leaf) and not jnp.iscomplexobj(leaf)):
            raise TypeError(
                f"scale takes losses of a floating-point dtype, got {shown(leaf)} at tree{path}. "
                "Pass only the losses, or convert with .astype(jnp.float32)."
            )
    return cast(Tree, _scale(state.loss_scale, tree))


@jax.jit
def _scale(loss_scale: jax.Array, tree: Any) -> Any:
    def one(x: Any) -> jax.Array:
        dtype = _at_least_float32(jnp.result_type(x))
        return jnp.asarray(x, dtype) * loss_scale.astype(dtype)

    return jax.tree.map(one, tree)


def unscale(state: ScalerState, tree: Tree) -> Tree:
    """Divides gradients by the loss scale; differentiable, so that gradient penalties can use it.

    `x.astype(wide) * (1 / loss_scale)`, where `wide` is float32 for float16 and float8 leaves, which could not hold
    the small values that scaling has rescued, and the leaf's own dtype otherwise.

    Args:
      state: the scaler with which the loss was scaled: the one before `update`.
      tree: pytree of gradients. Leaves of other than inexact dtypes and None come back as they are, and so does what
        Flax's fp8 layers return in the place of gradients, under `_overwrite_with_gradient`.

    Returns:
      The tree of unscaled gradients. With `disabled()` the tree itself.

    Raises:
      TypeError: `state` is not a `ScalerState`, or gradients are partial sums.
      ValueError: `state` is a batch of scalers outside `jax.vmap`.

    >>> from jmpscale import dynamic
    >>> unscale(dynamic(2.0**16), {"w": jnp.float16(2.0), "step": 3})
    {'step': 3, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    require_one_scaler(state)
    if state.config.mode == "disabled":
        return tree
    refuse_partial_sums(tree)
    # Only what is to be divided goes through jit, which would turn float0 into bool and refuse Python objects.
    leaves, rebuild = partition_gradients(tree)
    return rebuild(cast(list[jax.Array], _unscale(state.loss_scale, leaves)))


@jax.jit
def _unscale(loss_scale: jax.Array, leaves: list[Any]) -> list[jax.Array]:
    return [_product(x, unscaled_dtype(jnp.result_type(x)), lambda wide: 1 / loss_scale.astype(wide)) for x in leaves]


def multiply(grads: Any, factor: jax.Array | None) -> Any:
    """Multiplies gradients with a real number, and keeps their dtypes; by None with nothing."""
    if factor is None:
        return grads
    leaves, rebuild = partition(grads, is_inexact)
    return rebuild(_product(x, jnp.result_type(x), factor.astype) for x in leaves)


def _product(x: Any, dtype: Any, factor: Callable[[Any], jax.Array]) -> jax.Array:
    # A bfloat16 leaf is multiplied in float32 and rounded once; a complex one by a real number, part by part, since
    # inf * (r + 0j) is NaN.
    wide = _at_least_float32(_finfo(dtype).dtype)
    if jnp.issubdtype(dtype, np.complexfloating):
        return jax.lax.complex(jnp.real(x) * factor(wide), jnp.imag(x) * factor(wide))
    return (jnp.asarray(x, wide) * factor(wide)).astype(dtype)


def unscaled_dtype(dtype: Any) -> Any:
    """Returns the dtype of an unscaled gradient: float32 for float16 and narrower, else the dtype itself."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else _at_least_float32(dtype)


def _at_least_float32(dtype: Any) -> Any:
    return np.dtype(np.float32) if _finfo(dtype).bits < 32 else np.dtype(dtype)


def _finfo(dtype: Any) -> Any:
    return cast(Any, jnp.finfo(dtype))


def unscale_and_check(state: ScalerState, grads: Tree, *, axis_name: AxisName = None) -> tuple[Tree, jax.Array]:
    """Divides gradients by the loss scale and tells whether all of them are finite, on every device.

    The unscaled values are the ones checked: with a scale below 1 finite gradients can become infinite.

    Args:
      state: the scaler with which the loss was scaled: the one before `update`.
      grads: pytree of gradients, as in `unscale`.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`.

    Returns:
      The unscaled gradients, and `finite`, bool[]: apply the step if it is true (`apply_if`), and give it to `update`
      either way. With `disabled()` the gradients themselves and True.

    Raises:
      TypeError: `state` is not a `ScalerState`, or gradients are partial sums.
      ValueError: `state` is a batch of scalers outside `jax.vmap`, or an axis is not mapped here.

    >>> from jmpscale import dynamic
    >>> grads, finite = unscale_and_check(dynamic(4.0), jnp.array([8.0, jnp.inf]))
    >>> grads, bool(finite)
    (Array([ 2., inf], dtype=float32), False)
    """
    require_one_scaler(state)
    if state.config.mode == "disabled":
        return grads, jnp.array(True)
    grads = unscale(state, grads)
    return grads, all_finite(grads, axis_name=axis_name)


def update(state: ScalerState, finite: Any, *, loss: Any = None, axis_name: AxisName = None) -> ScalerState:
    """Adapts the loss scale to the outcome of one step.

    After `growth_interval` finite steps in a row the scale grows, after an overflow it backs off, within its limits.
    If the loss itself is not finite the step only counts as skipped: no scale cures a forward pass.

    Args:
      state: the scaler before the step.
      finite: bool[], from `unscale_and_check`.
      loss: the unscaled loss (any shape, or a pytree), to tell an overflow from a failed forward pass. It explains a
        skip and never causes one. It must not depend on the scale: leave out a penalty made of scaled gradients.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`. Needed there
        if `finite` or `loss` differs between devices.

    Returns:
      The scaler for the next step.

    Raises:
      TypeError: `state` is not a `ScalerState`, or `finite` is not a boolean.
      ValueError: `state` is a batch of scalers outside `jax.vmap`, `finite` is not a scalar, or an axis is not
        mapped here.

    >>> from jmpscale import dynamic
    >>> state = update(dynamic(1024.0), False)
    >>> float(state.loss_scale), int(state.skipped)
    (512.0, 1)

    The rule is that of `torch.amp.GradScaler` (PyTorch 2.13) with limits; hysteresis as in Megatron-LM
    (`refill="growth"`) or apex (`refill="finite"`).
    """
    require_one_scaler(state)
    flag = require_flag(finite)
    if state.config.mode == "disabled":
        return state
    if loss is not None:
        warn_if_alone(axis_name)
    return adapt(state, *agree_on_outcome(flag, loss, axis_name))


def agree_on_outcome(finite: jax.Array, loss: Any, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Returns whether the gradients and the loss are finite on all devices, as two flags from one collective."""
    if loss is None:
        return agree(finite, axis_name=axis_name)[0], jnp.array(True)
    agreed = agree(finite, all_finite(loss, axis_name=()), axis_name=axis_name)
    return agreed[0], agreed[1]


def adapt(state: ScalerState, finite: jax.Array, loss_finite: jax.Array) -> ScalerState:
    """Applies the rule to flags on which the devices agree already."""
    return cast(ScalerState, _adapt(state, finite, loss_finite))


@jax.jit
def _adapt(state: ScalerState, finite: jax.Array, loss_finite: jax.Array) -> ScalerState:
    def choose(if_finite: jax.Array, if_loss: jax.Array, if_overflow: jax.Array) -> jax.Array:
        return jnp.where(finite, if_finite, jnp.where(loss_finite, if_overflow, if_loss))

    after_skip = state._replace(skipped=_increment(state.skipped), skipped_in_a_row=_increment(state.skipped_in_a_row))
    after_bad_loss = after_skip._replace(last_skip=jnp.full_like(state.last_skip, 2))
    return jax.tree.map(choose, _after_finite(state), after_bad_loss, _after_overflow(after_skip))


def _after_finite(state: ScalerState) -> ScalerState:
    config = state.config
    state = state._replace(
        good_steps=_increment(state.good_steps), skipped_in_a_row=jnp.zeros_like(state.skipped_in_a_row)
    )
    if config.mode == "static":
        return state
    grow = state.good_steps >= config.growth_interval
    full = jnp.full_like(state.hysteresis_left, config.hysteresis)
    grown = jnp.minimum(state.loss_scale * config.growth_factor, config.max_scale)
    return state._replace(
        loss_scale=jnp.where(grow, grown, state.loss_scale),
        good_steps=jnp.where(grow, 0, state.good_steps),
        hysteresis_left=full if config.refill == "finite" else jnp.where(grow, full, state.hysteresis_left),
    )


def _after_overflow(state: ScalerState) -> ScalerState:
    config = state.config
    state = state._replace(good_steps=jnp.zeros_like(state.good_steps), last_skip=jnp.full_like(state.last_skip, 1))
    if config.mode == "static":
        return state
    left = jnp.maximum(state.hysteresis_left - 1, 0)
    reduced = jnp.maximum(state.loss_scale * config.backoff_factor, config.min_scale)
    return state._replace(loss_scale=jnp.where(left == 0, reduced, state.loss_scale), hysteresis_left=left)


def _increment(counter: jax.Array) -> jax.Array:
    return jnp.where(counter < COUNTER_LIMIT, counter + 1, counter)


def require_flag(finite: Any, name: str = "finite") -> jax.Array:
    """Returns `finite` as bool[], or raises if it is something else."""
    dtype: Any = getattr(finite, "dtype", bool if isinstance(finite, bool) else None)
    if dtype is None or dtype != np.dtype(bool):
        raise TypeError(
            f"{name} must be a boolean, got {shown(finite)}. Pass the flag from unscale_and_check or all_finite, or "
            "a comparison."
        )
    if (shape := jnp.shape(finite)) != ():
        raise ValueError(f"{name} must be a scalar, got shape {shape}. Combine with .all(), or call under jax.vmap.")
    return jnp.asarray(finite)
