"""The gate: a step is applied, or all values stay the same, bit for bit.

On CPU the gate is a branch, because a select costs a pass over the whole training state. On every other platform the
gate is a select, because XLA copies the values that pass through a branch, waits for the host to read the flag, and may
lose shardings. The form is chosen when JAX lowers the program for a platform.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar, TypeVarTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._base.check import check_flag, is_called_by, warn_user
from jmpscale._base.compat import full_like, varying_axes
from jmpscale._base.frameworks import imported
from jmpscale._base.marks import Mark, has_mark, source_of
from jmpscale._base.text import truncate, type_name
from jmpscale._base.tree import (
    PyTree,
    bit_pattern,
    check_no_nnx_objects,
    check_no_refs,
    find_instances,
    is_array,
    is_traced,
    named_leaves,
    structure,
)
from jmpscale._state import ScalerState

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_HARM = "a skipped step would not adjust its scale, and every later step would be skipped."


@overload
def apply_if(finite: ArrayLike, fn: Callable[[T], T], carry: T, /) -> T: ...
@overload
def apply_if(finite: ArrayLike, fn: Callable[[*Ts], tuple[*Ts]], /, *carry: *Ts) -> tuple[*Ts]: ...
def apply_if(finite: ArrayLike, fn: Callable[..., Any], /, *carry: object) -> object:
    """Applies a step if the gradients were finite; otherwise returns the carry unchanged, bit for bit.

    `fn` must be pure: a compiled program may also run it on a skipped step, as it always does on GPU and TPU, and
    discard its result. A skipped step has the derivative of the identity. In reverse mode this derivative may be NaN
    (0 * inf) unless `fn` replaces non-finite gradients before it uses them.

    Args:
      finite: bool[], from `all_finite` or `unscale_and_check`, alone or combined with other conditions.
      fn: the step, a function that takes the carry and returns it with the same structure, shapes and dtypes, such as
        the result of `optax_step`. It is traced once.
      *carry: pytrees of everything that a skipped step must not change: parameters, optimizer state, averages, batch
        statistics, step counts. Leaves that are not arrays bypass the gate. A Python number that `fn` changes becomes
        an array; any other object must not change.

    Returns:
      `fn(*carry) if finite else carry`, where `carry` is a tuple only if there is more than one value.

    Raises:
      TypeError: an argument has the wrong type; `fn` changes a structure, shape, dtype or sharding; or the carry is
        missing, or contains a Flax NNX object or a `jax.Ref`.
      ValueError: `finite` is not a scalar.

    Warns:
      UserWarning: `fn` returns a scaler that `update` has adjusted, or Flax NNX variables that are changed in place; or
        `finite` is the `step_applied` of a scaler that has been updated since.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.apply_if(jnp.array(False), lambda w, n: (w / 0, n + 1), jnp.array(2.0), jnp.array(5))
    (Array(2., dtype=float32, weak_type=True), Array(5, dtype=int32, weak_type=True))
    """
    flag = check_flag(finite)
    if has_mark(Mark.OLD_SCALE, source_of(Mark.FINITE, flag)):
        warn_user("finite is about an earlier step: step_applied was read before the update. Read it from the result.")
    if not callable(fn):
        raise TypeError(f"fn must be a function of the carry, got {type_name(fn)}. Call apply_if(finite, fn, *carry).")
    if not carry:
        raise TypeError("carry must hold at least one value, got none. Pass fn's arguments: apply_if(finite, fn, x).")
    check_no_refs(carry, "carry")
    check_no_nnx_objects(
        carry, "carry", "Gate the values: carry nnx.state(model), and write the result back with nnx.update."
    )

    def step(before: tuple[Any, ...]) -> tuple[Any, ...]:
        out = fn(*before)
        after = (out,) if len(carry) == 1 else out
        if not isinstance(after, tuple):
            raise TypeError(f"fn returned a {type_name(out)}, expected a tuple of {len(carry)} values: `return a, b`.")
        check_same_types(before, after)
        _warn_if_scaler_is_gated(flag, carry, after)
        _warn_if_changed_in_place(carry, after)
        return after

    result = gate(flag, step, carry)
    return result[0] if len(carry) == 1 else result


def warn_if_gated(name: str, remedy: str) -> None:
    """Warns if a function that adjusts a scale is called inside `apply_if`."""
    if is_called_by(lambda frame: frame.f_code is apply_if.__code__):
        warn_user(f"{name} is inside jmpscale.apply_if: {_HARM} {remedy}")


def _warn_if_scaler_is_gated(flag: jax.Array, carry: PyTree, after: PyTree) -> None:
    """Warns if the step returns a scaler of the carry as `update` has adjusted it, outside the step."""
    # A carry that keeps the state of the best step, or of the latest finite one, may receive an adjusted scaler. So the
    # flag must be about gradients, and the scaler must come from the carry's own, which only tracers show.
    if not has_mark(Mark.FINITE, flag):
        return
    old, new = ([scaler.loss_scale for scaler in find_instances(tree, ScalerState)] for tree in (carry, after))
    starts = {id(source_of(Mark.NEW_SCALE, x)) for x in old}
    changed = [x for x in new if has_mark(Mark.NEW_SCALE, x) and id(x) not in map(id, old)]
    if any(id(source_of(Mark.NEW_SCALE, x)) in starts for x in changed):
        warn_user(
            f"the carry contains a scaler, and fn changes it: {_HARM} Call jmpscale.update after apply_if, with the "
            "same flag, and keep the state of with_loss_scaling out of apply_if."
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


def gate(
    flag: jax.Array,
    step: Callable[[Any], Any],
    tree: Any,
    skip: Callable[[list[Any], list[Any]], list[Any]] = lambda like, arrays: arrays,
    sanitize: Callable[[list[Any]], list[Any]] = lambda arrays: arrays,
) -> Any:
    """Returns `step(tree)` if the flag is true, otherwise the tree; traces `step` once.

    `skip(like, arrays)` returns the arrays of the tree with the types of `like`, the new arrays or their
    `jax.ShapeDtypeStruct`s, because JAX requires equal types on both sides of a branch. `sanitize` returns arrays for a
    step whose result may be discarded. In these lists None stands for a leaf that bypasses the gate.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def combine(arrays: list[Any]) -> Any:
        return jax.tree.unflatten(treedef, [y if x is None else x for x, y in zip(arrays, leaves, strict=True)])

    def apply(arrays: list[Any]) -> list[Any]:
        pairs = zip(leaves, jax.tree.leaves(step(combine(arrays))), strict=True)
        return [None if not is_array(old) and _is_unchanged(old, new) else jnp.asarray(new) for old, new in pairs]

    arrays = [leaf if is_array(leaf) else None for leaf in leaves]
    if not is_traced(flag):
        return combine(apply(arrays)) if flag else tree
    apply_once = jax.jit(apply)  # both forms share one trace

    def originals(like: list[Any], arrays: list[Any]) -> list[Any]:
        triples = zip(like, arrays, leaves, strict=True)  # a Python number that the step changes becomes an array
        return skip(like, [full_like(new, leaf) if x is None and new is not None else x for new, x, leaf in triples])

    def branch(flag: jax.Array, arrays: list[Any]) -> list[Any]:
        like = jax.eval_shape(apply_once, arrays)
        return jax.lax.cond(flag, apply_once, functools.partial(originals, like), arrays)

    def select(flag: jax.Array, arrays: list[Any]) -> list[Any]:
        new = apply_once(sanitize(arrays))
        return jax.tree.map(functools.partial(_where, flag), new, originals(new, arrays))

    # JAX traces the forms for all platforms. It raises for a branch under jax.vmap on a mesh with Explicit axes, and
    # for a branch on a flag that varies over manual axes, because the results of a branch do not vary.
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types or varying_axes(flag):
        return combine(select(flag, arrays))
    return combine(jax.lax.platform_dependent(flag, arrays, cpu=branch, default=select))


def _where(flag: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    out = jnp.where(flag, new, old)
    # A select of scalars in host memory returns device memory.
    space = jax.typeof(old).memory_space
    return out if space == jax.typeof(out).memory_space else jax.device_put(out, space)


def check_same_structure(before: PyTree, after: PyTree, name: str, fn: str, remedy: str) -> None:
    """Raises if two trees differ in structure, and names the first difference."""
    if structure(before) != structure(after):
        old, new = ({path for path, _ in named_leaves(tree)} for tree in (before, after))
        if old == new:
            difference = f"the containers differ: {truncate(structure(before))} became {truncate(structure(after))}"
        else:
            path = min(old - new or new - old)
            difference = f"{name}{path} is only in its {'input' if path in old else 'output'}"
        raise TypeError(f"{fn} must return its {name} with the same structure, but {difference}. {remedy}")


def check_same_types(before: PyTree, after: PyTree, name: str = "carry", fn: str = "fn", remedy: str = "") -> None:
    """Raises if two trees differ in structure, shapes, dtypes or shardings, and names the first difference."""
    check_same_structure(before, after, name, fn, remedy or f"Return every value that {fn} takes, in the same order.")
    for (path, was), now in zip(named_leaves(before), jax.tree.leaves(after), strict=True):
        if not has_same_type(was, now):
            raise TypeError(
                f"{fn} must return its {name} with the same shapes, dtypes and shardings, but {name}{path} was "
                f"{_describe_type(was)} and is {_describe_type(now)}. {_type_remedy(was, now, fn)}"
            )


def is_numeric(leaf: object) -> TypeGuard[ArrayLike]:
    """Tests whether a leaf is an array or a Python number."""
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _strong_type(x: ArrayLike) -> tuple[object, ...]:
    """Returns the type of an array, without weak typing and without the mesh, which JAX 0.7 does not always know."""
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.sharding.spec, varying_axes(x), aval.memory_space


def _describe_type(leaf: object) -> str:
    return str(jax.typeof(leaf).strip_weak_type()) if is_numeric(leaf) else truncate(repr(leaf))


def _type_remedy(was: object, now: object, fn: str) -> str:
    if not (is_numeric(was) and is_numeric(now)):
        return "Only arrays and Python numbers may change; close over other objects."
    if jnp.result_type(was) == jnp.float16 and jnp.result_type(now) == jnp.float32:
        return (
            "Unscaled gradients of float16 parameters are float32: keep the parameters in float32, or create the state "
            "with tx.init(jmpscale.cast(params, jnp.float32))."
        )
    if jnp.result_type(was) != jnp.result_type(now):
        return f"Convert it with .astype in {fn}."
    return f"Reshape or reshard it in {fn}, move it to its memory space, or reduce gradients that vary over devices."


def has_same_type(was: object, now: object) -> bool:
    """Tests whether two arrays or numbers have the same type, and whether any other leaf is unchanged."""
    if _is_unchanged(was, now):  # perhaps an integer that is too large for an array
        return True
    return is_numeric(was) and is_numeric(now) and _strong_type(was) == _strong_type(now)


def _is_unchanged(was: object, now: object) -> bool:
    """Tests whether a leaf that is not an array is the same object or an equal one."""
    if was is now:
        return True
    if type(was) is not type(now) or is_array(now):
        return False
    if is_numeric(was):
        return repr(was) == repr(now)  # NaN equals NaN, and 0.0 differs from -0.0
    return bool(bit_pattern(was) == bit_pattern(now))
