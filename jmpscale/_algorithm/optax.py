"""Loss scaling for the optimizers of optax."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmpscale._algorithm.finite import all_finite_here, zero_nonfinite
from jmpscale._algorithm.gate import gate
from jmpscale._algorithm.global_norm import global_norm
from jmpscale._algorithm.update import adapt, all_reduce_outcome
from jmpscale._base.axes import AxisName, as_axes, manual_axes
from jmpscale._base.compat import full_like
from jmpscale._base.memory import to_memory_of
from jmpscale._base.multiply import multiply_leaf
from jmpscale._base.options import requires_names
from jmpscale._base.tree import PyTree, as_array, find_instances, flatten_gradients, is_array, is_traced, structure
from jmpscale._base.types import as_float32, has_same_type, is_narrow, is_numeric, unscaled_dtype
from jmpscale._guards import optax as guards
from jmpscale._monitoring.compiled_monitor import CompiledMonitor
from jmpscale._state import ScalerState, WithLossScalingState, WithMasterParamsState, dynamic, register_with_flax


class Transformation(Protocol):
    """An optimizer of optax, or any object with the same methods, such as `optax.MultiSteps`."""

    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...


class _Update(Protocol):
    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, WithLossScalingState]: ...


class LossScalingTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of optax that `with_loss_scaling` returns, whose state has a type that type checkers know.

    Attributes:
      init: returns the initial `WithLossScalingState` for the parameters.
      update: returns the updates and the new state for gradients, the state, the parameters and `value=loss`.
    """

    init: Callable[[PyTree], WithLossScalingState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: _Update  # pyright: ignore[reportIncompatibleVariableOverride]


@requires_names
def with_loss_scaling(
    inner: Transformation,
    scaler: ScalerState | None = None,
    *,
    max_norm: float | None = None,
    axis_name: AxisName = None,
    norm_axis_name: AxisName = (),
    warn_after_skips: int | None = None,
) -> LossScalingTransformation:
    """Wraps an optimizer so that it skips steps whose loss or gradients are not finite, and adjusts the loss scale.

    `tx.update` checks the gradients and the loss, clips the gradients if `max_norm` is given, runs `inner` or returns
    zeros, and adjusts the scaler as `jmpscale.update` does. It does not unscale: pass unscaled gradients, as
    `jmpscale.value_and_grad` returns them. Place every transformation that changes gradients inside the wrapper,
    `optax.MultiSteps`, `optax.partition` and `optax.masked` included.

    Args:
      inner: an optax gradient transformation whose updates have the structure of the gradients. On GPU and TPU it also
        runs on skipped steps, with zeros in place of non-finite gradients, and its result is discarded. Gradients that
        it takes itself, as `optax.contrib.sam` with `opaque_mode=True` does, are not checked.
      scaler: the initial scaler, `dynamic()` by default.
      max_norm: the global norm to which the gradients are clipped before `inner`, as by `optax.clip_by_global_norm`.
        The norm is also the finiteness check, so a step is skipped if the sum of the squares exceeds 3.4e38.
      axis_name: the mapped axes over which devices combine their decisions, not their gradients, as in `all_finite`.
      norm_axis_name: the mapped axes along which each device holds a part of the gradients, as in hand-written FSDP;
        needed only where `axis_name` is. The squares are summed over these axes, so no gradient may be replicated.
      warn_after_skips: for training loops that do not return the optimizer state, which a `RunMonitor` reads: the
        number of skips after which to warn from inside the compiled program, at least 1. Each skip is judged as by
        `RunMonitor(max_consecutive_skips=warn_after_skips - 1)`, of which each earlier skip was a call. It also warns
        if a dynamic scale grows to a `max_scale` of 2^32 or more and no step was skipped because of its gradients,
        because the loss may be unscaled. Each device warns. A compiled program logs a warning that a filter turns into
        an error, because an error on one device would leave the others waiting.

    Returns:
      A gradient transformation, whose state is a `WithLossScalingState`. Call `tx.update(grads, opt_state, params,
      value=loss)`. `value=` is the unscaled loss; a step whose loss is not finite is skipped, and does not change the
      scale. On a skipped step the updates are -0.0, which change no parameter, except that a CPU flushes
      parameters below 2^-126 to zero, as in every addition. In `grad=`, which some optax transformations read, zeros
      replace non-finite values. `inner` sees float16 parameters as float32, the dtype of their gradients, unless it
      contains `with_master_params`.

    Raises:
      TypeError: an argument has the wrong type, `inner` contains another wrapper, has float16 numbers in its state
        beside `with_master_params`, or changes the types of its state, the loss is passed by position or as `loss=`,
        the parameters are gradients, a gradient or the loss is a partial sum, or a gradient is a `jax.Ref` or part of a
        scaler. From `tx.init`: `inner` needs arrays, and the parameters contain other leaves.
      ValueError: `max_norm` or `warn_after_skips` is out of range, an axis is not mapped, or a state is from a wrapper
        with `max_norm` and this one has none, or the reverse.

    Warns:
      UserWarning: the wrapper is inside `apply_if`; all parameters, or averages of gradients, are float16; `max_norm`
        clips micro-batches; the state is a constant of a compiled program; no loss has been scaled yet; a gradient is
        float16, still scaled, or unscaled by another scaler; the loss is a pair; devices would decide independently; or
        after `warn_after_skips`. Other mistakes, such as a clip outside of the wrapper, give no warning: run
        `jmpscale.testing.check_step` once.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(4.0))
    >>> opt_state = tx.init(jnp.array(1.0))
    >>> updates, opt_state = tx.update(jnp.array(jnp.inf), opt_state)
    >>> float(updates), float(opt_state.scaler.loss_scale)
    (-0.0, 2.0)
    """
    guards.created(inner, scaler, max_norm, warn_after_skips)
    initial = jax.tree.map(_copied, dynamic() if scaler is None else scaler)  # the caller may donate its arrays
    max_norm = None if max_norm is None else float(max_norm)
    monitor = None if warn_after_skips is None else CompiledMonitor(int(warn_after_skips))
    tx = with_extra_args(inner)

    def init(params: optax.Params) -> Any:
        register_with_flax()
        scaler = jax.tree.map(jnp.array, initial)
        with guards.initializing(params):
            inner_state = tx.init(params)
        if scaler.config.mode != "disabled" and any(map(_is_widened, jax.tree.leaves(params))):
            inner_state = tx.init(_as_seen_by_inner(params, inner_state))
        grad_norm = None if max_norm is None else jnp.zeros((), jnp.float32)
        state = WithLossScalingState(scaler, inner_state, grad_norm)
        guards.initialized(params, state)
        return state

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, *others: object, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        grads = updates
        loss = extra_args.get("value")
        guards.called(grads, state, params, others, extra_args, max_norm)
        scaler, norm, grad_norm, factor = state.scaler, None, None, None
        is_disabled = scaler.config.mode == "disabled"
        inner_params = params if is_disabled else _as_seen_by_inner(params, state.inner_state)
        if "grad" in extra_args and not is_disabled:  # by optax's convention, the same gradients
            extra_args["grad"] = zero_nonfinite(extra_args["grad"])
        if max_norm is not None:
            norm = global_norm(grads, axis_name, norm_axis_name)
            factor = jnp.where(norm > max_norm, max_norm / norm, 1)
            grad_norm = to_memory_of(state.grad_norm, norm.astype(jnp.float32))

        def update_inner(grads: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            if factor is not None:
                leaves, unflatten = flatten_gradients(grads)
                grads = unflatten(multiply_leaf(x, factor) for x in leaves)
            return tx.update(grads, inner_state, inner_params, **extra_args)

        if is_disabled:
            updates, inner_state = update_inner(grads, state.inner_state)
            return updates, WithLossScalingState(scaler, inner_state, grad_norm)

        guards.deciding(grads, params, scaler, loss, axis_name, norm_axis_name)
        decision_axes = _decision_axes(axis_name, norm_axis_name)
        finite, loss_finite = all_reduce_outcome(_is_finite(grads, norm), loss, decision_axes)
        # The gradients of a loss that is not finite may be finite, if a comparison hides the NaN from all of them.
        finite = finite if loss_finite is None else finite & loss_finite
        if monitor is not None:
            finite = monitor.watch(finite, scaler, adapt(scaler, finite, loss_finite))
        updates, inner_state = _update_if(finite, update_inner, grads, state.inner_state, inner_params)
        new_scaler = adapt(scaler, finite, loss_finite)
        guards.adapted(scaler, new_scaler, grads)
        return updates, WithLossScalingState(new_scaler, inner_state, grad_norm)

    return LossScalingTransformation(init, update)


def with_extra_args(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that accepts any extra argument and passes to `tx` only the arguments that `tx` takes.

    optax drops all of them for a transformation without extra arguments. For any other one, the signature decides:
    `optax.contrib.sam` takes `grad_fn=` alone, and `optax.MultiSteps` is not of optax's class.
    """
    is_of_optax = isinstance(tx, optax.GradientTransformation)
    if is_of_optax and not isinstance(tx, optax.GradientTransformationExtraArgs):
        return optax.with_extra_args_support(tx)
    # optax passes all arguments to its own class, so a decorator may read some that the decorated function lacks.
    parameters = inspect.signature(tx.update, follow_wrapped=not is_of_optax).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        passed_on = {name: value for name, value in extra_args.items() if takes_all or name in parameters}
        return tx.update(updates, state, params, **passed_on)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _copied(x: Any) -> Any:
    """Copies an array of a scaler, and converts a Python number to an array."""
    return x.copy() if is_array(x) else np.asarray(x, np.float32 if isinstance(x, float) else np.int32)


def _decision_axes(axis_name: AxisName, norm_axis_name: AxisName) -> AxisName:
    """Returns the axes over which decisions are combined: devices that hold parts of a gradient decide together."""
    parts = as_axes(norm_axis_name)
    named = manual_axes(typed=True) if axis_name is None else as_axes(axis_name)
    return tuple(dict.fromkeys([*named, *parts])) if parts else axis_name


def _as_seen_by_inner(params: PyTree, inner_state: PyTree) -> PyTree:
    """Converts parameters to the dtype of their gradients; otherwise optimizer states would change dtype.

    `with_master_params` sees them as they are: it finds out which of them need a copy, and converts them itself.
    """
    if find_instances(inner_state, WithMasterParamsState):
        return params
    return as_float32(params, _is_widened)


def _is_widened(param: Any) -> bool:
    """Tests whether the unscaled gradient of a parameter has a wider dtype."""
    return is_narrow(param) and unscaled_dtype(param.dtype) != param.dtype


def _is_finite(grads: PyTree, norm: jax.Array | None) -> jax.Array:
    """Tests the gradients on this device; their norm, if it is given, is finite only if every gradient is finite."""
    if norm is None:
        return all_finite_here(grads)
    in_norm, replace = flatten_gradients(grads)
    return jnp.isfinite(norm) & all_finite_here(replace(None for _ in in_norm))


# Unlike in apply_if, results may have other types: with ZeRO-1 the updates have other shardings than the gradients, and
# the optimizers of differential privacy average over a leading axis.
def _update_if(
    finite: jax.Array, update_inner: Callable[..., Any], grads: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new state if the gradients are finite, otherwise zeros and the old state."""
    # A Python number would bypass the gate and not become zero.
    grads = jax.tree.map(lambda x: as_array(x) if is_numeric(x) else x, grads)
    if not is_traced(finite) and not finite:  # inner may read values, so it is not called even to find the types
        like = params if structure(params) == structure(grads) else grads
        zeros = jax.tree.map(lambda grad, x: _negative_zeros(as_array(x)) if is_array(grad) else grad, grads, like)
        return zeros, state

    def step(before: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        updates, new_state = update_inner(*before)
        guards.inner_returned(grads, state, updates, new_state)
        return updates, new_state

    count = len(jax.tree.leaves(grads))

    def skip(like: list[Any], arrays: list[Any]) -> list[Any]:
        # Returns the gradients: zeros are selected below, so that XLA reuses the gradients' memory.
        pairs = zip(arrays[:count], _shared_negative_zeros(like[:count]), strict=True)
        return [grad if has_same_type(grad, zero) else zero for grad, zero in pairs] + arrays[count:]

    def sanitize(arrays: list[Any]) -> list[Any]:
        return zero_nonfinite(arrays[:count]) + arrays[count:]

    updates, state = gate(finite, step, (grads, state), skip, sanitize)
    if is_traced(finite):
        updates = jax.tree.map(lambda x: _zero_unless(finite, x) if is_array(x) else x, updates)
    return updates, state


def _negative_zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns -0.0 with the dtype, sharding and varying axes of `like`: x + -0.0 is x for every x, even for -0.0."""
    zero = complex(-0.0, -0.0) if jnp.issubdtype(like.dtype, np.complexfloating) else -0.0
    return full_like(like, zero if jnp.issubdtype(like.dtype, np.inexact) else 0)


def _shared_negative_zeros(like: list[Any]) -> list[Any]:
    """Returns `_negative_zeros` of each array, and None for None. Equal types share zeros: each takes time to trace."""
    types = [x if x is None or isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in like]
    zeros = {kind: None if x is None else _negative_zeros(x) for kind, x in dict(zip(types, like, strict=True)).items()}
    return [zeros[kind] for kind in types]


# Inlined, a jitted function adds the equations of its body: leaves of equal type share one trace.
@functools.partial(jax.jit, inline=True)
def _zero_unless(finite: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(finite, x, _negative_zeros(x))
