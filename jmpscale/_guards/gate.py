"""Guards of `apply_if`, and of the functions that must not be called inside it."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._base.arguments import check_flag
from jmpscale._base.frameworks import imported
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import truncate, type_name
from jmpscale._base.tree import (
    PyTree,
    check_no_nnx_objects,
    check_no_refs,
    find_instances,
    named_leaves,
    structure,
)
from jmpscale._base.types import has_same_type, is_numeric
from jmpscale._base.warn import warn_user
from jmpscale._state import ScalerState

_inside_apply_if = contextvars.ContextVar("inside_apply_if", default=False)
_HARM = "a skipped step would not adjust its scale, and every later step would be skipped."


def called(finite: ArrayLike, fn: object, carry: tuple[PyTree, ...]) -> None:
    _check_flag_of_this_step(finite)
    if not callable(fn):
        raise TypeError(f"fn must be a function of the carry, got {type_name(fn)}. Call apply_if(finite, fn, *carry).")
    if not carry:
        raise TypeError("carry must hold at least one value, got none. Pass fn's arguments: apply_if(finite, fn, x).")
    _check_no_references(carry, "carry", "Gate the values: carry")


def select_called(finite: ArrayLike, new: PyTree, old: PyTree) -> None:
    _check_flag_of_this_step(finite)
    for name, tree in (("new", new), ("old", old)):
        _check_no_references(tree, name, "Select values: pass")
    if structure(new) != structure(old):
        raise TypeError(f"new must have the same structure as old, but {_difference(old, new, '', 'old', 'new')}.")
    for (path, was), now in zip(named_leaves(old), jax.tree.leaves(new), strict=True):
        if not has_same_type(was, now):
            raise TypeError(
                f"new must have the same shapes, dtypes and shardings as old, but new{path} is {_describe_type(now)} "
                f"and old{path} is {_describe_type(was)}. {_type_remedy(was, now)}"
            )
    _warn_if_scaler_is_gated(finite, old, new, "new contains a scaler that update has adjusted")


def _check_flag_of_this_step(finite: ArrayLike) -> None:
    check_flag(finite)
    if has_mark(Mark.OLD_SCALE, source_of(Mark.FINITE, finite)):
        warn_user("finite is about an earlier step: step_applied was read before the update. Read it from the result.")


def _check_no_references(tree: PyTree, name: str, remedy: str) -> None:
    check_no_refs(tree, name)
    check_no_nnx_objects(tree, name, f"{remedy} nnx.state(model), and write the result back with nnx.update.")


@contextlib.contextmanager
def step_running() -> Iterator[None]:
    token = _inside_apply_if.set(True)
    try:
        yield
    finally:
        _inside_apply_if.reset(token)


def step_returned(flag: jax.Array, carry: tuple[PyTree, ...], before: tuple[PyTree, ...], after: object) -> None:
    """Checks the result of a step, a tuple; `before` is the carry as the step receives it."""
    if not isinstance(after, tuple):
        raise TypeError(f"fn returned a {type_name(after)}, expected a tuple of {len(carry)} values: `return a, b`.")
    check_same_types(before, after)
    _warn_if_scaler_is_gated(flag, carry, after, "the carry contains a scaler, and fn changes it")
    _warn_if_changed_in_place(carry, after)


def warn_if_gated(name: str, remedy: str) -> None:
    """Warns if a function that adjusts a scale is called inside `apply_if`."""
    if _inside_apply_if.get():
        warn_user(f"{name} is inside jmpscale.apply_if: {_HARM} {remedy}")


def _warn_if_scaler_is_gated(flag: ArrayLike, carry: PyTree, after: PyTree, mistake: str) -> None:
    """Warns if the gated values contain a scaler of the carry as `update` has adjusted it, outside the gate."""
    # A carry that keeps the state of the best step, or of the latest finite one, may receive an adjusted scaler. So the
    # flag must be about gradients, and the scaler must come from the carry's own, which only tracers show.
    if not has_mark(Mark.FINITE, flag):
        return
    old, new = ([scaler.loss_scale for scaler in find_instances(tree, ScalerState)] for tree in (carry, after))
    starts = {id(source_of(Mark.NEW_SCALE, x)) for x in old}
    changed = [x for x in new if has_mark(Mark.NEW_SCALE, x) and id(x) not in map(id, old)]
    if any(id(source_of(Mark.NEW_SCALE, x)) in starts for x in changed):
        warn_user(
            f"{mistake}: {_HARM} Call jmpscale.update after apply_if, with the same flag, and keep the state of "
            "with_loss_scaling out of apply_if and select_tree."
        )


def _warn_if_changed_in_place(carry: PyTree, after: PyTree) -> None:
    """Warns if the step returns variables of Flax NNX that are in the carry, where they have changed as well."""
    # If the step also returns other values, those may be the new ones, and the variables the old ones.
    variable = imported("flax.nnx", "Variable")
    variables = {id(x) for x in find_instances(carry, variable)}
    leaves = jax.tree.leaves(after, is_leaf=lambda x: isinstance(x, variable))
    if leaves and variables.issuperset(map(id, leaves)):
        warn_user(
            "fn returns the Flax NNX variables of the carry themselves, which the step has changed in place, so a "
            "skipped step is not undone. Copy them before the step: old = nnx.clone(nnx.state(model))."
        )


def check_same_structure(before: PyTree, after: PyTree, name: str, fn: str, remedy: str) -> None:
    """Raises if two trees differ in structure, and names the first difference."""
    if structure(before) != structure(after):
        difference = _difference(before, after, name, "its input", "its output")
        raise TypeError(f"{fn} must return its {name} with the same structure, but {difference}. {remedy}")


def _difference(before: PyTree, after: PyTree, name: str, in_before: str, in_after: str) -> str:
    """Describes the first difference between the structures of two trees."""
    old, new = ({path for path, _ in named_leaves(tree)} for tree in (before, after))
    if old == new:
        return f"the containers differ: {truncate(structure(before))} became {truncate(structure(after))}"
    path = min(old - new or new - old)
    return f"{name}{path} is only in {in_before if path in old else in_after}"


def check_same_types(before: PyTree, after: PyTree, name: str = "carry", fn: str = "fn", remedy: str = "") -> None:
    """Raises if two trees differ in structure, shapes, dtypes or shardings, and names the first difference."""
    check_same_structure(before, after, name, fn, remedy or f"Return every value that {fn} takes, in the same order.")
    check_leaf_types(before, after, name, fn, root=name)


def check_leaf_types(before: PyTree, after: PyTree, name: str, fn: str, root: str) -> None:
    """Raises if leaves of two trees differ in shape, dtype or sharding; the path of a leaf follows `root`."""
    for (path, was), now in zip(named_leaves(before), jax.tree.leaves(after), strict=True):
        if not has_same_type(was, now):
            raise TypeError(
                f"{fn} must return its {name} with the same shapes, dtypes and shardings, but {root}{path} was "
                f"{_describe_type(was)} and is {_describe_type(now)}. {_type_remedy(was, now, f' in {fn}')}"
            )


def _describe_type(leaf: object) -> str:
    return str(jax.typeof(leaf).strip_weak_type()) if is_numeric(leaf) else truncate(repr(leaf))


def _type_remedy(was: object, now: object, where: str = "") -> str:
    if not (is_numeric(was) and is_numeric(now)):
        return "Only arrays and Python numbers may change; close over other objects."
    if jnp.result_type(was) == jnp.float16 and jnp.result_type(now) == jnp.float32:
        return (
            "Unscaled gradients of float16 parameters are float32: keep the parameters in float32, or create the state "
            "with tx.init(jmpscale.cast(params, jnp.float32))."
        )
    if jnp.result_type(was) != jnp.result_type(now):
        return f"Convert it with .astype{where}."
    return f"Reshape or reshard it{where}, move it to its memory space, or reduce gradients that vary over devices."
