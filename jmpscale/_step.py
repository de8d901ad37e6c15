"""One training step: take scaled gradients, and let the step happen or not happen, whole.

Whatever goes through `apply_if` is identical bit for bit after a skipped step.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._finite import AxisName, named_leaves, partition
from jmpscale._scaling import require_flag, require_one_scaler, scale, unscale_and_check
from jmpscale._state import ScalerState, shortened

Carry = TypeVar("Carry")
Carries = TypeVarTuple("Carries")


@overload
def apply_if(finite: Any, fn: Callable[[Carry], Carry], carry: Carry, /) -> Carry: ...
@overload
def apply_if(finite: Any, fn: Callable[[*Carries], tuple[*Carries]], /, *carry: *Carries) -> tuple[*Carries]: ...
def apply_if(finite: Any, fn: Callable[..., Any], /, *carry: Any) -> Any:
    """Takes a step if the gradients were finite, else leaves everything as it was, bit for bit.

    `fn(*carry) if finite else carry`, in one branch, so that a skipped step costs nothing.

    Args:
      finite: bool[], from `unscale_and_check`; combine it with a predicate of your own as you like.
      fn: takes the carry and returns it changed, with the same structure, shapes and dtypes. Put all that a skipped
        step must not move in the carry: parameters, optimizer state, averages, batch statistics, step counts.
      *carry: pytrees. Leaves that are not arrays (functions, strings) go around the branch and must not change.

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
    _refuse_nnx_objects(carry)
    arrays, rebuild = partition(carry, _is_array)

    def step(arrays: list[Any]) -> list[Any]:
        before = rebuild(arrays)
        out = fn(*before)
        after = (out,) if len(carry) == 1 else out
        _require_same(before, after)
        return partition(after, _is_array)[0]

    def skip(arrays: list[Any]) -> list[Any]:
        return arrays

    result = rebuild(cast(list[Any], jax.lax.cond(flag, step, skip, arrays)))
    return result[0] if len(carry) == 1 else result


def _refuse_nnx_objects(carry: Any) -> None:
    """Raises for objects that change in place: what is returned would be copies, and those that came in stay behind."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    kind = nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object

    def is_object(node: Any) -> bool:
        return isinstance(node, kind)

    if found := partition(carry, is_object, is_leaf=is_object)[0]:
        raise TypeError(
            f"carry must hold values, got a Flax NNX {type(found[0]).__name__}, which changes in place: nnx.jit would "
            "not see what the branch did to it. Use nnx.cond(finite, step, skip, ...), or pass nnx.state(...) of it."
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _require_same(before: tuple[Any, ...], after: Any) -> None:
    """Raises, naming the first place that differs, unless `fn` returned what it was given, other values aside."""
    old, new = dict(named_leaves(before)), dict(named_leaves(after))
    structures = cast(tuple[Any, Any], (jax.tree.structure(before), jax.tree.structure(after)))
    if structures[0] != structures[1]:
        differing = [f"carry{path} is only in its input" for path in old if path not in new]
        differing += [f"carry{path} is only in its output" for path in new if path not in old]
        raise TypeError(
            f"fn must return its carry with the same structure, but {(differing or ['the containers differ'])[0]}: "
            f"{shortened(structures[0])} went in and {shortened(structures[1])} came out. Return all that fn was "
            "given, changed, in the same order."
        )
    for path, leaf in old.items():
        if (was := _kind(leaf)) != (now := _kind(new[path])):
            raise TypeError(
                f"fn must return its carry with the same shapes, dtypes and shardings, but carry{path} went in as "
                f"{was} and came out as {now}. With parameters in float16 the unscaled gradients are float32: "
                "initialise the optimizer with parameters in float32 (tx.init on float32 copies) and let "
                "optax.apply_updates cast back; elsewhere cast with .astype in fn. Where only what stands behind an @ "
                "or in braces differs, the value is sharded, or varies over mesh axes, as it did not before: "
                "reshard it in fn, or reduce the gradients."
            )


def _kind(leaf: Any) -> str:
    if not _is_array(leaf):
        return repr(leaf)
    return str(jax.typeof(leaf)).removeprefix("~")  # the mark of a weak type, which makes no difference here


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: AxisName = None,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Makes a function that returns the loss, its unscaled gradients, and whether these are finite.

    Like `jax.value_and_grad`, but the result takes a scaler before `fun`'s own arguments, and the backward pass runs
    on the scaled loss.

    Args:
      fun: returns a scalar floating-point loss, or a pair of it and auxiliary data if `has_aux`.
      argnums: which of `fun`'s own positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      axis_name: the mapped axes over which to agree, where JAX's types do not tell; see `all_finite`.

    Returns:
      `f(state, *args, **kwargs) -> (value, grads, finite)`, or `((value, aux), grads, finite)` with `has_aux`. The
      value is `fun`'s own, bit for bit, never scaled. `grads` and `finite` are as from `unscale_and_check`.

    Raises:
      TypeError: as `jax.value_and_grad` does, and as `unscale_and_check` does.
      ValueError: likewise.

    >>> from jmpscale import dynamic
    >>> loss, grad, finite = value_and_grad(lambda w, x: (w * x) ** 2)(dynamic(), 3.0, 2.0)
    >>> float(loss), float(grad), bool(finite)
    (36.0, 24.0, True)
    """
    if isinstance(fun, ScalerState) or isinstance(argnums, ScalerState):
        raise TypeError(
            "value_and_grad takes the loss function, got a ScalerState. The scaler is the first argument of the "
            "function that it returns: value_and_grad(loss_fn)(scaler, params, batch)."
        )
    jax.value_and_grad(fun, argnums, has_aux)  # raises for a bad fun or argnums now, as JAX does, and not when called

    def value_and_grad_of_fun(state: ScalerState, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        require_one_scaler(state)

        def scaled(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(cast(tuple[Any, ...], out)) == 2):
                return cast(Any, out)  # not a pair: JAX's own error says so
            return _scale_loss(state, out[0] if has_aux else out), out

        (_, out), grads = jax.value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
        grads, finite = unscale_and_check(state, grads, axis_name=axis_name)
        return out, grads, finite

    # Not functools.wraps: it would pass off fun's signature, which lacks the scaler, as this function's, and
    # jax.jit(..., static_argnames=...) would count from there.
    value_and_grad_of_fun.__name__ = f"value_and_grad_of_{getattr(fun, '__name__', 'fun')}"
    return value_and_grad_of_fun


def _scale_loss(state: ScalerState, value: Any) -> Any:
    """Scales a loss; leaves what is no real scalar to JAX, whose error says what is wrong with it."""
    aval: Any = jax.typeof(value) if _is_array(value) else None
    is_loss = aval is not None and aval.shape == () and jnp.issubdtype(aval.dtype, np.floating)
    return scale(state, value) if is_loss else value
