"""Loss scaling as an optax gradient transformation. The only module that knows optax.

On a skipped step the updates are zeros, and nothing of the inner transformation's state has moved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmpscale._finite import AxisName, all_finite, axes_to_reduce, warn_if_alone
from jmpscale._gate import gate, kind_of, require_same
from jmpscale._scaling import adapt, agree_on_outcome, multiply, unscale, unscaled_dtype
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, ScalerState, dynamic, within
from jmpscale._tree import is_array, is_inexact, partition, require_one_scaler


class LossScalingState(NamedTuple):
    """The state of `with_loss_scaling`.

    Attributes:
      scaler: the loss scaler; read it with `get_scaler`.
      inner_state: the state of the inner transformation.
    """

    scaler: ScalerState
    inner_state: optax.OptState


def with_loss_scaling(
    inner: optax.GradientTransformation,
    scaler: ScalerState | None = None,
    *,
    max_norm: float | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes gradients of a scaled loss, and skips the step if they overflowed.

    `scaled_value_and_grad` makes these gradients. This wrapper divides them, checks them, runs `inner` or returns
    zeros, and adapts the scale. It goes around everything that uses gradients, and around `optax.partition`,
    `optax.masked` and `optax.MultiSteps`: inside them it would see some of the gradients, or sums that a single
    overflow has spoilt for good.

    Args:
      inner: any optax transformation; extra arguments of `update` reach it. Pass the unscaled loss as `value=`, optax's
        own name for it: it tells a failed forward pass from an overflow. `grad=`, by optax's convention the gradients
        once more, is divided too if it has their structure. On platforms other than CPU `inner` runs on a skipped step
        too, on gradients with zeros for what is not finite, and its result is thrown away; see `apply_if`.
      scaler: the scaler to start from, `dynamic()` by default; it is copied.
      max_norm: clips the unscaled gradients to this global norm before `inner`, as `optax.clip_by_global_norm` does.
        The norm is the check as well, so that they are read once: it is finite if and only if they are and the sum of
        their squares is below 3.4e38, and a larger one counts as an overflow. Over devices it is that of all of them:
        along an axis on which a gradient varies each device holds a part of it.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`. With `max_norm`
        `()` if all devices hold the same gradients, or else the axes over which they hold parts.

    Returns:
      The transformation. Its `init` and `update` show `inner` parameters in the dtype of the unscaled gradients
      (float16 ones as float32); `optax.apply_updates` casts back. Its updates are -0.0 on a skip, which leave every
      parameter as it is, -0.0 too (but a CPU's addition makes subnormal numbers zero, as on any step). What is outside
      it (a step count, averages, batch statistics) moves on.

    Raises:
      TypeError: `inner` is no gradient transformation or changes the structure or types of its state, `scaler` is no
        `ScalerState`, or `max_norm` no number.
      ValueError: `max_norm` is not positive.

    >>> tx = with_loss_scaling(optax.sgd(1.0), dynamic(4.0))
    >>> opt_state = tx.init(jnp.array(1.0))
    >>> updates, opt_state = tx.update(jnp.array(jnp.inf), opt_state)
    >>> float(updates), float(opt_state.scaler.loss_scale)
    (-0.0, 2.0)
    """
    _require_transformation(
        inner, "inner", "optax.adam(1e-3); an optimizer of a framework goes around with_loss_scaling(...), not inside"
    )
    if scaler is not None:
        require_one_scaler(scaler, "scaler")
        scaler = jax.tree.map(jnp.copy, scaler)  # the caller may donate it
    if max_norm is not None:
        max_norm = within("max_norm", max_norm, SMALLEST_SCALE, LARGEST_SCALE, "Leave it out to clip nothing.")
    wrapped = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        start = dynamic() if scaler is None else jax.tree.map(jnp.copy, scaler)
        return LossScalingState(start, wrapped.init(params if _is_off(start) else _widen(params)))

    def update(
        updates: optax.Updates, state: LossScalingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScalingState]:
        _require_state(state)
        scaler, grads = state.scaler, unscale(state.scaler, updates)
        norm, factor = (None, None) if max_norm is None else _clipping(grads, max_norm, axis_name)
        if _is_off(scaler):
            updates, inner_state = wrapped.update(multiply(grads, factor), state.inner_state, params, **extra_args)
            return updates, LossScalingState(scaler, inner_state)
        warn_if_alone(axis_name)
        finite = all_finite(grads if norm is None else norm, axis_name=())
        finite, loss_finite = agree_on_outcome(finite, extra_args.get("value"), axis_name)
        if "grad" in extra_args and jax.tree.structure(extra_args["grad"]) == jax.tree.structure(updates):
            extra_args["grad"] = _harmless(unscale(scaler, extra_args["grad"]))
        step = partial(_step, wrapped, _widen(params), extra_args)
        updates, inner_state = _gated(step, scaler, factor, finite, updates, state.inner_state)
        return updates, LossScalingState(adapt(scaler, finite, loss_finite), inner_state)

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _require_transformation(tx: object, name: str, remedy: str) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {type(tx).__name__}. Pass one, such as {remedy}."
        )


def _require_state(state: object) -> None:
    if not isinstance(state, LossScalingState):
        raise TypeError(
            f"state must be what tx.init of with_loss_scaling made, got {type(state).__name__}. It comes second, "
            "before params; the state of a bare optimizer goes in by tx.init(params)._replace(inner_state=...)."
        )
    require_one_scaler(state.scaler, "state.scaler")


def _prepare(scaler: ScalerState, factor: Any, in_vain: bool, grads: Any, inner_state: Any) -> tuple[Any, Any]:
    # The gradients are divided here once more: so the unscaled ones are never written to memory.
    grads = multiply(unscale(scaler, grads), factor)
    return _harmless(grads) if in_vain else grads, inner_state


def _step(tx: Any, params: Any, extra_args: Any, grads: Any, inner_state: Any) -> Any:
    updates, after = tx.update(grads, inner_state, params, **extra_args)
    remedy = "A transformation that only adds to its state what it has seen, such as optax.monitor, goes around "
    remedy += "with_loss_scaling: optax.chain(with_loss_scaling(...), optax.monitor(...))."
    require_same(inner_state, after, "state", "inner", remedy)
    return updates, after


def _is_off(scaler: ScalerState) -> bool:
    return scaler.config.mode == "disabled"


def _widen(params: Any) -> Any:
    """Gives parameters the dtype of their unscaled gradients: else optimizer states change dtype when updated."""

    def one(x: Any) -> Any:
        abstract = isinstance(x, jax.ShapeDtypeStruct)
        if not (abstract or is_array(x)) or not jnp.issubdtype(x.dtype, np.inexact):
            return x
        wide = unscaled_dtype(x.dtype)
        if wide == x.dtype:
            return x
        return jax.ShapeDtypeStruct(x.shape, wide, sharding=x.sharding) if abstract else jnp.asarray(x, wide)

    return jax.tree.map(one, params)


def _clipping(grads: Any, max_norm: float, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Returns the global norm, and what to multiply gradients with for it to be at most `max_norm`."""
    norm = _global_norm(grads, axis_name)
    return norm, jnp.where(norm > max_norm, max_norm / norm, 1)


def _global_norm(grads: Any, axis_name: AxisName) -> jax.Array:
    """Returns the norm over all leaves and devices, in float32, or in float64 where a leaf is."""
    leaves = [jnp.asarray(x) for x in partition(grads, is_inexact)[0]]
    wide = jnp.float64 if any(x.real.dtype == jnp.float64 for x in leaves) else jnp.float32
    groups: dict[tuple[Any, ...], list[jax.Array]] = {}
    for x in leaves:
        for part in (x.real, x.imag) if jnp.iscomplexobj(x) else (x,):
            # Not square(part) alone, whose derivative at infinity turns a cotangent of zero into NaN.
            square = jnp.where(jnp.isfinite(part), jnp.square(_harmless(part.astype(wide))), np.array(np.inf, wide))
            total = square.sum()
            groups.setdefault(axes_to_reduce(total, axis_name), []).append(total)
    sums = {axes: jnp.stack(squares).sum() for axes, squares in groups.items()}
    agreed: list[Any] = [jax.lax.psum(x, axes) if axes else x for axes, x in sums.items()]
    return jnp.sqrt(sum(agreed, jnp.zeros((), wide)))


def _harmless(grads: Any) -> Any:
    """Makes zeros of what is not finite: it changes nothing in a step that counts, and spares one that does not."""
    leaves, rebuild = partition(grads, is_inexact)
    return rebuild(jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)) for x in leaves)


def _zeros_and_state(like: Any, grads: Any, inner_state: Any) -> Any:
    return jax.tree.map(_zeros, like[0]), inner_state


def _zeros(like: Any) -> jax.Array:
    # full_like takes over the sharding and the varying axes too, without which the branches would not match. The
    # zeros are negative, since x + -0.0 keeps every x, where -0.0 + 0.0 is 0.0.
    zero = complex(-0.0, -0.0) if jnp.issubdtype(like.dtype, np.complexfloating) else -0.0
    return jax.lax.full_like(like, zero if jnp.issubdtype(like.dtype, np.inexact) else 0)


def _gated(step: Any, scaler: ScalerState, factor: Any, finite: jax.Array, grads: Any, inner_state: Any) -> Any:
    """Takes the step or skips it; on CPU by a branch, or by a select where there is so little to be selected."""
    state, gradients = _bytes(inner_state), _bytes(grads)
    known = isinstance(state, int) and isinstance(gradients, int)  # not so where shapes are symbolic
    on_cpu, prepare = None if known and state < gradients else _branch, partial(_prepare, scaler, factor)
    return gate(finite, step, _zeros_and_state, grads, inner_state, prepare=prepare, on_cpu=on_cpu)


def _branch(finite: jax.Array, step: Any, skip: Any, grads: Any, inner_state: Any) -> Any:
    def hand_back(grads: Any, inner_state: Any) -> Any:
        # In place of zeros the gradients, where they have the type of the updates: so both share their memory.
        updates, _ = skip(grads, inner_state)
        leaves, treedef = cast(tuple[list[Any], Any], jax.tree.flatten(updates))
        given = jax.tree.leaves(grads)
        if len(leaves) != len(given):
            return updates, inner_state
        fitting = [g if kind_of(g) == kind_of(u) else u for g, u in zip(given, leaves, strict=True)]
        return jax.tree.unflatten(treedef, fitting), inner_state

    updates, after = cast(Any, jax.lax.cond(finite, step, hand_back, grads, inner_state))
    return jax.tree.map(partial(jnp.where, finite), updates, skip(grads, inner_state)[0]), after


def _bytes(tree: Any) -> Any:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if is_array(x))


def optax_step(tx: optax.GradientTransformation, grads: Any, **extra_args: Any) -> Callable[[Any, Any], Any]:
    """Makes the step of an optax optimizer for `apply_if`: update, then apply.

    Args:
      tx: the optimizer, without `with_loss_scaling`, which gates by itself.
      grads: the unscaled gradients.
      **extra_args: of `tx.update`, such as `value=`.

    Returns:
      `step(params, opt_state) -> (params, opt_state)`. Leaves of `params` without a gradient, such as the functions in
      an Equinox model, stay as they are.

    Raises:
      TypeError: `tx` is no gradient transformation.

    >>> from jmpscale import apply_if
    >>> tx, params = optax.sgd(1.0), {"w": jnp.array(3.0)}
    >>> apply_if(True, optax_step(tx, {"w": jnp.array(1.0)}), params, tx.init(params))[0]
    {'w': Array(2., dtype=float32)}
    """
    _require_transformation(tx, "tx", "optax.adam(1e-3), and the gradients after it")

    def step(params: Any, opt_state: Any) -> Any:
        updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, **extra_args)
        return jax.tree.map(_apply, updates, params, is_leaf=_is_none), opt_state

    return step


def _apply(update: Any, param: Any) -> Any:
    return param if update is None else optax.apply_updates(param, update)


def _is_none(x: Any) -> bool:
    return x is None
