"""`in_float32`, which runs a function in float32 where it computes in half precision."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.frameworks import is_nnx
from jmpscale._base.text import describe, enumerate_names
from jmpscale._base.trace import lift_nnx, trace
from jmpscale._base.tree import PyTree, flatten_matching, is_array
from jmpscale._base.warn import warn_user
from jmpscale._programs.derivative_rules import DifferentiableInterpreter
from jmpscale._programs.float32 import run_as_written, run_in_float32
from jmpscale._programs.interpret import Interpreter, widen
from jmpscale._programs.jaxpr import Caller

P = ParamSpec("P")
T = TypeVar("T")


def in_float32(fun: Callable[P, T]) -> Callable[P, T]:
    """Creates a function that computes in float32 what `fun` computes in half precision.

    It is the inverse of `autocast`, and of casts by hand: each operation of `fun` on bfloat16, float16 or float8 runs
    in float32, with the same random bits. Matmuls and convolutions have the precision "highest", casts to half
    precision change nothing, and neither does `jax.lax.reduce_precision`. Operations on integers, float64 and complex
    numbers run as written.

    So the difference between `fun` and `in_float32(fun)` is what half precision does. To test it in a program of your
    own, give both functions the same arguments, and compare what matters to you, such as samples, metrics, or the state
    after some steps. To test a run, pass the state that each function returns to its own next step, beginning with
    `cast(state, jnp.float32)`; `diagnose_run` does this for a training step. Arguments and constants that are in half
    precision already keep their values: 0.999 is 1 in bfloat16, here too.

    `fun` is entered as by `autocast`: compiled functions, loops, branches, checkpointed functions and `jax.shard_map`.
    Functions with their own derivative rule keep it, and the rule computes in float32. Kernels, linear solvers, casts
    of bits and callbacks run as written.

    Args:
      fun: any function that `jax.jit` accepts. It is traced in every call. Arguments and results may be any pytrees,
        Equinox modules, Flax NNX objects and Python objects.

    Returns:
      A function with the signature of `fun`. Its results have the same structure and shapes, and are float32 where
      `fun` returns bfloat16, float16 or float8. Variables of Flax NNX objects that `fun` changes become float32, too,
      and all others keep their dtype. It can be transformed like `fun`: differentiated, batched, compiled, sharded.
      The gradient of an argument has the dtype of the argument, as always in JAX.

    Raises:
      TypeError: `fun` is not callable, or an argument is a `jax.Ref`.

    Warns:
      UserWarning: an operation in half precision can only run as written. The warning names each of them, once.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> count = lambda n: n + jnp.bfloat16(1)
    >>> n = jnp.bfloat16(256)
    >>> float(count(n)), float(jmpscale.in_float32(count)(n))
    (256.0, 257.0)
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function, got {describe(fun)}. Call in_float32(fun)(*args).")
    original: Callable[..., Any] = fun
    name, is_checked = describe(fun), False

    def transform(fun: Callable[..., PyTree], *args: PyTree) -> PyTree:
        nonlocal is_checked
        traced = trace(fun, *args, name=f"{name} in jmpscale.in_float32")
        outputs, as_written = run_program_in_float32(core.ClosedJaxpr(traced.jaxpr, traced.inputs), ())
        if as_written and not is_checked:
            warn_user(
                f"in_float32 runs operations of {name} in half precision, because they can only run as written: "
                f"{enumerate_names(as_written)}."
            )
        is_checked = True
        return traced.unflatten(map(jnp.asarray, outputs))

    @functools.wraps(fun, updated=())
    def in_float32_fun(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(lift_nnx, fun=lambda args, kwargs: original(*args, **kwargs), args=args, kwargs=kwargs)
        if flatten_matching((args, kwargs), is_nnx, is_nnx)[0]:
            return call(transform)
        return jax.tree.map(_widen_array, call(transform))

    return in_float32_fun


def run_program_in_float32(program: core.ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Returns the outputs of a program in float32, and the operations in half precision that ran as written.

    The result can be differentiated like the program.
    """
    as_written: list[str] = []

    def rule(_: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
        if _rounds_float32(eqn):
            return list(inputs)
        outputs = run_in_float32(eqn, inputs)
        if outputs is None and eqn.outvars:
            as_written.append(f"{eqn.primitive.name} at {caller.line_of(eqn)}")
        return run_as_written(eqn, inputs) if outputs is None else outputs

    outputs = DifferentiableInterpreter(rule).evaluate(program, args)[0]
    return outputs, list(dict.fromkeys(as_written))


def _rounds_float32(eqn: core.JaxprEqn) -> bool:
    """Tests whether an operation rounds float32 numbers to fewer digits, without a change of their dtype."""
    if eqn.primitive.name != "reduce_precision":
        return False
    float32 = jnp.finfo(np.float32)
    return eqn.params["exponent_bits"] < float32.nexp or eqn.params["mantissa_bits"] < float32.nmant


def _widen_array(x: Any) -> Any:
    """Widens a result that does not depend on a traced value, such as an argument that is returned."""
    return widen(x) if is_array(x) else x
