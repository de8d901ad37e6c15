"""Checks of how an optimizer with loss scaling is built and called."""

import contextlib
import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmpscale._base.axes import AxisName, as_axes, check_no_partial_sums
from jmpscale._base.check import is_called_by, warn_user
from jmpscale._base.compat import varying_axes
from jmpscale._base.frameworks import averages_of_gradients
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, check_no_refs, find_instances, first_leaf, is_inexact
from jmpscale._gate import warn_if_gated
from jmpscale._scaler_of_tree import check_scaler
from jmpscale._scaling import needs_wider_gradient
from jmpscale._state import ScalerState, WithLossScalingState

# Functions of optax by what their transformations do.
_HIDE_OVERFLOWS = {"clip", "zero_nans", "scale_by_sign"}  # they replace infinity or NaN by finite numbers
_ACT_ON_SKIPS = {"add_decayed_weights", "add_noise", "reduce_on_plateau"}  # they change zeros, or count skipped steps
_RECORD = {"measure_with_ema", "monitor", "snapshot"}  # they only record values
_READ_NORMS = {"adaptive_grad_clip", "clip_by_block_rms", "clip_by_global_norm", "normalize", "scale_by_factored_rms"}
_READ_NORMS |= {"normalize_by_update_norm", "scale_by_muon", "scale_by_novograd", "scale_by_param_block_norm"}
_READ_NORMS |= {"scale_by_param_block_rms", "scale_by_trust_ratio"}


def check_transformation(tx: object, name: str, remedy: str) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"{name} must be an optax.GradientTransformation, got {type_name(tx)}. {remedy}")


def check_not_wrapped(state: PyTree, name: str, remedy: str) -> None:
    """Raises if an optimizer has loss scaling already: a step has one scaler."""
    if find_instances(state, WithLossScalingState):
        raise TypeError(f"{name} must not contain with_loss_scaling, got a wrapped optimizer. {remedy}")


def check_no_scaler(grads: PyTree) -> None:
    """Raises if the gradients contain the gradient of a scale: the optimizer would change the scale as well."""
    if any(is_inexact(scaler.loss_scale) for scaler in find_instances(grads, ScalerState)):
        raise TypeError("the gradients contain a ScalerState, which the optimizer would change. Keep it out of params.")


def check_update_arguments(
    grads: PyTree, state: object, params: PyTree, loss: PyTree, others: tuple[object, ...]
) -> WithLossScalingState:
    if others or has_mark(Mark.LOSS, grads):
        got = "another value by position" if others else "the loss in place of the gradients"
        raise TypeError(f"the arguments are tx.update(grads, state, params, value=loss), got {got}.")
    if not isinstance(state, WithLossScalingState):
        raise TypeError(
            f"state must be a WithLossScalingState, got {type_name(state)}. The arguments are (grads, state, params). "
            "Use the state of an unwrapped optimizer as tx.init(params)._replace(inner_state=...)."
        )
    check_scaler(state.scaler, "state.scaler")
    check_no_refs(grads, "updates")
    check_no_partial_sums(grads)
    check_no_scaler(grads)
    if has_mark(Mark.GRADIENT, params):
        warn_user("params must be the parameters, got gradients. The arguments are tx.update(grads, state, params).")
    if has_mark(Mark.GRADIENT, loss) and any(map(jnp.ndim, jax.tree.leaves(loss))):  # unscale returns losses, too
        warn_user("the loss must be the unscaled loss, got gradients. Pass value=loss.")
    return state


def check_norm_of_state(state: WithLossScalingState, max_norm: float | None) -> None:
    """Raises if the state is from a wrapper with `max_norm` and the wrapper is without it, or the reverse."""
    has_norm = bool(jax.tree.leaves(state.grad_norm))
    if has_norm != (max_norm is not None):
        expected, rule, got = ("None", "not set", "an array") if has_norm else ("an array", "set", "None")
        raise ValueError(
            f"state.grad_norm must be {expected} because max_norm is {rule}, got {got}. After restoring the state of a "
            "wrapper with another max_norm, call state._replace(grad_norm=tx.init(params).grad_norm)."
        )


def warn_if_unscaled_by_another(grads: PyTree, scaler: ScalerState) -> None:
    """Warns if the gradients come from a scaler that another optimizer has adapted already, not from this one.

    Any other difference proves nothing: this scaler may be a copy, on another device for example.
    """
    start = source_of(Mark.NEW_SCALE, scaler.loss_scale)
    scales = [source_of(Mark.GRADIENT, x) for x in jax.tree.leaves(grads)]
    adapted = [x for x in scales if has_mark(Mark.OLD_SCALE, x)]
    if scaler.config.mode == "dynamic" and any(source_of(Mark.NEW_SCALE, x) is not start for x in adapted):
        warn_user(
            "the gradients were unscaled by another scaler, so the scaler in state does not adapt to their overflows. "
            "Pass one state to jmpscale.value_and_grad and tx.update; for several optimizers, wrap one optax.partition."
        )


def warn_if_norm_is_local(grads: PyTree, loss: PyTree, axis_name: AxisName, inner: object) -> None:
    """Warns if each device uses the norm of its part of the gradients."""
    varying = _all_varying_axes(grads)
    named = varying if axis_name is None else set(as_axes(axis_name))
    # Devices that each train a model of their own may use its norm; they have losses of their own as well.
    shared = [] if loss is None else sorted(varying & named - _all_varying_axes(loss))
    if shared and (found := sorted(_READ_NORMS & _created_by(inner))):
        warn_user(
            f"optax.{found[0]} uses the norm of each device's own shard, because the gradients vary over the mesh axes "
            f"{shared}. To clip, use with_loss_scaling(tx, max_norm=...), which adds all squares; for other norms, "
            "call tx.update under jax.jit, outside of jax.shard_map."
        )


def _all_varying_axes(tree: PyTree) -> set[str]:
    return {axis for x in jax.tree.leaves(tree) if is_inexact(x) for axis in varying_axes(x)}


def warn_if_inside_another(params: optax.Params) -> None:
    """Warns if a transformation that contains the wrapper prevents it from skipping whole steps."""
    # MultiSteps resets its sum of gradients by multiplying it by zero, and 0 * inf is NaN.
    if is_called_by(lambda frame: frame.f_code is optax.MultiSteps.init.__code__):
        warn_user(
            "with_loss_scaling is inside optax.MultiSteps: after one overflow its accumulated gradients stay NaN, and "
            "every later step is skipped. Place it outside: with_loss_scaling(optax.MultiSteps(tx, k)). If a training "
            "loop adds MultiSteps itself, turn its gradient accumulation off."
        )
    # The user's own parameters may contain optax.MaskedNode, too.
    inside_masked = is_called_by(lambda frame: frame.f_globals.get("__name__") == optax.masked.__module__)
    if inside_masked and find_instances(params, optax.MaskedNode):
        warn_user(
            "with_loss_scaling is inside optax.masked or optax.partition: it neither checks nor skips the updates of "
            "the other parameters. Place it outside: with_loss_scaling(optax.masked(tx, mask))."
        )


def warn_if_misplaced() -> None:
    """Warns if a gate contains the wrapper, or a chain separates it from transformations that it should skip."""
    warn_if_gated("with_loss_scaling", "The wrapper skips steps itself: call tx.update without apply_if.")
    update = "apply_if_finite.<locals>.update"
    module = optax.apply_if_finite.__module__
    if is_called_by(lambda x: x.f_code.co_qualname == update and x.f_globals.get("__name__") == module):
        warn_user(
            "with_loss_scaling is inside optax.apply_if_finite, whose skips do not adjust the scale. Remove "
            "apply_if_finite: the wrapper skips steps itself."
        )
    if is_called_by(lambda frame: any(_is_unsafe(*x, _HIDE_OVERFLOWS) for x in _neighbors(frame)[0])):
        warn_user(
            "with_loss_scaling comes after a transformation that replaces infinity or NaN in the gradients, such as "
            "optax.clip, or keeps them in its state, such as optax.scale_by_adam: overflows are applied, or all later "
            "steps are skipped. Place it inside: with_loss_scaling(optax.chain(optax.clip(1.0), tx))."
        )
    if is_called_by(lambda frame: any(_is_unsafe(*x, _ACT_ON_SKIPS) for x in _neighbors(frame)[1])):
        warn_user(
            "with_loss_scaling comes before a transformation that acts on skipped steps too, such as optax.ema or "
            "optax.add_decayed_weights. Place it inside: with_loss_scaling(optax.chain(tx, optax.ema(0.9)))."
        )


def warn_if_gradients_are_narrow(grads: PyTree, name: str = "updates") -> None:
    """Warns about gradients in float16, in which true units underflow."""
    if found := first_leaf(grads, needs_wider_gradient):
        path, x = found
        warn_user(
            f"the gradients must be float32, got {describe(x)} at {name}{path}: in true units they underflow. They "
            "were converted after the unscaling, or do not come from jmpscale.value_and_grad, which returns float32."
        )


def warn_if_narrow(params: PyTree, inner_state: PyTree) -> None:
    """Warns if all parameters are float16, or if averages of gradients are."""
    arrays = list(filter(is_inexact, jax.tree.leaves(params)))
    if arrays and all(map(needs_wider_gradient, arrays)):  # a float16 parameter among others may be frozen
        warn_user(
            "the parameters are float16, in which small updates are rounded away. Keep them in float32, and use "
            "jmpscale.autocast or convert them in the loss function, unless the optimizer keeps float32 copies."
        )
    warn_if_averages_are_narrow(inner_state)


def warn_if_averages_are_narrow(inner_state: PyTree) -> None:
    """Warns if an optimizer keeps averages of gradients in float16, in which small gradients underflow."""
    averages = filter(is_inexact, averages_of_gradients(inner_state))
    if any(jnp.result_type(x) == np.float16 for x in averages):
        warn_user("averages of gradients in float16 underflow. Change mu_dtype or accumulator_dtype to bfloat16.")


def warn_if_micro_batches_are_clipped(inner_state: PyTree) -> None:
    if find_instances(inner_state, optax.MultiStepsState):
        warn_user(
            "max_norm clips the gradients of each micro-batch, because inner contains optax.MultiSteps. To clip their "
            "mean, place the clip inside: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), tx), k)."
        )


def warn_if_loss_is_misspelled(arguments: Mapping[str, object], inner: object) -> None:
    """Warns if the name of an extra argument resembles `loss` or `value`, and no transformation reads it."""
    if "loss" in arguments or "value" in arguments or not isinstance(inner, tuple):
        return
    for name in (name for name, x in arguments.items() if not callable(x)):
        is_similar = "loss" in name.lower().split("_") or difflib.get_close_matches(name, ["loss", "value"], cutoff=0.8)
        # A function reads the argument if it has a parameter of this name, or contains the name as a string.
        codes = (fn.__code__ for fn in _functions_in(inner))
        if is_similar and not any(name in (*code.co_varnames, *code.co_consts) for code in codes):
            warn_user(
                f"the extra argument {name!r} of tx.update is ignored, because no transformation takes it. Pass the "
                "unscaled loss as value= or loss=, so that a non-finite loss does not reduce the scale."
            )


def _neighbors(frame: types.FrameType) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Returns the states and updates that a chain of optax has called before the wrapper, and those after it."""
    local = frame.f_locals if frame.f_globals.get("__name__") == optax.chain.__module__ else {}
    transformations: list[tuple[Any, Any]]
    if set(local) >= {"new_state", "state", "update_fns"}:
        transformations = list(zip(local["state"], local["update_fns"], strict=False))
    elif set(local) >= {"new_state", "state", "transforms"}:  # optax.named_chain
        transformations = [(local["state"][name], tx) for name, tx in local["transforms"]]
    else:
        return [], []
    called = len(local["new_state"])
    return transformations[:called], transformations[called + 1 :]


def _is_unsafe(state: PyTree, update: object, names: set[str]) -> bool:
    """Tests whether a transformation comes from one of these optax functions, or keeps averages."""
    created_by = _created_by(update)
    has_averages = any(is_inexact(x) and jnp.ndim(x) > 0 for x in jax.tree.leaves(state))
    return (has_averages and created_by.isdisjoint(_RECORD)) or not created_by.isdisjoint(names)


def _created_by(transformation: object) -> set[str]:
    """Returns the names of the functions of optax that created a transformation, such as `clip`."""
    functions = [fn for fn in _functions_in([transformation]) if fn.__module__.startswith("optax.")]
    return {fn.__qualname__.partition(".")[0] for fn in functions}


def _functions_in(values: Iterable[object]) -> Iterator[types.FunctionType]:
    """Yields functions, and the functions in their closures, such as the updates that an `optax.chain` calls."""
    stack, seen = list(values), set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (tuple, list, dict)):  # a transformation is a named tuple of functions
            stack += value.values() if isinstance(value, dict) else value
        elif isinstance(value, types.FunctionType):
            yield value
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # the variable has no value
                    stack.append(cell.cell_contents)
