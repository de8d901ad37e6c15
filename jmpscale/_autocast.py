"""Runs the matmuls and convolutions of a float32 function in half precision.

The function is traced, and in its equations each matmul

    c:f32 = dot_general a:f32 b:f32

becomes four equations, which define the same variable:

    x:f16 = convert_element_type a
    y:f16 = convert_element_type b
    z:f16 = dot_general x y
    c:f32 = convert_element_type z

No other equation changes. Differentiation, batching and partitioning are left to JAX, before or after the rewriting.
XLA fuses the conversions into the operations around them.
"""

import contextlib
import contextvars
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.typing import DTypeLike

from jmpscale._base.check import warn_user
from jmpscale._base.jaxpr import Memo, equations, lift_nnx, rewrite, trace
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, check_no_refs

P = ParamSpec("P")
T = TypeVar("T")

MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
_HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
# Results of earlier calls. A function under jax.jit has one jaxpr in all of its calls, and JAX finds the compiled
# program of the rewritten jaxpr only if that is one object, too.
_MEMOS: dict[np.dtype, Memo] = {dtype: weakref.WeakKeyDictionary() for dtype in _HALF}
_IS_KEPT: contextvars.ContextVar[Callable[[core.JaxprEqn], bool] | None] = contextvars.ContextVar(
    "is_kept", default=None
)


def autocast(fun: Callable[P, T], dtype: DTypeLike = jnp.float16) -> Callable[P, T]:
    """Creates a function that runs the matmuls and convolutions of `fun` in half precision.

    Write `fun` in float32, with float32 parameters. Where both operands of a matmul or convolution are float32, they
    are converted to `dtype`, the result is computed in `dtype`, and it is converted back to float32 at once. All other
    operations run as written, so softmax, normalization, losses, masks of -1e9 and epsilons of 1e-8 are as accurate as
    in float32. The gradients of float32 parameters are float32.

    Wrap the loss function, not the training step: some optimizers contain matmuls, too. In float16, gradients
    underflow without loss scaling: differentiate with `jmpscale.value_and_grad`, or use `loss_scaled`. bfloat16 needs
    no scaling.

    Some operations of these kinds remain in float32. Half precision would make them less accurate and not faster:

    - inner products, such as `jnp.vdot(w, w)`, which are sums;
    - outer products, such as positions times frequencies in rotary embeddings, which are element-wise products.

    `precision="highest"` keeps a matmul in float32, and so does `jax.default_matmul_precision("highest")` around it.
    Matmuls of other dtypes, kernels (Pallas, FFI), solvers, and functions with their own derivative rule
    (`jax.custom_vjp`, `jax.custom_jvp`) run as written. To convert the matmuls of such a function, wrap `fun` after
    differentiation, `autocast(jmpscale.value_and_grad(loss_fn))`, or use `autocast` inside the function.

    Args:
      fun: the loss function, or any function that `jax.jit` accepts. It is called once per call of the new function, to
        trace it. Arguments and results may be any pytrees, Equinox modules, Flax NNX objects and Python objects. Pass
        NNX objects that the function changes as arguments; JAX raises if it closes over them.
      dtype: `jnp.float16` or `jnp.bfloat16`.

    Returns:
      A function with the signature of `fun`, whose results have the same structure, shapes, dtypes and shardings. It
      can be transformed like `fun`: differentiated, batched, compiled, sharded.

    Raises:
      TypeError: `fun` is not callable, `dtype` is not float16 or bfloat16, or an argument is a `jax.Ref`.

    Warns:
      UserWarning: `fun` contains no float32 matmul or convolution that can be converted.

    The rule follows `torch.autocast` and NVIDIA's "Mixed Precision Training" (arXiv:1710.03740).

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> predict = jmpscale.autocast(lambda w, x: jnp.tanh(x @ w))
    >>> predict(jnp.eye(2), jnp.full((1, 2), 1.001)) == jnp.tanh(jnp.float16(1.001).astype(jnp.float32))
    Array([[ True,  True]], dtype=bool)
    """
    half = _check_arguments(fun, dtype)
    has_warned = False

    def run_in_half(call: Callable[..., PyTree], *args: PyTree) -> PyTree:
        nonlocal has_warned
        traced = trace(call, *args)
        jaxpr = _in_half(traced.jaxpr, half)
        if jaxpr is traced.jaxpr and not has_warned and not any(map(is_float32_matmul, equations(jaxpr))):
            has_warned = True
            _warn_unchanged(fun, half)
        return traced.unflatten(traced._replace(jaxpr=jaxpr).evaluate())

    @functools.wraps(fun, updated=())
    def autocast_fun(*args: P.args, **kwargs: P.kwargs) -> T:
        check_no_refs(args, "args")
        check_no_refs(kwargs, "kwargs")
        return lift_nnx(run_in_half, functools.partial(_call, fun), args, kwargs)

    return autocast_fun


@contextlib.contextmanager
def matmuls_in_float32(is_kept: Callable[[core.JaxprEqn], bool]) -> Iterator[None]:
    """Leaves matmuls as they are in functions of `autocast` that are called inside of this context.

    A compiled function is traced again, because the metadata of operations is part of the key by which JAX finds
    earlier traces.
    """
    token = _IS_KEPT.set(is_kept)
    try:
        with set_xla_metadata(jmpscale_trial=str(id(token))):
            yield
    finally:
        _IS_KEPT.reset(token)


def _in_half(jaxpr: core.Jaxpr, half: np.dtype) -> core.Jaxpr:
    is_kept = _IS_KEPT.get()
    if is_kept is None:
        return rewrite(jaxpr, functools.partial(_rewrite_matmul, half), _MEMOS[half])
    return rewrite(jaxpr, lambda eqn: [eqn] if is_kept(eqn) else _rewrite_matmul(half, eqn), {})


def _call(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return fun(*args, **kwargs)


def _rewrite_matmul(half: np.dtype, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns the equations that compute a matmul in half precision, or the equation itself."""
    if not is_float32_matmul(eqn) or keeps_precision(eqn.params["precision"]):
        return [eqn]
    # Each matmul converts its own operands, even if another one converts them too: the derivative of a shared
    # conversion would add the gradients of the two matmuls in half precision. XLA merges equal conversions.
    conversions, operands = [], []
    for operand in eqn.invars[:2]:
        operands.append(_variable_like(operand, half))
        conversions.append(_convert(eqn, operand, operands[-1]))
    (out,) = eqn.outvars
    result = _variable_like(out, half)
    preferred = {"preferred_element_type": half} if "preferred_element_type" in eqn.params else {}
    matmul = eqn.replace(invars=[*operands, *eqn.invars[2:]], outvars=[result], params=eqn.params | preferred)
    return [*conversions, matmul, _convert(eqn, result, out)]


def is_float32_matmul(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is a matmul or convolution that would be faster in half precision."""
    if eqn.primitive.name not in MATMULS:
        return False
    types: list[Any] = [x.aval for x in (*eqn.invars[:2], *eqn.outvars)]
    if any(x.dtype != np.float32 for x in types):
        return False
    if eqn.primitive.name != "dot_general":
        return True
    lhs, rhs = (x.shape for x in types[:2])
    contracting, batch = eqn.params["dimension_numbers"]
    free = [_size(shape, excluded=(*c, *b)) for shape, c, b in zip((lhs, rhs), contracting, batch, strict=True)]
    is_inner_product = all(size == 1 for size in free)
    is_outer_product = all(lhs[axis] == 1 for axis in contracting[0])
    return not (is_inner_product or is_outer_product)


def _size(shape: Sequence[int], excluded: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in excluded)


def keeps_precision(precision: object) -> bool:
    """Tests whether the user has requested the highest precision, or an algorithm, for a matmul."""
    if isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return True
    operands = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in operands


def _variable_like(x: Any, dtype: np.dtype) -> core.Var:
    """Returns a new variable with the shape, sharding and varying axes of another one."""
    return core.Var(x.aval.update(dtype=dtype, weak_type=False))


def _convert(matmul: core.JaxprEqn, x: Any, y: Any) -> core.JaxprEqn:
    """Returns the equation `y = convert_element_type x`, with the mesh, scopes and source line of a matmul."""
    conversion = _conversion_to(y.aval.dtype)
    params = conversion.params | {"weak_type": y.aval.weak_type}
    return matmul.replace(
        invars=[x], outvars=[y], primitive=conversion.primitive, params=params, effects=conversion.effects
    )


@functools.cache
def _conversion_to(dtype: np.dtype) -> core.JaxprEqn:
    """Returns a conversion as JAX writes it; the parameters differ between versions."""
    other = jax.ShapeDtypeStruct((), np.float32 if dtype in _HALF else np.float16)
    return jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, dtype))(other).eqns[0]


def _check_arguments(fun: object, dtype: object) -> np.dtype:
    """Returns the dtype, or raises."""
    if not callable(fun) or _as_half(fun) is not None:
        remedy = "Pass" if _as_half(fun) is None else "The arguments are swapped: pass"
        raise TypeError(f"fun must be the loss function, got {_describe(fun)}. {remedy} autocast(loss_fn, dtype).")
    half = _as_half(dtype)
    if half is None:
        raise TypeError(
            f"dtype must be float16 or bfloat16, got {_describe(dtype)}. Pass jnp.float16, with loss scaling, or "
            "jnp.bfloat16."
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


def _describe(value: object) -> str:
    return getattr(value, "__name__", None) or describe(value)


def _warn_unchanged(fun: Callable[..., Any], half: np.dtype) -> None:
    warn_user(
        f"autocast has no effect: it found no float32 matmul or convolution in {_describe(fun)} that it can convert to "
        f"{half}. If the function is in half precision already, remove autocast; float32 parameters and inputs are "
        "converted by it. If the matmuls are inside a function with its own derivative rule, such as jax.custom_vjp, "
        "use autocast inside that function."
    )
