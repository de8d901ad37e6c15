"""Computes operations in float32, and as they are written."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.lax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import MATMULS, Jaxpr, closed, type_of
from jmpscale._diagnosis.interpret import Interpreter, is_narrow, widen

# Primitives of JAX that compute in the dtype of their operands, so that they can compute in float32 instead. Other
# primitives (kernels, callbacks) have operands and results of fixed dtypes, and run as written.
_KNOWN = {
    primitive.name
    for module in (core.primitives, jax.lax)
    for primitive in vars(module).values()
    if isinstance(primitive, core.Primitive)
}
_KNOWN |= {"mesh_cast", "pbroadcast", "pcast", "psum2", "psum_invariant", "pvary", "ragged_dot_general", "reshard"}
_KNOWN -= {"bitcast_convert_type", "nextafter", "reduce_precision", "custom_lin", "custom_linear_solve", "xla_pmap"}
_KNOWN -= {"rng_bit_generator", "rng_uniform", "random_bits"}
_HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def run_in_float32(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Returns the results of an operation in float32, where the program uses a narrower dtype."""
    if eqn.primitive.name in _KNOWN:
        with contextlib.suppress(Exception):  # whatever a primitive raises for operands of another dtype
            return [widen(x) for x in _evaluate(eqn, _widen_params(eqn), inputs)]
    return run_as_written(eqn, inputs)


def evaluate_in_float32(program: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a program whose operations compute in float32."""
    return Interpreter(lambda _, eqn, inputs, caller: run_in_float32(eqn, inputs)).evaluate(program, args)[0]


def run_as_written(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Returns the results of an operation in its own dtypes, as float32."""
    pairs = zip(inputs, map(type_of, eqn.invars), strict=True)
    narrow = [x.astype(aval.dtype) if is_narrow(aval) else x for x, aval in pairs]
    return [widen(x) for x in _evaluate(eqn, eqn.params, narrow)]


def runs_only_as_written(eqn: core.JaxprEqn) -> bool:
    """Tests whether an operation that holds narrower values than float32 must compute in its own dtypes.

    The `jax.pmap` of old versions of JAX, which is not entered, counts, too.
    """
    if eqn.primitive.name == "xla_pmap":
        return True
    narrow = any(is_narrow(type_of(x)) for x in (*eqn.invars, *eqn.outvars))
    return narrow and eqn.primitive.name not in _KNOWN


def _evaluate(eqn: core.JaxprEqn, params: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """Computes the results of an equation from values and parameters that may differ in dtype from its own.

    The operation keeps its mesh, named scopes and source line. How a primitive is called differs between versions of
    JAX, so a jaxpr with this equation alone is evaluated.
    """
    inputs: list[Any] = [core.Var(x.aval) for x in eqn.invars]
    outputs = [core.Var(x.aval) for x in eqn.outvars]
    single = eqn.replace(invars=inputs, outvars=outputs, params=params)
    jaxpr = _empty_jaxpr().replace(invars=inputs, outvars=outputs, eqns=[single])
    return jax.core.eval_jaxpr(jaxpr, (), *values)


@functools.cache
def _empty_jaxpr() -> core.Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr


def _widen_params(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an operation that computes in float32."""
    new = {name: _widen_param(value) for name, value in eqn.params.items()}
    if eqn.primitive.name in MATMULS:
        new["precision"] = _HIGHEST  # GPUs and TPUs compute with less by default
    return new


def _widen_param(value: Any) -> Any:
    if isinstance(value, np.dtype) and jnp.issubdtype(value, np.floating) and value.itemsize < 4:
        return np.dtype(np.float32)
    if isinstance(value, core.ClosedJaxpr):  # the function of a reduction or a scatter
        return _widen_function(value)
    return _widen_function(value).jaxpr if isinstance(value, core.Jaxpr) else value


@functools.lru_cache(maxsize=1000)
def _widen_function(held: Jaxpr) -> core.ClosedJaxpr:
    program = closed(held)
    types: list[Any] = [type_of(x) for x in program.jaxpr.invars]
    args = [jax.ShapeDtypeStruct(x.shape, np.float32 if is_narrow(x) else x.dtype) for x in types]
    return jax.make_jaxpr(lambda *args: evaluate_in_float32(program, args))(*args)
