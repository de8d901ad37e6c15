"""Computes operations in float32, and as they are written."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.lax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base import cotangents
from jmpscale._base.types import is_narrow
from jmpscale._programs.interpret import Interpreter, widen
from jmpscale._programs.jaxpr import HIGHEST, MATMULS, Caller, Jaxpr, closed, equations, held_jaxprs, type_of

# Primitives of JAX that compute in the dtype of their operands, so that they can compute in float32 instead. Other
# primitives (kernels, callbacks, and whatever a new version of JAX brings) run as written, and are listed.
_KNOWN = {
    primitive.name
    for module in (core.primitives, jax.lax)
    for primitive in vars(module).values()
    if isinstance(primitive, core.Primitive)
}
# JAX exports these from no public module, or not in every version.
_KNOWN |= {
    "all_gather_invariant",
    "all_gather_reduced",
    "broadcast_to",
    "cholesky_update",
    "copy",
    "copy_p",
    "dce_sink",
    "empty",
    "from_edtype",
    "geqp3",
    "geqrf",
    "layout_constraint",
    "mesh_cast",
    "name",
    "optimization_barrier",
    "ormqr",
    "pbroadcast",
    "pbroadcast_dynamic",
    "pcast",
    "pgather",
    "preduced",
    "psum2",
    "psum_invariant",
    "pvary",
    "ragged_dot_general",
    "reduce_scatter",
    "reduced_vary_cast",
    "reduced_vary_cast_p",
    "relayout",
    "reshard",
    "symmetric_product",
    "tie",
    "to_edtype",
    "unreduced_pmax",
    "unreduced_pmin",
    "unreduced_psum",
    "unreduced_reduce_scatter",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
    "xla_metadata_value",
    "zeros_like",
}
_KNOWN |= {cotangents.NAME}
_KNOWN |= {  # jax.experimental.sparse
    f"{format}_{name}"
    for format in ("bcoo", "bcsr")
    for name in ("dot_general", "extract", "fromdense", "sort_indices", "todense", "transpose")
}
_KNOWN |= {"bcoo_dot_general_sampled", "bcoo_spdot_general", "bcoo_sum_duplicates"}
# These depend on the dtype, or hold programs of fixed dtypes.
_KNOWN -= {"bitcast_convert_type", "nextafter", "reduce_precision", "custom_lin", "custom_linear_solve", "xla_pmap"}
_KNOWN -= {"rng_bit_generator", "rng_uniform", "random_bits"}


def run_in_float32(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Returns the results of an operation in float32, where the program uses a narrower dtype.

    Returns None if the operation can only run as written, in a narrower dtype.
    """
    if eqn.primitive.name == "reduce_precision":
        return list(inputs)
    if eqn.primitive.name not in _KNOWN:
        return None if runs_only_as_written(eqn) else run_as_written(eqn, inputs)
    if _holds_fixed_dtypes(eqn):
        return None if _is_narrow(eqn) else run_as_written(eqn, inputs)
    outputs = evaluate_equation(eqn, inputs, _widen_params(eqn))
    if any(map(is_narrow, outputs)):  # another parameter has the dtype
        return None
    return outputs


def _holds_fixed_dtypes(eqn: core.JaxprEqn) -> bool:
    """Tests whether an operation holds a function, such as that of a reduction, that can only run as written."""
    return any(runs_only_as_written(held) for jaxpr in held_jaxprs(eqn) for held, _ in equations(jaxpr))


def keeps_dtype(eqn: core.JaxprEqn) -> bool:
    """Tests whether an operation rounds half-precision values to their own dtype, which changes nothing.

    JAX rounds the values that the policy of a `jax.checkpoint` saves, so that compilers keep no excess precision.
    """
    if eqn.primitive.name != "reduce_precision" or not is_narrow(type_of(eqn.invars[0])):
        return False
    info = jnp.finfo(type_of(eqn.invars[0]).dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def run_in_widest(eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
    """Returns the results of an operation in float32, or as written if it must run so."""
    outputs = None if caller.runs_as_written(eqn) else run_in_float32(eqn, inputs)
    return run_as_written(eqn, inputs) if outputs is None else outputs


def evaluate_in_float32(program: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a program whose operations compute in float32, or as written if they cannot."""
    return Interpreter(lambda _, eqn, inputs, caller: run_in_widest(eqn, inputs, caller)).evaluate(program, args)[0]


def run_as_written(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Returns the results of an operation in its own dtypes, as float32."""
    pairs = zip(inputs, map(type_of, eqn.invars), strict=True)
    narrow = [x.astype(aval.dtype) if is_narrow(aval) else x for x, aval in pairs]
    return [widen(x) for x in evaluate_equation(eqn, narrow)]


def runs_only_as_written(eqn: core.JaxprEqn) -> bool:
    """Tests whether an operation that holds narrower values than float32 must compute in its own dtypes.

    The programs that it holds count, too, such as a kernel, a linear solver, or the `jax.pmap` of old versions of JAX,
    which is not entered. The bits of integers, such as random ones, are the same numbers in every dtype.
    """
    name = eqn.primitive.name
    if name in {*_KNOWN, "reduce_precision"} or (
        name == "bitcast_convert_type" and not is_narrow(type_of(eqn.invars[0]))
    ):
        return False
    return _is_narrow(eqn) or any(_is_narrow(held) for jaxpr in held_jaxprs(eqn) for held, _ in equations(jaxpr))


def _is_narrow(eqn: core.JaxprEqn) -> bool:
    return any(is_narrow(type_of(x)) for x in (*eqn.invars, *eqn.outvars))


def evaluate_equation(eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Computes the results of an equation from values and parameters that may differ in dtype from its own.

    The operation keeps its mesh, named scopes and source line. How a primitive is called differs between versions of
    JAX, so a jaxpr with this equation alone is evaluated. Its variables have other types than the values, which is what
    `jax_enable_checks` looks for. A value may be a literal.
    """
    pairs = zip(values, eqn.invars, strict=True)
    operands: list[Any] = [x if isinstance(x, core.Literal) else core.Var(y.aval) for x, y in pairs]
    inputs = [x for x in operands if isinstance(x, core.Var)]
    outputs = [core.Var(x.aval) for x in eqn.outvars]
    single = eqn.replace(invars=operands, outvars=outputs, params=eqn.params if params is None else params)
    jaxpr = _empty_jaxpr().replace(invars=inputs, outvars=outputs, eqns=[single])
    with jax.enable_checks(False):
        return jax.core.eval_jaxpr(jaxpr, (), *[x for x in values if not isinstance(x, core.Literal)])


@functools.cache
def _empty_jaxpr() -> core.Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr


def _widen_params(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an operation that computes in float32."""
    new = {name: _widen_param(value) for name, value in eqn.params.items()}
    if eqn.primitive.name in MATMULS:
        new["precision"] = HIGHEST  # GPUs and TPUs compute with less by default
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
