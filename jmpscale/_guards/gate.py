"""Guards of `apply_if` and `select_tree`."""

import contextlib
from collections.abc import Iterator

import jax
from jax.typing import ArrayLike

from jmpscale._base.arguments import check_flag
from jmpscale._base.frameworks import imported
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import type_name, with_article
from jmpscale._base.tree import (
    PyTree,
    check_no_nnx_objects,
    check_no_refs,
    find_instances,
    named_leaves,
    structure,
)
from jmpscale._base.types import has_same_type
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import (
    HARM_INSIDE_GATE,
    check_same_types,
    describe_type,
    difference,
    inside_apply_if,
    type_remedy,
)
from jmpscale._state import ScalerState, scale_of


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
        raise TypeError(f"new must have the same structure as old, but {difference(old, new, '', 'old', 'new')}.")
    for (path, was), now in zip(named_leaves(old), jax.tree.leaves(new), strict=True):
        if not has_same_type(was, now):
            raise TypeError(
                f"new must have the same shapes, dtypes and shardings as old, but new{path} is {describe_type(now)} "
                f"and old{path} is {describe_type(was)}. {type_remedy(was, now)}"
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
    token = inside_apply_if.set(True)
    try:
        yield
    finally:
        inside_apply_if.reset(token)


def step_returned(flag: jax.Array, carry: tuple[PyTree, ...], before: tuple[PyTree, ...], after: object) -> None:
    """Checks the result of a step, a tuple; `before` is the carry as the step receives it."""
    if not isinstance(after, tuple):
        got = with_article(type_name(after))
        raise TypeError(f"fn returned {got}, expected a tuple of {len(carry)} values: `return a, b`.")
    check_same_types(before, after)
    _warn_if_scaler_is_gated(flag, carry, after, "the carry contains a scaler, and fn changes it")
    _warn_if_changed_in_place(carry, after)


def _warn_if_scaler_is_gated(flag: ArrayLike, carry: PyTree, after: PyTree, mistake: str) -> None:
    """Warns if the gated values contain a scaler of the carry as `update` has adjusted it, outside the gate."""
    # A carry that keeps the state of the best step, or of the latest finite one, may receive an adjusted scaler. So the
    # flag must be about gradients, and the scaler must come from the carry's own, which only tracers show.
    if not has_mark(Mark.FINITE, flag):
        return
    old, new = ([scale_of(scaler) for scaler in find_instances(tree, ScalerState)] for tree in (carry, after))
    starts = {id(source_of(Mark.NEW_SCALE, x)) for x in old}
    changed = [x for x in new if has_mark(Mark.NEW_SCALE, x) and id(x) not in map(id, old)]
    if any(id(source_of(Mark.NEW_SCALE, x)) in starts for x in changed):
        warn_user(
            f"{mistake}: {HARM_INSIDE_GATE} Call jmpscale.update after apply_if, with the same flag, and keep the "
            "state of with_loss_scaling out of apply_if and select_tree."
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
