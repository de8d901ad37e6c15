"""Loss scaling as an optax gradient transformation. The only module that knows optax.

On a skipped step the updates are zeros, and nothing of the inner transformation's state has moved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from jmpscale._finite import AxisName, all_finite, is_inexact, partition, warn_if_alone
from jmpscale._scaling import adapt, agree_on_outcome, require_one_scaler, unscale, unscaled_dtype
from jmpscale._state import ScalerState, dynamic

Tree = TypeVar("Tree")

_ARRAYS = tuple(name for name in ScalerState._fields if name != "config")


class LossScalingState(NamedTuple):
    """The state of `with_loss_scaling`.

    Attributes:
      scaler: the loss scaler; read it with `get_scaler`.
      inner_state: the state of the inner transformation.
    """

    scaler: ScalerState
    inner_state: optax.OptState


def with_loss_scaling(
    inner: optax.GradientTransformation, scaler: ScalerState | None = None, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes gradients of a scaled loss, and skips the step if they overflowed.

    Scale the loss with `scale(get_scaler(opt_state), loss)`: nothing can tell if you forget. This wrapper divides
    the gradients, checks them, runs `inner` or returns zeros, and adapts the scale. It goes around everything that uses
    gradients, and around `optax.partition`, `optax.masked` and `optax.MultiSteps`: inside them it would see some of the
    gradients, or sums that a single overflow has spoilt for good.

    Args:
      inner: any optax transformation; extra arguments of `update` reach it untouched. Pass the unscaled loss as
        `value=`, optax's own name for it: it tells a failed forward pass from an overflow.
      scaler: the scaler to start from, `dynamic()` by default; it is copied.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`.

    Returns:
      The transformation. Its `init` and `update` show `inner` parameters in the dtype of the unscaled gradients
      (float16 ones as float32); `optax.apply_updates` casts back. Its updates are -0.0 on a skip, which leave every
      parameter as it is, -0.0 too. What is outside it (a step count, averages, batch statistics) moves on.

    Raises:
      TypeError: `inner` is no gradient transformation, or `scaler` no `ScalerState`.

    >>> tx = with_loss_scaling(optax.sgd(1.0), dynamic(4.0))
    >>> opt_state = tx.init(jnp.array(1.0))
    >>> updates, opt_state = tx.update(jnp.array(jnp.inf), opt_state)
    >>> float(updates), float(get_scaler(opt_state).loss_scale)
    (-0.0, 2.0)
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner must be an optax.GradientTransformation, got {type(inner).__name__}. Pass one, such as "
            "optax.adam(1e-3); an optimizer of a framework goes around with_loss_scaling(...), not inside."
        )
    if scaler is not None:
        require_one_scaler(scaler, "scaler")
    wrapped = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        start = dynamic() if scaler is None else jax.tree.map(jnp.copy, scaler)
        return LossScalingState(start, wrapped.init(params if _is_off(start) else _widen(params)))

    def update(
        updates: optax.Updates, state: LossScalingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScalingState]:
        if not isinstance(cast(object, state), LossScalingState):
            raise TypeError(
                f"state must be what tx.init of with_loss_scaling made, got {type(state).__name__}. It comes second, "
                "before params; the state of a bare optimizer goes in by tx.init(params)._replace(inner_state=...)."
            )
        require_one_scaler(state.scaler, "state.scaler")
        if _is_off(state.scaler):
            updates, inner_state = wrapped.update(updates, state.inner_state, params, **extra_args)
            return updates, LossScalingState(state.scaler, inner_state)
        warn_if_alone(axis_name)
        finite = all_finite(unscale(state.scaler, updates), axis_name=())
        finite, loss_finite = agree_on_outcome(finite, extra_args.get("value"), axis_name)

        def step(grads: Any, inner_state: Any, params: Any) -> Any:
            # Divided here once more, in the branch: so the unscaled gradients are never written to memory.
            return wrapped.update(unscale(state.scaler, grads), inner_state, params, **extra_args)

        updates, inner_state = _step_or_zeros(finite, step, updates, state.inner_state, _widen(params))
        return updates, LossScalingState(adapt(state.scaler, finite, loss_finite), inner_state)

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _is_off(scaler: ScalerState) -> bool:
    return scaler.config.mode == "disabled"


def _widen(params: Any) -> Any:
    """Gives parameters the dtype of their unscaled gradients: else optimizer states change dtype when updated."""

    def one(x: Any) -> Any:
        if not is_inexact(x) or (wide := unscaled_dtype(jnp.result_type(x))) == jnp.result_type(x):
            return x
        return jnp.asarray(x, wide)

    return jax.tree.map(one, params)


def _step_or_zeros(finite: jax.Array, step: Callable[..., Any], grads: Any, inner_state: Any, params: Any) -> Any:
    """Runs the inner transformation in one branch; in the other makes zeros and hands its state back."""
    step = jax.jit(step)  # so that it is traced once, for the types and for the branch
    updates, _ = jax.eval_shape(step, grads, inner_state, params)

    def skip(_: Any, inner_state: Any, __: Any) -> Any:
        return jax.tree.map(_zeros, updates), inner_state

    return cast(Any, jax.lax.cond(finite, step, skip, grads, inner_state, params))


def _zeros(like: Any) -> jax.Array:
    # full_like takes over the sharding and the varying axes too, without which the branches would not match. The
    # zeros are negative, since x + -0.0 keeps every x, where -0.0 + 0.0 is 0.0.
    return jax.lax.full_like(like, -0.0 if is_inexact(like) else 0)


def get_scaler(tree: Any) -> ScalerState:
    """Finds the scaler in an optimizer state, a train state, or any other pytree.

    Args:
      tree: a pytree that contains exactly one `ScalerState`. Arrays may be wrapped, as Flax NNX does.

    Returns:
      The `ScalerState`, holding plain arrays.

    Raises:
      ValueError: the tree contains none, or several.

    >>> float(get_scaler({"model": 1.0, "scaler": dynamic(8.0)}).loss_scale)
    8.0
    """
    scaler = _only_scaler(tree)
    return scaler._replace(**{name: jax.tree.leaves(getattr(scaler, name))[0] for name in _ARRAYS})


def replace_scaler(tree: Tree, scaler: ScalerState) -> Tree:
    """Puts a scaler in the place of the one that a pytree contains: to set the scale by hand, or to reset it.

    Args:
      tree: a pytree that contains exactly one `ScalerState`.
      scaler: the new one; its settings count from now on, and cost one compilation if they differ.

    Returns:
      The tree with the scaler replaced, wrapped as the old one was.

    Raises:
      TypeError: `scaler` is no `ScalerState`.
      ValueError: the tree contains none, or several.

    >>> opt_state = with_loss_scaling(optax.sgd(0.1)).init(jnp.array(1.0))
    >>> float(get_scaler(replace_scaler(opt_state, dynamic(8.0))).loss_scale)
    8.0
    """
    require_one_scaler(scaler, "scaler")
    old = _only_scaler(tree)

    def wrap(was: Any, now: Any) -> Any:
        return jax.tree.unflatten(cast(Any, jax.tree.structure(was)), [now])

    new = scaler._replace(**{name: wrap(getattr(old, name), getattr(scaler, name)) for name in _ARRAYS})
    _, rebuild = partition(tree, _is_scaler, is_leaf=_is_scaler)
    return rebuild([new])


def _is_scaler(x: Any) -> bool:
    return isinstance(x, ScalerState)


def _only_scaler(tree: Any) -> ScalerState:
    found, _ = partition(tree, _is_scaler, is_leaf=_is_scaler)
    if len(found) != 1:
        raise ValueError(
            f"tree must contain exactly one ScalerState, found {len(found)} in a {type(tree).__name__}. "
            "Pass the optimizer state that tx.init of with_loss_scaling made, or the part of it that is meant."
        )
    return found[0]
