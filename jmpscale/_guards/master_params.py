"""Guards of `with_master_params`."""

import jax

from jmpscale._base.marks import Mark, has_mark, mark, source_of
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, find_instances, named_leaves
from jmpscale._base.types import is_half
from jmpscale._guards.checks import (
    check_params,
    check_transformation,
    warn_if_gradients_are_narrow,
)
from jmpscale._guards.checks import initializing as initializing  # a guard of both wrappers
from jmpscale._state import ScalerState, WithMasterParamsState


def created(inner: object) -> None:
    check_transformation(inner, "inner", "Pass an optimizer, such as optax.adamw(1e-3).")


def called(state: object, params: PyTree) -> None:
    if not isinstance(state, WithMasterParamsState):
        raise TypeError(
            f"state must be from the init of with_master_params, got {type_name(state)}. The arguments are (grads, "
            "state, params). Continue the state of an unwrapped optimizer as tx.init(params)._replace(inner_state=...)."
        )
    if params is None:
        raise TypeError("params must be the parameters, got None. Call tx.update(grads, state, params).")
    check_params(params)
    _check_dtypes(params, state.master_params)


def converted(updates: PyTree, grads: PyTree, state: WithMasterParamsState) -> None:
    if any(scaler.config.mode != "disabled" for scaler in find_instances(state, ScalerState)):
        warn_if_gradients_are_narrow(updates)
    for before, after in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        for kind in (Mark.GRADIENT, Mark.KNOWN_SCALE):
            if has_mark(kind, before):
                mark(kind, after, source_of(kind, before))


def _check_dtypes(params: PyTree, copies: PyTree) -> None:
    """Raises if a parameter has been converted since `tx.init`, so that it needs a copy or has one in excess."""
    has_copy = jax.tree.leaves(jax.tree.map(lambda _, copy: copy is not None, params, copies))
    if has_copy == [is_half(param) for param in jax.tree.leaves(params)]:
        return  # finding the paths of a large tree takes longer
    named = zip(named_leaves(params), has_copy, strict=True)
    path, param = next(leaf for leaf, flag in named if is_half(leaf[1]) != flag)
    if is_half(param):
        raise TypeError(
            f"params{path} must have the dtype that it had in tx.init, where it got no float32 copy, got "
            f"{describe(param)}. Call tx.init with the parameters in the dtypes in which they train."
        )
    raise TypeError(
        f"params{path} must be bfloat16 or float16, as it was in tx.init, got {describe(param)}. Apply updates by "
        "optax.apply_updates, which keeps the dtypes of parameters; if the parameters are float32 now, call tx.init."
    )
