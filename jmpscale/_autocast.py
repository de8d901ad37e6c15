"""Runs the matmuls and convolutions of a float32 function in half precision.

The function is traced, and in its equations each matmul

    c:f32 = dot_general a:f32 b:f32

becomes equations that define the same variable:

    x:f16 = convert_element_type a
    y:f16 = convert_element_type b
    z:f16 = dot_general x y
    c:f32 = convert_element_type z

In float16, `_with_nan_for_infinity` replaces the last equation. An operand that has the half-precision dtype already is
not converted. No other equation changes. Differentiation, batching and partitioning are left to JAX, before or after
the rewriting. XLA fuses the conversions into the operations around them.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import DTypeLike

from jmpscale._autocast_warnings import Kept, warn_about_complex, warn_unchanged
from jmpscale._base.jaxpr import Found, Memo, equations, lift_nnx, rewrite, trace, type_of
from jmpscale._base.text import describe_function
from jmpscale._base.tree import PyTree, check_no_refs

P = ParamSpec("P")
T = TypeVar("T")
Conversion = Callable[[jax.Array, np.dtype], jax.Array]

MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}
_FLOAT32 = np.dtype(np.float32)
_HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
# Results of earlier calls. A function under jax.jit has one jaxpr in all of its calls, and JAX finds the compiled
# program of the rewritten jaxpr only if that stays the same object.
_MEMOS: dict[np.dtype, Memo] = {dtype: weakref.WeakKeyDictionary() for dtype in _HALF}


@overload
def autocast(fun: Callable[P, T], *, dtype: DTypeLike = jnp.float16) -> Callable[P, T]: ...
@overload
def autocast(*, dtype: DTypeLike = jnp.float16) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def autocast(fun: Callable[..., Any] | None = None, *, dtype: DTypeLike = jnp.float16) -> Callable[..., Any]:
    """Creates a function that runs the matmuls and convolutions of `fun` in half precision.

    Write `fun` in float32, with float32 parameters. The float32 operands of matmuls and convolutions are converted to
    `dtype`, the result is computed in `dtype`, and it is converted back to float32 at once. The other operand may be in
    `dtype` already, or hold integers or booleans. All other operations run as written, so softmax, normalization,
    masks of -1e9 before a softmax and epsilons of 1e-8 are as accurate as in float32. The gradients of float32
    parameters are float32.

    A float16 result that is infinite becomes NaN, which later arithmetic cannot hide, whereas 1 / infinity is 0. The
    loss is then NaN, and the step is skipped.

    Wrap the loss function, not the training step: some optimizers contain matmuls, too. In float16, gradients
    underflow without loss scaling: differentiate with `jmpscale.value_and_grad`, or use `loss_scaled`. bfloat16 needs
    no scaling.

    Some operations of these kinds remain in float32. Half precision would make them less accurate and not faster:

    - inner products, such as `jnp.vdot(w, w)`, which are sums;
    - outer products, such as positions times frequencies in rotary embeddings, which are element-wise products.

    Sums, angles and gathers that are written as other matmuls are rounded; the guide lists programs that must stay in
    float32. `precision="highest"` keeps a matmul in float32, and so does `jax.default_matmul_precision("highest")`
    around it. Matmuls of other dtypes, kernels (Pallas, FFI), solvers, and functions with their own derivative rule
    (`jax.custom_vjp`, `jax.custom_jvp`) run as written. To convert the matmuls of such a function, wrap `fun` after
    differentiation, `autocast(jmpscale.value_and_grad(loss_fn))`, or use `autocast` inside the function.

    As a decorator it takes the dtype: `@jmpscale.autocast(dtype=jnp.bfloat16)`.

    Args:
      fun: the loss function, or any function that `jax.jit` accepts. It is called once per call of the new function, to
        trace it. Arguments and results may be any pytrees, Equinox modules, Flax NNX objects and Python objects. Pass
        the NNX objects and variables that the function changes as arguments; Flax raises if it closes over them.
      dtype: `jnp.float16` or `jnp.bfloat16`.

    Returns:
      A function with the signature of `fun`, whose results have the same structure, shapes, dtypes and shardings. It
      can be transformed like `fun`: differentiated, batched, compiled, sharded.

    Raises:
      TypeError: `fun` is not callable, `dtype` is not float16 or bfloat16, an argument is a `jax.Ref`, or `fun` stores
        a traced value in a Python object among its arguments or results.

    Warns:
      UserWarning: no matmul or convolution of `fun` is converted, with the reason; or `fun` contains complex matmuls,
        which remain complex64. Both are checked when `fun` is first traced.

    The rule follows `torch.autocast` and NVIDIA's "Mixed Precision Training" (arXiv:1710.03740).

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> predict = jmpscale.autocast(lambda w, x: jnp.tanh(x @ w))
    >>> predict(jnp.eye(2), jnp.full((1, 2), 1.001)) == jnp.tanh(jnp.float16(1.001).astype(jnp.float32))
    Array([[ True,  True]], dtype=bool)
    """
    half = _check_dtype(dtype)
    if fun is None:
        return functools.partial(autocast, dtype=half)
    _check_function(fun)
    checks = _Checks(describe_function(fun), half)

    @functools.wraps(fun, updated=())
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        check_no_refs(args, "args")
        check_no_refs(kwargs, "kwargs")
        return lift_nnx(functools.partial(_run_in_half, checks), functools.partial(_call, fun), args, kwargs)

    return autocast_fun


def _call(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return fun(*args, **kwargs)


class _Checks:
    """The checks of one autocast function, which run when it is first traced."""

    def __init__(self, name: str, half: np.dtype) -> None:
        self.name, self.half, self._have_run = name, half, False

    def run_once(self, jaxpr: core.Jaxpr, *, is_unchanged: bool) -> None:
        """Warns if no matmul is converted, or no complex matmul."""
        if self._have_run:
            return
        self._have_run = True
        kept = [*_kept_matmuls(jaxpr, self.half)]
        if is_unchanged:
            warn_unchanged(self.name, self.half, kept, _setting_that_keeps())
        else:
            warn_about_complex(self.name, self.half, kept)


# The functions below are not defined inside autocast, so that a pickled function does not contain _MEMOS.


def _run_in_half(checks: _Checks, fun: Callable[..., PyTree], *args: PyTree) -> PyTree:
    traced = trace(fun, *args, name=f"{checks.name} in jmpscale.autocast")
    jaxpr = _in_half(traced.jaxpr, checks.half)
    checks.run_once(traced.jaxpr, is_unchanged=jaxpr is traced.jaxpr)
    return traced.unflatten(traced._replace(jaxpr=jaxpr).evaluate())


def _in_half(jaxpr: core.Jaxpr, half: np.dtype) -> core.Jaxpr:
    return rewrite(jaxpr, functools.partial(matmul_in_half, half), _MEMOS[half])


def matmul_in_half(half: np.dtype, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns the equations that compute a matmul in half precision, or `[eqn]` if it runs as written."""
    if eqn.primitive.name not in MATMULS or reason_to_keep(half, eqn):
        return [eqn]
    # Each matmul converts its own operands, even if another one converts them too: the derivative of a shared
    # conversion would add the gradients of the two matmuls in half precision. XLA merges equal conversions.
    conversions, operands = [], []
    for operand in eqn.invars[:2]:
        if _dtype(operand) == half:
            operands.append(operand)
        else:
            operands.append(_variable_like(operand, half))
            conversions += _apply(_convert, eqn, operand, operands[-1])
    (out,) = eqn.outvars
    result = _variable_like(out, half)
    if half == np.float16:  # a result that is infinite in bfloat16 is infinite in float32, too
        finish = _apply(_with_nan_for_infinity, eqn, result, out)
    elif _dtype(out) == half:
        result, finish = out, []
    else:
        finish = _apply(_convert, eqn, result, out)
    preferred = {"preferred_element_type": half} if "preferred_element_type" in eqn.params else {}
    matmul = eqn.replace(invars=[*operands, *eqn.invars[2:]], outvars=[result], params=eqn.params | preferred)
    return [*conversions, matmul, *finish]


def _convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.convert_element_type(x, dtype)


def _with_nan_for_infinity(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts a result, with NaN for infinity, which later arithmetic could hide: 1 / infinity is 0.

    The difference of an infinity and itself is NaN. For any other y, y - (y - y) is y, bit for bit. XLA fuses these
    operations into the readers of the result, whereas the derivative of a select would store a mask.
    """
    y = _convert(x, dtype)
    fixed = jax.lax.stop_gradient(y)
    return y - (fixed - fixed)


def _kept_matmuls(jaxpr: core.Jaxpr, half: np.dtype) -> Iterator[tuple[Found, Kept]]:
    """Yields the matmuls of a jaxpr that run as written, and the reasons."""
    for found in equations(jaxpr):
        if found.eqn.primitive.name not in MATMULS:
            continue
        if reason := reason_to_keep(half, found.eqn) or (Kept.HELD if found.holder else None):
            yield found, reason


def _setting_that_keeps() -> str | None:
    """Returns the setting of jax_default_matmul_precision if matmuls without a precision run as written under it."""
    operand = jax.ShapeDtypeStruct((2, 2), np.float32)
    precision = jax.make_jaxpr(jax.lax.dot)(operand, operand).eqns[0].params["precision"]
    return jax.config.values["jax_default_matmul_precision"] if _keeps_precision(precision) else None


def reason_to_keep(half: np.dtype, eqn: core.JaxprEqn) -> Kept | None:
    """Returns why a matmul or convolution runs as written, or None if autocast converts it."""
    operands = [_dtype(x) for x in eqn.invars[:2]]
    if any(jnp.issubdtype(dtype, np.complexfloating) for dtype in operands):
        return Kept.PRECISION if _keeps_precision(eqn.params["precision"]) else Kept.COMPLEX
    # The user chose wider operands, or the other half-precision dtype.
    if _FLOAT32 not in operands or not all(dtype in (_FLOAT32, half) or _is_whole(dtype) for dtype in operands):
        return Kept.DTYPE
    if _dtype(eqn.outvars[0]) not in (_FLOAT32, half):
        return Kept.DTYPE
    if eqn.primitive.name == "dot_general" and (shape_reason := _reason_by_shape(eqn)) is not None:
        return shape_reason
    return Kept.PRECISION if _keeps_precision(eqn.params["precision"]) else None


def _reason_by_shape(eqn: core.JaxprEqn) -> Kept | None:
    lhs, rhs = (type_of(x).shape for x in eqn.invars[:2])
    contracting, batch = eqn.params["dimension_numbers"]
    free = [_size(shape, excluded=(*c, *b)) for shape, c, b in zip((lhs, rhs), contracting, batch, strict=True)]
    if all(size == 1 for size in free):
        return Kept.INNER_PRODUCT
    return Kept.OUTER_PRODUCT if all(lhs[axis] == 1 for axis in contracting[0]) else None


def _is_whole(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, np.integer) or dtype == np.dtype(bool)


def _dtype(x: Any) -> np.dtype:
    return type_of(x).dtype


def _size(shape: Sequence[int], excluded: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in excluded)


def _keeps_precision(precision: object) -> bool:
    """Tests whether the user has requested the highest precision, or an algorithm, for a matmul."""
    if isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return True
    operands = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in operands


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
        like = y if _dtype(out) == _dtype(y) else x
        variables.setdefault(out, core.Var(like.aval))
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


@functools.cache
def _scalar_jaxpr(fun: Conversion, x: np.dtype, y: np.dtype) -> core.Jaxpr:
    """Returns the equations of `fun` for a scalar, as this version of JAX writes them."""
    return jax.make_jaxpr(lambda scalar: fun(scalar, y))(jax.ShapeDtypeStruct((), x)).jaxpr


def _check_function(fun: object) -> None:
    if callable(fun) and _as_half(fun) is None:
        return
    remedy = "Pass it first" if _as_half(fun) is None else "Pass the dtype by its name"
    raise TypeError(
        f"fun must be the loss function, got {describe_function(fun)}. {remedy}: autocast(loss_fn, dtype=...)."
    )


def _check_dtype(dtype: object) -> np.dtype:
    half = _as_half(dtype)
    if half is None:
        raise TypeError(
            f"dtype must be float16 or bfloat16, got {describe_function(dtype)}. Pass jnp.float16, with loss scaling, "
            "or jnp.bfloat16."
        )
    return half


def _as_half(dtype: object) -> np.dtype | None:
    if not isinstance(dtype, (str, type, np.dtype)):
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        return None
    return found if found in _HALF else None
