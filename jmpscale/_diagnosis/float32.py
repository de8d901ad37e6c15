"""Evaluates a program with all half-precision values in float32: the reference of a diagnosis."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._autocast import MATMULS
from jmpscale._base.jaxpr import called_jaxpr, evaluate_equation, is_floating, split_scan_inputs, type_of

# Primitives of JAX that compute in the dtype of their operands, so that they can compute in float32 instead. Other
# primitives (kernels, callbacks) have operands and results of fixed dtypes, and run as written.
_KNOWN = {
    primitive.name
    for module in (core.primitives, jax.lax)
    for primitive in vars(module).values()
    if isinstance(primitive, core.Primitive)
}
_KNOWN |= {"mesh_cast", "pbroadcast", "pcast", "psum2", "psum_invariant", "pvary", "ragged_dot_general", "reshard"}
_KNOWN -= {"bitcast_convert_type", "nextafter", "reduce_precision", "custom_linear_solve", "custom_lin"}
_KNOWN -= {"rng_bit_generator", "rng_uniform", "random_bits"}
_DTYPE_PARAMETERS = ("new_dtype", "dtype", "preferred_element_type")
_HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def is_narrow(aval: Any) -> bool:
    """Tests whether a type, or anything else with a dtype, has floating-point numbers of fewer bits than float32."""
    return is_floating(aval) and aval.dtype.itemsize < 4


def widen(x: Any) -> Any:
    """Returns an array in float32 if its dtype is narrower."""
    return x.astype(np.float32) if is_narrow(x) else x


def literal_value(literal: core.Literal) -> np.ndarray:
    """Returns the value of a constant in a program, of which some are Python numbers."""
    return np.asarray(literal.val, type_of(literal).dtype)


def run_in_float32(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, computed in float32 where the program computes in less. It can be compiled."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(widen, consts), strict=True))
    values.update(zip(jaxpr.invars, map(widen, inputs), strict=True))

    def read(x: Any) -> Any:
        return widen(literal_value(x)) if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, run_equation_in_float32(eqn, [read(x) for x in eqn.invars]), strict=True))
    return [read(x) for x in jaxpr.outvars]


def run_equation_in_float32(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Returns the results of an equation, computed in float32 where the program computes in less."""
    structured = {"scan": _run_scan, "while": _run_while, "cond": _run_cond, "shard_map": _run_shard_map}
    if eqn.primitive.name in structured:
        return structured[eqn.primitive.name](eqn, inputs)
    called = called_jaxpr(eqn)
    return run_in_float32(*called, inputs) if called else _run_operation(eqn, inputs)


def _run_scan(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    consts, carry, xs = split_scan_inputs(eqn, inputs)
    body, length, reverse = (eqn.params[name] for name in ("jaxpr", "length", "reverse"))

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_in_float32(body.jaxpr, body.consts, [*consts, *carry, *x])
        return list(map(_with_type_of, outputs, carry)), outputs[len(carry) :]

    carry, ys = jax.lax.scan(step, carry, xs, length=length, reverse=reverse)
    return [*carry, *ys]


def _run_while(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]

    def test(carry: list[Any]) -> Any:
        return run_in_float32(cond.jaxpr, cond.consts, [*inputs[:first], *carry])[0]

    def step(carry: list[Any]) -> list[Any]:
        outputs = run_in_float32(body.jaxpr, body.consts, [*inputs[first:last], *carry])
        return list(map(_with_type_of, outputs, carry))

    return jax.lax.while_loop(test, step, inputs[last:])


def _with_type_of(x: Any, like: Any) -> Any:
    """Returns an array in the dtype of another one, and without a weak type."""
    return jax.lax.convert_element_type(x, like.dtype) if is_floating(like) else x


def _run_cond(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    def branch(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            return [_with_type_of(x, x) for x in run_in_float32(closed.jaxpr, closed.consts, operands)]

        return run

    index, *operands = inputs
    return jax.lax.switch(index, [branch(closed) for closed in eqn.params["branches"]], *operands)


def _run_shard_map(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    params = eqn.params
    # JAX has renamed the parameter.
    axes = next(params[name] for name in ("newly_manual_axes", "manual_axes") if name in params)
    return jax.shard_map(
        lambda *args: run_in_float32(params["jaxpr"], (), args),
        mesh=params["mesh"],
        axis_names=set(axes),
        check_vma=params["check_vma"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
    )(*inputs)


def _run_operation(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    if eqn.primitive.name in _KNOWN:
        with contextlib.suppress(Exception):  # whatever a primitive raises for operands of another dtype
            return [widen(x) for x in evaluate_equation(eqn, _widen_params(eqn), inputs)]
    pairs = zip(inputs, map(type_of, eqn.invars), strict=True)
    narrow = [x.astype(aval.dtype) if is_narrow(aval) else x for x, aval in pairs]
    return [widen(x) for x in evaluate_equation(eqn, eqn.params, narrow)]


def _widen_params(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation that computes in float32."""
    new = dict(eqn.params)
    if eqn.primitive.name in MATMULS:
        new["precision"] = _HIGHEST  # the default of GPUs and TPUs is less than float32
    for key in _DTYPE_PARAMETERS:
        dtype = new.get(key)
        if dtype is not None and jnp.issubdtype(dtype, np.floating) and np.dtype(dtype).itemsize < 4:
            new[key] = np.dtype(np.float32)
    for key, value in eqn.params.items():  # the functions of reductions, scatters and pmap
        if isinstance(value, core.ClosedJaxpr) and not value.consts:
            new[key] = _widen_function(value.jaxpr)
        elif isinstance(value, core.Jaxpr):
            axes = ((new["axis_name"], new["axis_size"]),) if "axis_size" in new else ()  # of a pmap
            new[key] = _widen_function(value, axes).jaxpr
    return new


@functools.lru_cache(maxsize=1000)
def _widen_function(jaxpr: core.Jaxpr, axes: tuple[tuple[Any, int], ...] = ()) -> core.ClosedJaxpr:
    types: list[Any] = [type_of(x) for x in jaxpr.invars]
    args = [jax.ShapeDtypeStruct(x.shape, np.float32 if is_narrow(x) else x.dtype) for x in types]
    return jax.make_jaxpr(lambda *args: run_in_float32(jaxpr, (), args), axis_env=list(axes))(*args)


def runs_as_written(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation that holds narrower values than float32 must compute in its own dtype."""
    narrow = any(is_narrow(type_of(x)) for x in (*eqn.invars, *eqn.outvars))
    return narrow and eqn.primitive.name not in _KNOWN


def compiler_options() -> dict[str, Any]:
    """Returns options with which programs compile fast, and compute in the precision in which they are written."""
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return fast | {"xla_allow_excess_precision": False}
