"""`autocast`, which runs the matmuls and convolutions of a float32 function in half precision."""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmpscale._autocast.kept import (
    FLOAT32,
    HALF,
    Group,
    Kept,
    groups_of_matmuls,
    most_kept_by_rules,
    setting_that_keeps,
)
from jmpscale._autocast.observation import is_observed, observed_result_dtype, report_kept
from jmpscale._autocast.rules import in_half
from jmpscale._base.arguments import as_dtype
from jmpscale._base.options import requires_names_in
from jmpscale._base.text import describe
from jmpscale._base.trace import lift_nnx, trace
from jmpscale._base.tree import PyTree
from jmpscale._base.warn import warn_user

P = ParamSpec("P")
T = TypeVar("T")


class _Decorator(functools.partial[Any]):
    """`autocast` with a dtype."""

    def __enter__(self) -> None:
        raise TypeError("autocast is not a context manager. Wrap the loss function: jmpscale.autocast(loss_fn).")

    def __exit__(self, *args: object) -> None: ...


@overload
def autocast(
    fun: Callable[P, T], *, dtype: DTypeLike = jnp.float16, result_dtype: DTypeLike | None = None
) -> Callable[P, T]: ...
@overload
def autocast(
    *, dtype: DTypeLike = jnp.float16, result_dtype: DTypeLike | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
@requires_names_in("autocast(fun)(*args)")
def autocast(
    fun: Callable[..., Any] | None = None, *, dtype: DTypeLike = jnp.float16, result_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Creates a function that runs the matmuls and convolutions of `fun` in half precision.

    Write `fun` in float32, with float32 parameters. The float32 operands of matmuls and convolutions are converted to
    `dtype`, and the results are converted back to float32 at once. The other operand may be in `dtype` already, or hold
    integers or booleans. All other operations run as written, so softmax, normalization, masks of -1e9 and epsilons of
    1e-8 are as accurate as in float32. The gradients of float32 parameters are float32.

    With `result_dtype=jnp.float32`, the results of matmuls remain in float32, in the backward pass, too: only operands
    and cotangents are rounded, and no result overflows. Convolutions have results in half precision in both forms. The
    guide says when to choose this form, which moves more bytes.

    A float16 result that is infinite becomes NaN, because later arithmetic could hide infinity: 1 / infinity is 0. An
    operand that is infinite in float16 makes the result NaN, too. The loss is then NaN, unless a comparison hides it,
    and a step whose loss is NaN is skipped. In float16, gradients underflow without loss scaling: differentiate with
    `jmpscale.value_and_grad`, or use `scaled_backward`. Wrap the loss function, not the training step: some optimizers
    contain matmuls, too.

    Contractions of at most 4 elements, as in outer products and transformed coordinates, and inner products, such as
    `jnp.vdot(w, w)`, remain in float32: half precision would make them less accurate and not faster. In a convolution,
    a contraction has the elements of a window, in all input channels of a group. In the backward pass a matmul has the
    precision of the matmul from which it derives, whatever its own size. The documentation lists programs that must
    stay in float32, such as sums and gathers that are written as larger matmuls. `precision="highest"` keeps a matmul
    in float32, and so does `jax.default_matmul_precision("highest")` around it.

    Matmuls of other dtypes, such as complex64, kernels (Pallas, FFI), solvers, and functions with their own derivative
    rule (`jax.custom_vjp`, `jax.custom_jvp`) run as written. To convert the matmuls of such a function, wrap `fun`
    after differentiation, `autocast(jmpscale.value_and_grad(loss_fn))`, or use `autocast` inside the function. JAX
    cannot transpose the check for infinity, so if a solver transposes the function, as `gmres`, `bicgstab` and
    `jax.linear_transpose` do, pass `result_dtype=jnp.float32` or `dtype=jnp.bfloat16`; otherwise JAX raises
    "Transpose rule for 'stop_gradient' not implemented".

    As a decorator it takes the options: `@jmpscale.autocast(dtype=jnp.bfloat16)`.

    Args:
      fun: the loss function, or any function that `jax.jit` accepts. It is traced in every call. Arguments and results
        may be any pytrees, Equinox modules, Flax NNX objects and Python objects. Pass the NNX objects and variables
        that the function changes as arguments; Flax raises if it closes over them.
      dtype: `jnp.float16` or `jnp.bfloat16`.
      result_dtype: the dtype of the results of matmuls, before they are converted to float32: `jnp.float32`, or None
        for `dtype`.

    Returns:
      A function with the signature of `fun`, whose results have the same structure, shapes, dtypes and shardings. It
      can be transformed like `fun`: differentiated, batched, compiled, sharded.

    Raises:
      TypeError: `fun` is not callable, `dtype` is not float16 or bfloat16, `result_dtype` is another dtype than float32
        and `dtype`, or an argument is a `jax.Ref`.

    Warns:
      UserWarning: no matmul or convolution is converted when `fun` is first traced, unless all of them are small or in
        half precision already, or one has `precision="highest"`; or most multiplications stay in float32 because they
        are in functions with their own derivative rules. The warning names the reasons.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> predict = jmpscale.autocast(lambda w, x: jnp.tanh(x @ w))
    >>> bool((predict(jnp.eye(8), jnp.full((1, 8), 1.001)) == jnp.tanh(jnp.float16(1.001).astype(jnp.float32))).all())
    True
    >>> large = jnp.full((8, 8), 300.0)
    >>> matmul = jmpscale.autocast(jnp.matmul, result_dtype=jnp.float32)
    >>> float(matmul(large, large)[0, 0])  # the largest number of float16 is 65504
    720000.0
    """
    half = as_dtype(dtype)
    if half is None or half not in HALF:
        raise TypeError(f"dtype must be float16 or bfloat16, got {describe(dtype)}. Pass jnp.float16 or jnp.bfloat16.")
    if result_dtype is not None and as_dtype(result_dtype) not in (half, FLOAT32):
        got = describe(result_dtype)
        raise TypeError(f"result_dtype must be float32, or {half} like dtype, got {got}. Pass jnp.float32.")
    if fun is None:
        return _Decorator(autocast, dtype=half, result_dtype=result_dtype)
    name, is_checked = describe(fun), False
    chosen = half if result_dtype is None else np.dtype(result_dtype)
    if not callable(fun) or as_dtype(fun) in HALF:
        raise TypeError(f"fun must be the loss function, got {name}. Call autocast(loss_fn, dtype=...).")

    def run_in_half(fun: Callable[..., PyTree], *args: PyTree) -> PyTree:
        nonlocal is_checked
        traced = trace(fun, *args, name=f"{name} in jmpscale.autocast")
        jaxpr = in_half(traced.jaxpr, half, observed_result_dtype(chosen))
        if is_observed():
            groups = groups_of_matmuls(traced.jaxpr, half)
            report_kept([f"{_count(group, groups)}: {group.explanation()}" for group in _mistakes(groups)])
        if not is_checked:
            is_checked = True
            groups = groups_of_matmuls(traced.jaxpr, half)
            (_warn_without_effect if jaxpr is traced.jaxpr else _warn_of_rules)(name, groups)
        return traced.unflatten(traced._replace(jaxpr=jaxpr).evaluate())

    @functools.wraps(fun, updated=())
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        return lift_nnx(run_in_half, lambda args, kwargs: fun(*args, **kwargs), args, kwargs)

    return autocast_fun


def _warn_without_effect(name: str, groups: list[Group]) -> None:
    """Warns that no matmul of a function is converted to half precision, with the reasons that may be mistakes."""
    mistakes = _mistakes(groups)
    is_requested = setting_that_keeps() is None and any(group.reason is Kept.PRECISION for group in groups)
    if is_requested or (groups and not mistakes):
        return
    sentences = [] if groups else ["It contains none; kernels, sparse matmuls and compiled functions run as written."]
    sentences += [f"{_count(group, groups)}: {group.explanation()}" for group in mistakes]
    warn_user(f"autocast has no effect: it converts no matmul or convolution of {name}. {' '.join(sentences)}")


def _warn_of_rules(name: str, groups: list[Group]) -> None:
    """Warns if most of the work of a function stays in float32 because of derivative rules."""
    kept = most_kept_by_rules(groups)
    if not kept:
        return
    work, total = (sum(group.multiplications for group in some) for some in (kept, groups))
    sentences = [f"{_count(group, groups)}: {group.explanation()}" for group in kept]
    warn_user(
        f"autocast leaves {math.floor(100 * work / total)}% of the multiplications of {name} in float32. "
        f'{" ".join(sentences)} If they must be in float32, set precision="highest".'
    )


def _mistakes(groups: list[Group]) -> list[Group]:
    """Returns the matmuls that run as written for a reason that the user may not know."""
    reasons = [Kept.DTYPE, Kept.HELD]
    if setting_that_keeps() is not None:  # otherwise the matmul itself requests a precision
        reasons.append(Kept.PRECISION)
    return [group for group in groups if group.reason in reasons]


def _count(group: Group, groups: list[Group]) -> str:
    return f"{group.number} of {sum(other.number for other in groups)} matmuls, at {group.line}"
