"""The gate: a step happens, whole, or everything stays as it was, bit for bit.

Which form the gate takes is decided by the platform that a program is lowered for: a branch on CPU, where a select
costs a pass over everything; a select on all others, where XLA copies whatever goes through a branch, waits for the
host to read the flag, and may lose shardings.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, cast, overload

import jax
import jax.core
import jax.numpy as jnp

from jmpscale._scaling import require_flag
from jmpscale._state import shortened
from jmpscale._tree import is_array, named_leaves, partition

Carry = TypeVar("Carry")
Carries = TypeVarTuple("Carries")


@overload
def apply_if(finite: Any, fn: Callable[[Carry], Carry], carry: Carry, /) -> Carry: ...
@overload
def apply_if(finite: Any, fn: Callable[[*Carries], tuple[*Carries]], /, *carry: *Carries) -> tuple[*Carries]: ...
def apply_if(finite: Any, fn: Callable[..., Any], /, *carry: Any) -> Any:
    """Takes a step if the gradients were finite, else leaves everything as it was, bit for bit.

    `fn(*carry) if finite else carry`. On CPU that is a branch, and a skipped step costs nothing. On GPU, TPU and all
    other platforms `fn` always runs and its result is selected or thrown away, which costs nothing on a step that is
    taken: there `fn` must not rely on being left out, so no callbacks with effects, and no `while_loop` that only ends
    for finite values. Outside `jax.jit`, where the flag is known, it is a plain Python `if`. A derivative through a
    skipped step is that of the identity; in reverse mode JAX makes it NaN where it meets an infinite gradient on its
    way on, unless the gradients are made finite before `fn` uses them.

    Args:
      finite: bool[], from `unscale_and_check`; combine it with a predicate of your own as you like.
      fn: takes the carry and returns it changed, with the same structure, shapes and dtypes; traced once. `optax_step`
        makes the usual one.
      *carry: pytrees: all that a skipped step must not move, such as parameters, optimizer state, averages, batch
        statistics, step counts. Leaves that are not arrays go around the gate. Those that are no numbers must not
        change; a Python number that `fn` hands back unchanged stays the same object, a changed one becomes an array.

    Returns:
      The new carry: one value for one carry, a tuple for several.

    Raises:
      TypeError: `finite` is not a boolean, `fn` not a function, there is no carry or it holds a Flax NNX object, or
        `fn` changes a structure, shape, dtype or sharding.
      ValueError: `finite` is not a scalar.

    >>> apply_if(jnp.array(False), lambda w, n: (w / 0, n + 1), jnp.array(2.0), jnp.array(5))
    (Array(2., dtype=float32, weak_type=True), Array(5, dtype=int32, weak_type=True))
    """
    flag = require_flag(finite)
    if not callable(cast(object, fn)):
        raise TypeError(
            f"fn must be a function of the carry, got {type(fn).__name__}. Pass the function itself, then what it "
            "takes: apply_if(finite, fn, *carry)."
        )
    if not carry:
        raise TypeError("apply_if needs at least one carry after fn: the values that fn changes and a skip keeps.")
    refuse_nnx_objects(carry, "carry", "Use nnx.cond(finite, step, skip, ...), or pass nnx.state(...) of it.")
    if not isinstance(flag, jax.core.Tracer) and not flag:
        return carry[0] if len(carry) == 1 else carry
    leaves, treedef = cast(tuple[list[Any], Any], jax.tree.flatten(carry))
    moving = [i for i, leaf in enumerate(leaves) if is_array(leaf)]  # and, once fn is traced, the numbers it changes

    def put(arrays: list[Any]) -> Any:
        now = dict(zip(moving, arrays, strict=False))
        return jax.tree.unflatten(treedef, [now.get(i, leaf) for i, leaf in enumerate(leaves)])

    def step(arrays: list[Any]) -> list[Any]:
        before = put(arrays)
        out = fn(*before)
        after: Any = (out,) if len(carry) == 1 else out
        require_same(before, after)
        new = jax.tree.leaves(after)
        moving.extend(i for i, leaf in enumerate(leaves) if not (is_array(leaf) or _equal(leaf, new[i])))
        return [jnp.asarray(new[i]) for i in moving]

    def skip(like: list[Any], arrays: list[Any]) -> list[Any]:
        changed = zip(like[len(arrays) :], moving[len(arrays) :], strict=True)
        return [*arrays, *(jax.lax.full_like(x, leaves[i]) for x, i in changed)]

    result = put(gate(cast(Any, flag), step, skip, [leaves[i] for i in moving]))
    return result[0] if len(carry) == 1 else result


def gate(
    flag: jax.Array,
    step: Callable[..., Any],
    skip: Callable[..., Any],
    *operands: Any,
    prepare: Callable[..., Any] | None = None,
    on_cpu: Any = jax.lax.cond,
) -> Any:
    """Returns the step's result if the flag is true, else `skip(like, *operands)`; `step` is traced once.

    Args:
      flag: bool[], the same on all devices.
      step: takes what `prepare` returns, and returns a pytree of arrays.
      skip: returns the same structure and types; `like` is the abstract result of the step, `jax.ShapeDtypeStruct`s.
      *operands: pytrees of arrays; all else goes into the closures.
      prepare: `prepare(in_vain, *operands)` makes what the step takes; `in_vain` tells that it may run on what is not
        finite, and be thrown away.
      on_cpu: the form of the gate on CPU, called like `jax.lax.cond`; None: a select there, too.
    """
    traced = isinstance(flag, jax.core.Tracer)
    once: Any = jax.jit(step) if traced else step

    def run(in_vain: bool, *operands: Any) -> Any:
        return once(*(prepare(in_vain, *operands) if prepare else operands))

    chosen, always = functools.partial(run, False), functools.partial(run, True)
    if not traced:
        return chosen(*operands) if flag else skip(jax.eval_shape(chosen, *operands), *operands)
    skip = functools.partial(skip, jax.eval_shape(chosen, *operands))

    def branch(flag: jax.Array, *operands: Any) -> Any:
        return on_cpu(flag, chosen, skip, *operands)

    def elsewhere(flag: Any, *operands: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, flag), always(*operands), skip(*operands))

    if on_cpu is None:
        return elsewhere(flag, *operands)
    return cast(Any, jax.lax.platform_dependent(flag, *operands, cpu=branch, default=elsewhere))


def refuse_nnx_objects(tree: Any, name: str, remedy: str) -> None:
    """Raises for objects that change in place: what is returned would be copies, and those that came in stay behind."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    kind = nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object

    def is_object(node: Any) -> bool:
        return isinstance(node, kind)

    if found := partition(tree, is_object, is_leaf=is_object)[0]:
        raise TypeError(
            f"{name} must hold values, got a Flax NNX {type(found[0]).__name__}, which changes in place: what happens "
            f"to it in here would not be seen outside. {remedy}"
        )


def require_same(before: Any, after: Any, name: str = "carry", fn: str = "fn", remedy: str = "") -> None:
    """Raises, naming the first place that differs, unless `fn` returned what it was given, other values aside."""
    old, new = dict(named_leaves(before)), dict(named_leaves(after))
    structures = cast(tuple[Any, Any], (jax.tree.structure(before), jax.tree.structure(after)))
    if structures[0] != structures[1]:
        differing = [f"{name}{path} is only in its input" for path in old if path not in new]
        differing += [f"{name}{path} is only in its output" for path in new if path not in old]
        raise TypeError(
            f"{fn} must return its {name} with the same structure, but {(differing or ['the containers differ'])[0]}: "
            f"{shortened(structures[0])} went in and {shortened(structures[1])} came out. "
            + (remedy or f"Return all that {fn} was given, changed, in the same order.")
        )
    for path, leaf in old.items():
        if not _equal(leaf, new[path]) and (was := kind_of(leaf)) != (now := kind_of(new[path])):
            raise TypeError(
                f"{fn} must return its {name} with the same shapes, dtypes and shardings, but {name}{path} went in as "
                f"{was} and came out as {now}. With parameters in float16 the unscaled gradients are float32: "
                "initialise the optimizer with parameters in float32 (tx.init on float32 copies) and let "
                f"optax.apply_updates cast back; elsewhere cast with .astype in {fn}. Where only what stands behind an "
                "@ or in braces differs, the value is sharded, or varies over mesh axes, as it did not before: "
                f"reshard it in {fn}, or reduce the gradients."
            )


def kind_of(leaf: Any) -> str:
    """Returns the type of a number or an array: shape, dtype, sharding, varying axes; of anything else its text."""
    if not (is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
        return repr(leaf)
    return str(jax.typeof(leaf)).removeprefix("~")  # the mark of a weak type, which makes no difference here


def _equal(was: Any, now: Any) -> bool:
    """Tells whether a leaf that is no array has stayed as it was."""
    return was is now or (not (is_array(was) or is_array(now)) and repr(was) == repr(now))  # -0.0 and 0 are not 0.0
