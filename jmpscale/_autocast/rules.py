"""By which equations matmuls run in half precision; `_autocast/kept.py` says which of them do not.

In the equations of a traced function, each matmul

    c:f32 = dot_general a:f32 b:f32

becomes equations that define the same variable:

    x:f16 = convert_element_type a
    y:f16 = convert_element_type b
    z:f16 = dot_general x y
    c:f32 = convert_element_type z

In float16, `_with_nan_for_infinity` replaces the last equation. An operand that has the half-precision dtype already is
not converted. If results are requested in float32, the matmul becomes

    c:f32 = dot_general[precision=HalfOperands(float16)] a b

whose precision converts the operands when JAX lowers the program, and the operands of the derivative, too.
Convolutions have no such precision: their results are always in half precision.

No other equation changes. Differentiation, batching and partitioning are left to JAX, before or after the rewriting.
XLA fuses the conversions into the operations around them.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jmpscale._autocast.half_operands import HalfOperands, half_operands
from jmpscale._autocast.kept import FLOAT32, HALF, reason_to_keep
from jmpscale._programs.jaxpr import HIGHEST, MATMULS, type_of
from jmpscale._programs.rewrite import Memo, check_primitives, rewrite

# Results of earlier calls. A function under jax.jit has one jaxpr in all of its calls, and JAX finds the compiled
# program of the rewritten jaxpr only if that stays the same object.
# The keys are the dtypes of operands and results.
_MEMOS: dict[tuple[np.dtype, np.dtype], Memo] = {
    (half, result): weakref.WeakKeyDictionary() for half in HALF for result in (half, FLOAT32)
}

Conversion = Callable[..., jax.Array]  # takes an array and a dtype


def in_half(jaxpr: core.Jaxpr, half: np.dtype, result_dtype: np.dtype) -> core.Jaxpr:
    """Returns a jaxpr with its matmuls in half precision, or the same object if it has none to convert.

    `result_dtype` is the dtype in which the results of matmuls leave them: `half`, or float32.
    """
    check_primitives()
    form = _with_half_result if result_dtype == half else _with_float32_result

    def matmul_in_half(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
        converts = eqn.primitive.name in MATMULS and not reason_to_keep(half, eqn)
        return form(half, eqn) if converts else [eqn]

    return rewrite(jaxpr, matmul_in_half, _MEMOS[half, result_dtype])


def _with_half_result(half: np.dtype, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns the equations that compute a matmul or convolution in half precision."""
    conversions, operands = _in_dtypes(eqn, (half,))
    (out,) = eqn.outvars
    result = _variable_like(out, half)
    if half == np.float16:  # a result that is infinite in bfloat16 is infinite in float32, too
        finish = _apply(_with_nan_for_infinity, eqn, result, out)
    elif _dtype(out) == half:
        result, finish = out, []
    else:
        finish = _apply(jax.lax.convert_element_type, eqn, result, out)
    params = eqn.params | {"preferred_element_type": half}
    matmul = eqn.replace(invars=[*operands, *eqn.invars[2:]], outvars=[result], params=params)
    return [*conversions, matmul, *finish]


def _with_float32_result(half: np.dtype, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns the equations that multiply operands in half precision, and add up the products in float32."""
    (out,) = eqn.outvars
    # XLA for GPUs convolves in float32 if the result is float32. A program may also request a result in half precision.
    if eqn.primitive.name == "conv_general_dilated" or _dtype(out) == half:
        return _with_half_result(half, eqn)
    conversions, operands = _in_dtypes(eqn, (half, FLOAT32))
    params = eqn.params | {"precision": half_operands(half), "preferred_element_type": FLOAT32}
    return [*conversions, eqn.replace(invars=[*operands, *eqn.invars[2:]], params=params)]


def with_conversions(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns a matmul whose precision converts its operands as equations that round them, and a float32 matmul.

    The values are the same, but the derivatives are not. For programs that are not differentiated again.
    """
    precision = eqn.params.get("precision")
    if not isinstance(precision, HalfOperands):
        return [eqn]
    eqns, rounded = _in_dtypes(eqn, (precision.dtype,))
    operands = [_variable_like(x, FLOAT32) for x in rounded]
    widen = _with_nan_for_infinity if precision.dtype == np.float16 else jax.lax.convert_element_type
    for x, operand in zip(rounded, operands, strict=True):
        eqns += _apply(widen, eqn, x, operand)
    params = eqn.params | {"precision": HIGHEST}
    return [*eqns, eqn.replace(invars=[*operands, *eqn.invars[2:]], params=params)]


def _in_dtypes(eqn: core.JaxprEqn, dtypes: Sequence[np.dtype]) -> tuple[list[core.JaxprEqn], list[Any]]:
    """Returns the conversions of the operands of a matmul to the first dtype, unless they have one of the dtypes."""
    # Each matmul converts its own operands, even if another one converts them too: the derivative of a shared
    # conversion would add the gradients of the two matmuls in half precision. XLA merges equal conversions.
    conversions, operands = [], []
    for operand in eqn.invars[:2]:
        if _dtype(operand) in dtypes:
            operands.append(operand)
        else:
            operands.append(_variable_like(operand, dtypes[0]))
            conversions += _apply(jax.lax.convert_element_type, eqn, operand, operands[-1])
    return conversions, operands


def _with_nan_for_infinity(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts a result, with NaN for infinity, which later arithmetic could hide: 1 / infinity is 0.

    The difference of an infinity and itself is NaN. For any other y, y - (y - y) is y, bit for bit. XLA fuses these
    operations into the readers of the result, whereas the derivative of a select would store a mask. On a CPU this NaN
    has a sign bit, and `top_k` sorts it last; an absolute value around the difference would clear the bit, but for a
    V100 XLA then stores some of the results once more.
    """
    y = jax.lax.convert_element_type(x, dtype)
    fixed = jax.lax.stop_gradient(y)
    return y - (fixed - fixed)


def _variable_like(x: Any, dtype: np.dtype) -> core.Var:
    """Returns a new variable with the shape, sharding and varying axes of another one."""
    return core.Var(x.aval.update(dtype=dtype, weak_type=False))


def _apply(fun: Conversion, matmul: core.JaxprEqn, x: Any, y: Any) -> list[core.JaxprEqn]:
    """Returns the equations `y = fun(x, dtype of y)`, with the mesh, scopes and source line of a matmul."""
    scalar = _scalar_jaxpr(fun, _dtype(x), _dtype(y))
    variables = {scalar.invars[0]: x, scalar.outvars[0]: y}
    eqns = []
    for eqn in scalar.eqns:
        (out,) = eqn.outvars
        variables.setdefault(out, core.Var(y.aval))  # the conversion is the first equation
        weak_type = {"weak_type": y.aval.weak_type} if "weak_type" in eqn.params else {}
        eqns.append(
            matmul.replace(
                invars=[variables[operand] for operand in eqn.invars],
                outvars=[variables[out]],
                primitive=eqn.primitive,
                params=eqn.params | weak_type,
                effects=eqn.effects,
            )
        )
    return eqns


def _dtype(x: Any) -> np.dtype:
    return type_of(x).dtype


@functools.cache
def _scalar_jaxpr(fun: Conversion, x: np.dtype, y: np.dtype) -> core.Jaxpr:
    """Returns the equations of `fun` for a scalar, as this version of JAX writes them."""
    return jax.make_jaxpr(lambda scalar: fun(scalar, y))(jax.ShapeDtypeStruct((), x)).jaxpr
