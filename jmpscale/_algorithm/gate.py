"""The gate: a step is applied, or all values stay the same, bit for bit.

On CPU the gate is a branch, because a select costs a pass over the whole training state. On every other platform the
gate is a select, because XLA copies the values that pass through a branch, waits for the host to read the flag, and may
lose shardings. The form is chosen when JAX lowers the program for a platform.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._base.compat import full_like, varying_axes
from jmpscale._base.memory import is_on_host, to_memory_of
from jmpscale._base.tree import as_array, is_array, is_traced
from jmpscale._base.types import is_unchanged
from jmpscale._guards import gate as guards

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@overload
def apply_if(finite: ArrayLike, fn: Callable[[T], T], carry: T, /) -> T: ...
@overload
def apply_if(finite: ArrayLike, fn: Callable[[*Ts], tuple[*Ts]], /, *carry: *Ts) -> tuple[*Ts]: ...
def apply_if(finite: ArrayLike, fn: Callable[..., Any], /, *carry: object) -> object:
    """Applies a step if its loss and gradients are finite; otherwise returns the carry unchanged, bit for bit.

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
    guards.called(finite, fn, carry)
    flag = jnp.asarray(finite)

    def step(before: tuple[Any, ...]) -> tuple[Any, ...]:
        with guards.step_running():
            out = fn(*before)
        after = (out,) if len(carry) == 1 else out
        guards.step_returned(flag, carry, before, after)
        return after

    result = gate(flag, step, carry)
    return result[0] if len(carry) == 1 else result


def select_tree(finite: ArrayLike, new: T, old: T) -> T:
    """Returns new values if the loss and the gradients of a step are finite, otherwise the old values, bit for bit.

    It is `apply_if` for values that have been computed already, such as batch statistics or metrics.

    Args:
      finite: bool[], as in `apply_if`: from `all_finite`, or the `step_applied` of the scaler that the step returns.
      new: pytree of the values after the step.
      old: pytree of the values before the step, with the same structure, shapes and dtypes.

    Returns:
      `new if finite else old`.

    Raises:
      TypeError: the flag is not a boolean, the types of `new` and `old` differ, or one of them contains a Flax NNX
        object or a `jax.Ref`.
      ValueError: `finite` is not a scalar.

    Warns:
      UserWarning: `new` contains a scaler that `update` has adjusted; or `finite` is the `step_applied` of a scaler
        that has been updated since.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> jmpscale.select_tree(jnp.array(False), {"mean": jnp.array(jnp.nan)}, {"mean": jnp.array(1.5)})
    {'mean': Array(1.5, dtype=float32, weak_type=True)}
    """
    guards.select_called(finite, new, old)
    return gate(jnp.asarray(finite), lambda _: new, old)


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
        return [None if not is_array(old) and is_unchanged(old, new) else as_array(new) for old, new in pairs]

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

    if _needs_select(flag, arrays):
        return combine(select(flag, arrays))
    return combine(jax.lax.platform_dependent(flag, arrays, cpu=branch, default=select))


def _needs_select(flag: jax.Array, arrays: list[Any]) -> bool:
    """Tests whether JAX raises for a branch; it traces the forms for all platforms.

    It raises under jax.vmap on a mesh with Explicit axes; for a flag that varies over manual axes, because the results
    of a branch do not vary; and for scalars in the memory of the host, whose memory space a step may lose.
    """
    is_explicit = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return is_explicit or bool(varying_axes(flag)) or any(is_on_host(x) for x in arrays if x is not None)


def _where(flag: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return to_memory_of(old, jnp.where(flag, new, old))
