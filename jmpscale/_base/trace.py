"""Calls a function in two steps, between which its equations can be changed: `trace` and `Traced.evaluate`."""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core

from jmpscale._base.frameworks import is_nnx, is_outer_nnx, is_trace_error
from jmpscale._base.marks import Mark, has_mark, mark
from jmpscale._base.tree import PyTree, check_no_refs, flatten_matching, is_traced


class Traced(NamedTuple):
    """A traced call of a function."""

    jaxpr: core.Jaxpr
    inputs: list[Any]  # the values of jaxpr.constvars: all arrays that the function depends on
    unflatten: Callable[..., PyTree]  # makes the result of the function from the outputs

    def evaluate(self) -> list[jax.Array]:
        """Returns the outputs. The operations keep their names, named scopes and source lines."""
        # A constant output is a literal of the jaxpr, not an array.
        return [jnp.asarray(y) for y in jax.core.eval_jaxpr(self.jaxpr, self.inputs)]


def trace(fun: Callable[..., PyTree], *args: PyTree, name: str) -> Traced:
    """Calls a function, once, to record its equations; arguments and results may be any objects.

    `name` is the name of the function in errors, such as `loss_fn in jmpscale.autocast`.
    """
    unflatten: Callable[..., PyTree] = tuple
    is_scaled: list[bool] = []

    def traced_outputs() -> list[Any]:
        nonlocal unflatten, is_scaled
        # The function receives containers of its own, as under jax.jit, so it may change them.
        out = fun(*jax.tree.map(lambda x: x, args, is_leaf=is_nnx))
        leaves, unflatten = flatten_matching(out, is_traced)
        is_scaled = [has_mark(Mark.SCALED, leaf) for leaf in leaves]
        return leaves

    def unflatten_outputs(outputs: Iterable[Any]) -> PyTree:
        leaves = list(outputs)
        mark(Mark.SCALED, [x for x, flag in zip(leaves, is_scaled, strict=True) if flag])
        return unflatten(leaves)

    # JAX shows this name where a traced value is used that the function has stored in an object that is not a pytree.
    traced_outputs.__name__ = f"{name}, which must not store traced values in Python objects,"
    # The constants of the jaxpr are all values that fun depends on, whether it receives them as arguments or closes
    # over them. jax.closure_convert would find them too, but it keeps the closed-over values in a cache.
    try:
        closed = jax.make_jaxpr(traced_outputs)()
    except Exception as error:
        if is_trace_error(error):
            error.add_note(
                f"{name} is traced, so it cannot change variables of an outer trace, or that it closes over. Pass the "
                "Flax NNX objects as arguments and differentiate with flax.nnx.value_and_grad, or create the variables "
                "in the function: nnx.merge(graphdef, state, copy=True)."
            )
        raise
    return Traced(closed.jaxpr, closed.consts, unflatten_outputs)


def lift_nnx(transform: Callable[..., PyTree], fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    """Applies a transformation of functions of pytrees to `fun(args, kwargs)`, which may contain Flax NNX objects.

    Inside a transformation `fun` would change copies of modules and variables. Flax passes their state in and out,
    except the state of objects of an outer trace, which `fun` may only read.
    """
    check_no_refs(args, "args")
    check_no_refs(kwargs, "kwargs")
    nodes, replace = flatten_matching((args, kwargs), is_nnx, is_nnx)
    if not nodes:
        return transform(fun, args, kwargs)
    is_outer = [is_outer_nnx(node) for node in nodes]
    if any(is_outer):
        hidden = replace(_Outer(x) if outer else x for x, outer in zip(nodes, is_outer, strict=True))
        show = functools.partial(jax.tree.map, lambda x: x.node if isinstance(x, _Outer) else x, is_leaf=is_nnx)
        return lift_nnx(transform, lambda *inputs: fun(*show(inputs)), *hidden)
    lift: Any = sys.modules["flax.nnx.transforms.general"]
    return lift.split_inputs(functools.partial(transform, lift.merge_inputs(fun)))(args, kwargs)


class _Outer:
    """Holds a Flax NNX object of an outer trace, so that Flax does not pass its state."""

    def __init__(self, node: object) -> None:
        self.node = node
