"""Guards of `with_master_params`."""

import jax

from jmpscale._base.marks import Mark, has_mark, mark, source_of
from jmpscale._base.text import describe, type_name
from jmpscale._base.tree import PyTree, find_instances, named_leaves
from jmpscale._base.types import is_half
from jmpscale._guards.checks import check_params, check_transformation, warn_if_gradients_are_narrow
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
    copies = jax.tree.leaves(jax.tree.map(lambda _, copy: copy is not None, params, state.master_params))
    for (path, param), has_copy in zip(named_leaves(params), copies, strict=True):
        if is_half(param) and not has_copy:
            raise TypeError(
                f"params{path} is {describe(param)}, but tx.init saw it in another dtype and made no float32 copy. "
                "Call tx.init with the parameters in the dtype in which they train."
            )
        if has_copy and not is_half(param):
            raise TypeError(
                f"params{path} must be bfloat16 or float16, as in tx.init, got {describe(param)}. Apply updates with "
                "optax.apply_updates, which keeps the dtype of parameters; or call tx.init again."
            )


def converted(updates: PyTree, grads: PyTree, state: WithMasterParamsState) -> None:
    if any(scaler.config.mode != "disabled" for scaler in find_instances(state, ScalerState)):
        warn_if_gradients_are_narrow(updates)
    for before, after in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        for kind in (Mark.GRADIENT, Mark.KNOWN_SCALE):
            if has_mark(kind, before):
                mark(kind, after, source_of(kind, before))
