"""What several guards and tools share: checks that raise, `check_*`, checks that warn, `warn_*`, a guard and a mark."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmpscale._base.axes import AxisName, as_axes, manual_axes
from jmpscale._base.compat import is_compiling, unreduced_axes
from jmpscale._base.frameworks import averages_of_gradients, is_optax_state
from jmpscale._base.marks import Mark, has_mark, mark, source_of, was_used
from jmpscale._base.text import cut_to_difference, describe, truncate, type_name, with_article
from jmpscale._base.tree import (
    PyTree,
    auxiliary_data,
    differing_nodes,
    find_instances,
    first_leaf,
    is_array,
    is_inexact,
    is_real_scalar,
    is_traced,
    named_leaves,
    structure,
)
from jmpscale._base.types import has_same_type, is_narrow, is_numeric, needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._state import ARRAY_FIELDS, ScalerConfig, ScalerState, WithLossScalingState, scale_of

inside_apply_if = contextvars.ContextVar("inside_apply_if", default=False)
HARM_INSIDE_GATE = "a skipped step would not adjust its scale, and every later step would be skipped."
_MULTI_STEPS = (  # its sum of gradients is reset by a multiplication by zero, and 0 * inf is NaN
    "with_loss_scaling is inside optax.MultiSteps: after one overflow its accumulated gradients stay NaN, and every "
    "later step is skipped. Place it outside: with_loss_scaling(optax.MultiSteps(tx, k)). If a training loop adds "
    "MultiSteps itself, turn its gradient accumulation off."
)
_APPLY_IF_FINITE = (
    "with_loss_scaling is inside optax.apply_if_finite, whose skips do not adjust the scale. Remove apply_if_finite: "
    "the wrapper skips steps itself."
)
_MASKED = (
    "with_loss_scaling is inside optax.masked or optax.partition: it neither checks nor skips the updates of the other "
    "parameters. Place it outside: with_loss_scaling(optax.masked(tx, mask))."
)
# The states of transformations that keep the wrapper from its work. The state of optax.partition has MaskedStates.
_OUTER = {optax.MultiStepsState: _MULTI_STEPS, optax.ApplyIfFiniteState: _APPLY_IF_FINITE, optax.MaskedState: _MASKED}


def only_scaler(tree: PyTree, name: str, remedy: str) -> ScalerState:
    """Returns the scaler of a tree; raises unless it is the only one. `remedy` is for trees without a scaler."""
    found = find_instances(tree, ScalerState)
    if len(found) == 1:
        return found[0]
    if found:
        remedy = (
            "A step has one scaler: wrap the whole optimizer once, with_loss_scaling(optax.chain(...)), or pass the "
            "part of the tree that contains the scaler of the step."
        )
    elif any(map(is_optax_state, jax.tree.leaves(tree, is_leaf=is_optax_state))):
        remedy = (
            "Its optimizer is not wrapped: create the state with jmpscale.with_loss_scaling(tx) in place of tx; in the "
            "functional API, pass the scaler instead."
        )
    raise ValueError(
        f"{name} must contain exactly one ScalerState, found {len(found)} in {with_article(type_name(tree))}. {remedy}"
    )


def check_scaler(scaler: object, name: str = "scaler", *, allow_batch: bool = False) -> None:
    """Raises unless `scaler` is a scaler, and not a batch, which would broadcast against the wrong axis."""
    if not isinstance(scaler, ScalerState):
        remedy = "Create one by jmpscale.dynamic(), or take it from a state by jmpscale.get_scaler."
        if is_real_scalar(scaler) or type(scaler) is int:
            number = float(scaler) if isinstance(scaler, (int, float)) else "scale"
            remedy = f"Pass jmpscale.static({number}), a fixed scale, or jmpscale.dynamic({number}), which adapts."
        raise TypeError(f"{name} must be a ScalerState, got {type_name(scaler)}. {remedy}")
    if not isinstance(scaler.config, ScalerConfig):
        raise TypeError(
            f"{name}.config must be a ScalerConfig, got {type_name(scaler.config)}. Restore a checkpoint into a state "
            "that jmpscale.dynamic, static or disabled has created."
        )
    if any(isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted() for x in jax.tree.leaves(scaler[:-1])):
        raise ValueError(
            f"{name} must hold values, got deleted arrays, which were donated to a compiled function. Use the scaler "
            "that this function returned."
        )
    if allow_batch:
        return
    if shape := getattr(scale_of(scaler), "shape", ()):
        raise ValueError(
            f"{name} must hold one scaler, got a batch with loss_scale of shape {shape}. Call this under jax.vmap; or, "
            f"on the host or if it is replicated, pass one scaler: jax.tree.map(lambda x: x[0], {name})."
        )
    for field, value in zip(ARRAY_FIELDS, scaler, strict=False):  # the settings come last
        kind = np.floating if field == "loss_scale" else np.integer
        dtype = getattr(value, "dtype", type(value))
        # Counters of 8 or 16 bits would wrap around.
        if getattr(value, "shape", ()) or not jnp.issubdtype(dtype, kind) or np.dtype(dtype).itemsize < 4:
            raise TypeError(
                f"{name}.{field} must be a scalar of {kind.__name__} dtype with at least 32 bits, got "
                f"{describe(value)}. Convert it, or restore a checkpoint into a state from jmpscale.dynamic."
            )


def warn_if_constant(scaler: ScalerState, values: PyTree, name: str = "scaler") -> None:
    """Warns if a compiled step, which traces `values`, has its scaler as a constant; the message calls it `name`."""
    if in_compiled_step(values) and not any(map(is_traced, jax.tree.leaves(scaler[:-1]))):
        warn_user(
            f"the {name} is a constant of the compiled program, so every call starts from the same one: the compiled "
            f"function creates the {name}, or closes over it. Create it outside, pass it to the compiled function as "
            "an argument, and return the new one. It is right only in the first step of a compiled function that is a "
            "whole training run: then ignore this, or take all steps in jax.lax.scan."
        )


def in_compiled_step(values: PyTree) -> bool:
    """Tests whether values are traced to compile a step that the program neither differentiates nor maps over a batch.

    Such a transformation traces values of a type of its own; a new array has the type of the program's values.
    """
    traced = [x for x in jax.tree.leaves(values) if is_traced(x)]
    return bool(traced) and is_compiling() and {type(x) for x in traced} == {type(jnp.zeros(()))}


def warn_if_nothing_is_scaled(scaler: ScalerState) -> None:
    """Warns about a step that adapts a dynamic scale, in a program that has not scaled a loss yet."""
    if scaler.config.mode == "dynamic" and not was_used(Mark.SCALED, Mark.GRADIENT):
        warn_user(
            "no loss has been scaled yet, so small gradients underflow in float16. Use jmpscale.value_and_grad, or "
            "wrap the loss function in jmpscale.scaled_backward. Without float16, use static(1.0)."
        )


def scales_only(loss_scale: jax.Array) -> bool:
    """Tests whether a loss that is differentiated was scaled by a loss scale, and nothing can have unscaled by it."""
    return has_mark(Mark.LOSS_SCALE, loss_scale) and not has_mark(Mark.READ_SCALE, loss_scale)


def mark_unread_scale(scaler: ScalerState) -> None:
    """Marks a scale that has only scaled, before a step reads and adapts it."""
    if scales_only(scale_of(scaler)):
        mark(Mark.UNREAD_SCALE, scale_of(scaler))


def warn_if_never_unscaled(scaler: ScalerState, function: str) -> None:
    """Warns if the gradients of a loss that this scaler has scaled reach `function`, and nothing has unscaled them.

    The user may know a static scale, and unscale by the number.
    """
    if scaler.config.mode == "dynamic" and scales_only(scale_of(scaler)):
        warn_user(
            f"a loss was scaled, but its gradients were not unscaled: unlike GradScaler.step of PyTorch, {function} "
            "does not unscale. Use jmpscale.value_and_grad, or call jmpscale.unscale_and_check with the same scaler "
            "before the optimizer."
        )


def mark_adapted(scaler: ScalerState, new: ScalerState, checked: object) -> None:
    """Marks the scales; for `checked`, a flag or the first gradient, `update` must not adapt the scale again."""
    if scaler.config.mode == "dynamic":
        old_scale, new_scale = scale_of(scaler), scale_of(new)
        mark(Mark.ADAPTED, checked, new_scale)
        mark(Mark.OLD_SCALE, old_scale)
        mark(Mark.NEW_SCALE, new_scale, source_of(Mark.NEW_SCALE, old_scale))
        mark(Mark.ADAPTED_SCALE, new_scale, old_scale)


def warn_about_narrow_loss(loss: jax.Array) -> None:
    """Warns about a loss whose dtype cannot hold large scales."""
    warn_user(
        f"the loss is {loss.dtype}, so the backward pass starts from the loss scale in {loss.dtype}, where large "
        "scales are infinite. Return it in float32: convert the model's output with .astype(jnp.float32)."
    )


def warn_if_loss_is_pair(loss: PyTree) -> None:
    if isinstance(loss, tuple) and len(loss) == 2 and has_mark(Mark.LOSS, loss[0]) and not is_real_scalar(loss[1]):
        warn_user("the loss must be given alone, got a pair of the loss and auxiliary data. Pass the first value.")


def warn_if_gradients_are_narrow(grads: PyTree, name: str = "updates") -> None:
    """Warns about unscaled gradients in float16, in which they underflow."""
    if found := first_leaf(grads, needs_wider_gradient):
        path, x = found
        warn_user(
            f"the gradients must be float32, got {describe(x)} at {name}{path}: unscaled gradients underflow. They "
            "were converted after the unscaling, or do not come from jmpscale.value_and_grad, which returns float32."
        )


def check_no_scaler(grads: PyTree) -> None:
    """Raises if the gradients contain the gradient of a scale: the optimizer would change the scale as well."""
    if any(is_inexact(scaler.loss_scale) for scaler in find_instances(grads, ScalerState)):
        raise TypeError("the gradients contain a ScalerState, which the optimizer would change. Keep it out of params.")


def warn_if_unsynchronized(axis_name: AxisName, other_axes: AxisName = ()) -> None:
    """Warns if devices would decide independently although the user has not requested it."""
    if axis_name is not None:
        return
    if missing := tuple(name for name in manual_axes(typed=False) if name not in as_axes(other_axes)):
        warn_user(
            f"each device decides independently whether its step was finite: along the mapped axes {missing} JAX's "
            "types do not show what differs between devices (jax.pmap, or check_vma=False). Pass "
            f"axis_name={missing!r} to combine the decisions, or axis_name=() if all devices hold the same values."
        )


def check_no_partial_sums(tree: PyTree, name: str = "tree") -> None:
    """Raises, naming the leaf, if the shards of a leaf have not been summed yet."""
    if found := first_leaf(tree, lambda leaf: is_inexact(leaf) and unreduced_axes(leaf)):
        path, leaf = found
        raise TypeError(
            f"the leaf at {name}{path} is a partial sum over the mesh axes {sorted(unreduced_axes(leaf))}. Reduce it "
            "first, with jax.lax.psum under jax.shard_map or jax.sharding.reshard under jax.jit."
        )


def check_transformation(tx: object, name: str, remedy: str) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"{name} must be an optax.GradientTransformation, got {type_name(tx)}. {remedy}")


def check_params(params: PyTree) -> None:
    """Raises if the parameters are gradients."""
    arrays = jax.tree.leaves(params)
    if arrays and all(has_mark(Mark.GRADIENT, x) for x in arrays):
        raise TypeError("params must be the parameters, got gradients. The arguments are (grads, state, params).")


@contextlib.contextmanager
def initializing(params: PyTree) -> Iterator[None]:
    """If an optimizer's `init` raises because a leaf of the parameters is not an array, names the leaf."""
    try:
        yield
    except TypeError as error:
        for path, leaf in named_leaves(params):
            if not (is_array(leaf) or isinstance(leaf, bool | int | float | complex)):
                raise TypeError(
                    f"params must contain only arrays, got {describe(leaf)} as params{path}. Omit other leaves, as "
                    "eqx.filter(model, eqx.is_inexact_array) does."
                ) from error
        raise


def check_not_wrapped(state: PyTree, name: str, remedy: str) -> None:
    """Raises if an optimizer has loss scaling already: a step has one scaler."""
    if find_instances(state, WithLossScalingState):
        raise TypeError(f"{name} must not contain with_loss_scaling, got a wrapped optimizer. {remedy}")


def warn_if_inside_another(state: PyTree) -> None:
    """Warns if an optimizer state shows that the wrapper is inside a transformation that keeps it from its work."""
    found = find_instances(state, tuple(_OUTER))

    def is_masked(x: object) -> TypeGuard[optax.MaskedState]:
        return isinstance(x, optax.MaskedState)

    has_wrapper = [bool(find_instances(tuple(x), WithLossScalingState)) for x in found]
    masked_states = [x.inner_state for x, outer in zip(found, has_wrapper, strict=True) if is_masked(x) and not outer]
    # The other parameters may be frozen, by optax.set_to_zero, which keeps no state.
    are_frozen = bool(masked_states) and all(isinstance(inner, optax.EmptyState) for inner in masked_states)
    for x in itertools.compress(found, has_wrapper):
        if not (are_frozen and is_masked(x)):
            warn_user(_OUTER[type(x)])


def states_beside_wrapper(tree: PyTree) -> list[PyTree]:
    """Returns the states of optax that are beside the state of the wrapper, as in `optax.chain`."""

    def parts(x: PyTree) -> list[PyTree]:
        return list(x.values()) if isinstance(x, dict) else list(x) if type(x) is tuple else []

    def is_chain(x: PyTree) -> bool:
        return any(isinstance(part, WithLossScalingState) for part in parts(x))

    chains = filter(is_chain, jax.tree.leaves(tree, is_leaf=is_chain))
    beside = [part for chain in chains for part in parts(chain) if not isinstance(part, WithLossScalingState)]
    return [part for part in beside if any(map(is_optax_state, jax.tree.leaves(part, is_leaf=is_optax_state)))]


def warn_if_averages_are_narrow(inner_state: PyTree) -> None:
    """Warns if an optimizer keeps averages of gradients in float16, in which small gradients underflow."""
    averages = filter(is_inexact, averages_of_gradients(inner_state))
    if any(jnp.result_type(x) == np.float16 for x in averages):
        warn_user("averages of gradients in float16 underflow. Change mu_dtype or accumulator_dtype to bfloat16.")


def warn_if_gated(name: str, remedy: str) -> None:
    """Warns if a function that adjusts a scale is called inside `apply_if`."""
    if inside_apply_if.get():
        warn_user(f"{name} is inside jmpscale.apply_if: {HARM_INSIDE_GATE} {remedy}")


def check_same_structure(before: PyTree, after: PyTree, name: str, fn: str, remedy: str) -> None:
    """Raises if two trees differ in structure, and names the first difference."""
    if structure(before) != structure(after):
        found = difference(before, after, name, "its input", "its output")
        raise TypeError(f"{fn} must return its {name} with the same structure, but {found}. {remedy}")


def check_same_types(before: PyTree, after: PyTree, name: str = "carry", fn: str = "fn", remedy: str = "") -> None:
    """Raises if two trees differ in structure, shapes, dtypes or shardings, and names the first difference."""
    check_same_structure(
        before, after, name, fn, remedy or f"Return every value that {fn} takes, in the same containers."
    )
    check_leaf_types(before, after, name, fn, root=name)


def check_leaf_types(before: PyTree, after: PyTree, name: str, fn: str, root: str) -> None:
    """Raises if leaves of two trees differ in shape, dtype or sharding; the path of a leaf follows `root`."""
    for (path, was), now in zip(named_leaves(before), jax.tree.leaves(after), strict=True):
        if not has_same_type(was, now):
            raise TypeError(
                f"{fn} must return its {name} with the same shapes, dtypes and shardings, but {root}{path} was "
                f"{describe_type(was)} and is {describe_type(now)}. {type_remedy(was, now, f' in {fn}')}"
            )


def difference(before: PyTree, after: PyTree, name: str, in_before: str, in_after: str) -> str:
    """Describes the first difference between the structures of two trees."""
    path, was, now = differing_nodes(before, after)
    place, kinds = f"{name}{path}", (_describe_kind(was), _describe_kind(now))
    if type(was) is type(now):
        old, new = ({own for own, _ in named_leaves(node)} for node in (was, now))
        if old != new:
            own = min(old - new or new - old)
            return f"{place}{own} is only in {in_before if own in old else in_after}"
        data = cut_to_difference(auxiliary_data(was), auxiliary_data(now))
        kinds = f"{kinds[0]} with {data[0]}", f"with {data[1]}"
    elif kinds[0] == kinds[1]:
        kinds = kinds[0], "of another class with this name"
    return f"{place or 'it'} is {kinds[0]} in {in_before} and {kinds[1]} in {in_after}"


def _describe_kind(node: PyTree) -> str:
    """Describes a node of a tree: the type of an array, None or another leaf as it is, or the class of a container."""
    is_container = node is not None and not jax.tree_util.all_leaves([node])
    return with_article(type_name(node)) if is_container else describe_type(node)


def describe_type(leaf: object) -> str:
    return str(jax.typeof(leaf).strip_weak_type()) if is_numeric(leaf) else truncate(repr(leaf))


def type_remedy(was: object, now: object, where: str = "") -> str:
    if not (is_numeric(was) and is_numeric(now)):
        return "Only arrays and Python numbers may change; close over other objects."
    if jnp.result_type(was) == jnp.float16 and jnp.result_type(now) == jnp.float32:
        return (
            "Unscaled gradients of float16 parameters are float32: keep the parameters in float32, or create the state "
            "with tx.init(jmpscale.cast(params, jnp.float32))."
        )
    if is_narrow(was) and is_inexact(now) and not is_narrow(now):  # an optimizer may mix the dtypes of parameters
        return f"Keep all parameters in float32, or convert it with .astype{where}."
    if jnp.result_type(was) != jnp.result_type(now):
        return f"Convert it with .astype{where}."
    return f"Reshape or reshard it{where}, move it to its memory space, or reduce gradients that vary over devices."
