"""What a training step differentiates by itself, in a call of a function of `scaled_backward`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmpscale._algorithm.scaled_backward import reads_arguments
from jmpscale._base.frameworks import imported, is_nnx_object
from jmpscale._base.gradients import GradientCall, ScaledCall
from jmpscale._base.text import describe
from jmpscale._base.trace import trace
from jmpscale._base.tree import PyTree, find_instances, is_inexact, is_traced
from jmpscale._state import ScalerState, static


def differentiated_call(call: ScaledCall) -> GradientCall | None:
    """Returns the call of `value_and_grad` with the same loss and gradients; None if the call is not differentiated.

    An argument that is differentiated is a tracer that holds its value. Inside of `jax.vmap`, this value is traced.

    Raises:
      TypeError: what is differentiated cannot be known from the arguments.
    """
    where = f"{describe(call.fun)} in jmpscale.scaled_backward"
    objects = list(filter(is_nnx_object, jax.tree.leaves((call.args, call.kwargs), is_leaf=is_nnx_object)))
    if objects:
        if not any(map(_is_differentiated, jax.tree.leaves(imported("flax.nnx", "state")(objects)))):
            return None
        raise TypeError(
            f"step must differentiate arrays, but {where} takes Flax NNX objects, which do not show what is "
            "differentiated. Call diagnose(loss_fn, transform=nnx.value_and_grad)(scaler, model, batch)."
        )
    leaves, treedef = jax.tree.flatten((call.args, call.kwargs))
    if set(map(id, filter(_is_differentiated, _values_of(call)))) - set(map(id, leaves)):
        raise TypeError(
            f"step must differentiate arguments of {where}, but the function closes over values that are "
            "differentiated. Pass them as arguments, or call diagnose(loss_fn)(scaler, params, batch)."
        )
    chosen = [_is_differentiated(x) and is_inexact(x) for x in leaves]
    if not any(chosen):
        return None

    # The loop may take auxiliary data beside the loss, of which scaled_backward does not know.
    def loss_and_aux(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = call.fun(*args, **kwargs)
        is_pair = call.has_aux or (isinstance(out, tuple) and len(out) == 2)
        return (out[0], out[1]) if is_pair else (out, None)

    args, kwargs = jax.tree.unflatten(treedef, map(_value, leaves))
    source = call.scale(*args, **kwargs) if reads_arguments(call.scale) else call.scale
    return GradientCall(loss_and_aux, 0, True, _with_respect_to(chosen), _scaler(source), args, kwargs)


def _values_of(call: ScaledCall) -> list[Any]:
    """Returns the values that a function depends on, whether it receives them as arguments or closes over them."""
    with jax.disable_jit(False):
        return trace(lambda: call.fun(*call.args, **call.kwargs), name=f"{describe(call.fun)} in diagnose_step").inputs


def _is_differentiated(x: Any) -> bool:
    return is_traced(x) and hasattr(x, "primal")


def _value(x: Any) -> Any:
    """Returns the value of an argument that `jax.grad` differentiates."""
    return x.primal if _is_differentiated(x) else x


def _scaler(source: PyTree) -> PyTree:
    """Returns a tree with a scaler; a static one for a number."""
    leaves = jax.tree.leaves(source)
    is_number = len(leaves) == 1 and not find_instances(source, ScalerState) and not is_traced(leaves[0])
    return static(float(leaves[0])) if is_number else source


def _with_respect_to(chosen: Sequence[bool]) -> Callable[..., Any]:
    """Returns a `value_and_grad` that differentiates some leaves of the arguments."""

    def transform(fun: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
            leaves, treedef = jax.tree.flatten((args, kwargs))

            def of_chosen(values: list[Any]) -> Any:
                new = iter(values)
                args, kwargs = jax.tree.unflatten(
                    treedef, [next(new) if flag else x for x, flag in zip(leaves, chosen, strict=True)]
                )
                return fun(*args, **kwargs)

            values = [x for x, flag in zip(leaves, chosen, strict=True) if flag]
            value, found = jax.value_and_grad(of_chosen, has_aux=has_aux)(values)
            remaining = iter(found)
            grads = jax.tree.unflatten(treedef, [next(remaining) if flag else None for flag in chosen])
            nonempty = [tree for tree in (*grads[0], grads[1]) if jax.tree.leaves(tree)]
            return value, nonempty[0] if len(nonempty) == 1 else grads

        return value_and_grad

    return transform
