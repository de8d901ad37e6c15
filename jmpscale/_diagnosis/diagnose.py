"""`diagnose`, which measures what half precision does to a loss function and its gradients."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmpscale._algorithm.grad import value_and_grad
from jmpscale._base.frameworks import is_nnx_object
from jmpscale._base.options import requires_names_in
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, find_instances, flatten_gradients
from jmpscale._diagnosis.arguments import accepted_errors, check_arguments, gradients_by_argument, named_arguments
from jmpscale._diagnosis.examine import examine
from jmpscale._diagnosis.tell.report import Diagnosis
from jmpscale._diagnosis.trace.choices import find_choices
from jmpscale._diagnosis.trace.trace_loss import trace_loss
from jmpscale._diagnosis.trace.trace_observed import trace_observed, trace_with_float32_results
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._get_scaler import find_scaler
from jmpscale._state import ScalerState, is_scaler, scale_on_host, static

Function = Callable[..., Any]
_OF_A_STEP = "For a training step, call diagnose_step(train_step) with the arguments of the step."


@requires_names_in("diagnose(fun)(scaler, *args)")
def diagnose(
    fun: Function,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Function = jax.value_and_grad,
    accepted_error: float | None = None,
) -> Callable[..., Diagnosis]:
    """Creates a function that measures what half precision does to a training step, and finds the lines to change.

    Call it as `jmpscale.value_and_grad` is called, with the same options, outside of `jax.jit`. It compares the loss
    and the gradients with the same program in float32, at power-of-two loss scales. If no scale fits, it finds a
    minimal set of lines of the program that must compute in float32, and the reason. Each answer comes from a run of
    the program, which is compiled with an array that says which lines compute in float32. Equal layers are compiled
    once.

    Compiled functions, loops, branches, checkpointed functions, custom derivative rules and `jax.shard_map` are
    entered. Kernels, linear solvers and `jax.pure_callback` run as they are written. The summary begins with those in
    half precision on which the loss or a gradient depends. Callbacks without results, such as `jax.debug.print`, do not
    run.

    If the loss function is defined inside a training step, use `diagnose_step`. A loss function with collectives needs
    its axis: pass `jax.vmap(fun, in_axes=None, out_axes=None, axis_name="data", axis_size=1)`.

    A diagnosis needs as much memory as the step in float32, and on a CPU one to five times the time of compiling and
    running it, if a scale fits. On a CPU, diagnose a large model with a smaller batch. If a program runs in several
    processes, all of them must call the diagnosis.

    Args:
      fun: the loss function, as for `value_and_grad`; `autocast` may be applied to it. For a training step that is
        written with `scale` and `unscale`, pass the loss function without them. If `fun` itself multiplies by a scale,
        as `scaled_backward` does, that scale is a constant factor, and the diagnosis is about the scaler.
      argnums: which positional arguments of `fun` to differentiate with respect to.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data.
      transform: the `value_and_grad` of the model's framework.
      accepted_error: the largest relative error of the loss, and of a gradient, that you accept, at most 0.99. A larger
        one is wrong, and the lines that make it must compute in float32; the summary has only the size of a smaller
        one. By default, a loss is wrong by more than 3%, and a gradient by more than 50%; of a gradient that is wrong
        by 5% to 50%, the worst lines are named, because only training shows whether they matter.

    Returns:
      `f(scaler, *args, **kwargs) -> Diagnosis`. The first argument is a scaler, or any pytree that contains exactly
      one. Copies of it among the other arguments get the same scale. Without a scaler, as in bfloat16, call
      `f(*args, **kwargs)`: the loss is not scaled, and the diagnosis is about rounding, overflow and underflow only.
      Flax NNX objects among the arguments are not changed.

    Raises:
      TypeError: `fun` is not callable, does not accept the arguments, or does not return a loss; an argument is
        abstract or traced; an argument, or a value that `fun` closes over, is a `jax.Ref`; or `fun` creates one, or
        reads values by `jax.experimental.io_callback`.
      ValueError: the first argument contains more than one scaler, or a batch of scalers; an argument was donated to a
        compiled function; or `accepted_error` is not between 1e-6 and 0.99.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> loss_fn = lambda w, x: jnp.mean(((x @ w) * 1e-6).astype(jnp.float32))
    >>> w, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4), jnp.float16)
    >>> diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), w, x)
    >>> diagnosis.fitting_scales
    (16.0, 524288.0)
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be the loss function, got {describe(fun)}. Its arguments are those of the new function: "
            "diagnose(loss_fn)(params, batch), or with a scaler, diagnose(loss_fn)(scaler, params, batch)."
        )
    accepts = accepted_errors(accepted_error)
    value_and_grad(fun, argnums, has_aux, transform=transform)  # checks the options
    differentiated = value_and_grad(_checked(fun, has_aux), argnums, has_aux, transform=transform)

    def diagnose_fun(*args: Any, **kwargs: Any) -> Diagnosis:
        has_scaler = bool(args and find_instances(args[0], ScalerState))
        state = static(1.0)
        if has_scaler:
            state, args = find_scaler(args[0]), args[1:]
        _check_call(fun, args, kwargs, has_scaler)
        check_arguments({"scaler": state, "args": args, "kwargs": kwargs}, "diagnose")
        scale_on_host(state)
        names: list[str] = []  # of the gradients

        def loss_and_grads(traced: ScalerState, args: PyTree, kwargs: PyTree) -> tuple[Any, PyTree]:
            if has_scaler:
                args, kwargs = _with_scale((args, kwargs), state, traced.loss_scale)
            value, grads = differentiated(traced, *args, **kwargs)
            gradients = set(map(id, flatten_gradients(grads)[0]))
            named = gradients_by_argument(grads, argnums, fun, args, kwargs)
            names[:] = [name for name, leaf in named if id(leaf) in gradients]
            return value[0] if has_aux else value, grads

        # The diagnosis looks for non-finite values, for which JAX must not raise, and enters compiled functions.
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            arguments = tuple(named_arguments(fun, args, kwargs))
            names_of = {id(x): name for name, x in arguments}
            trace = functools.partial(trace_loss, loss_and_grads, args, kwargs, names_of)
            program, kept = trace_observed(trace)
            choices = tuple(find_choices(program.jaxpr))
            step = TracedStep(program, tuple(names), arguments=arguments, choices=choices, kept=kept)
            scaler = state if has_scaler else None
            return examine(step, scaler, lambda: trace_with_float32_results(trace), accepts)

    diagnose_fun.__name__ = f"diagnose_of_{getattr(fun, '__name__', 'fun')}"
    return diagnose_fun


def _check_call(fun: Function, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], has_scaler: bool) -> None:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # fun has none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        which, remedy = "its arguments", _OF_A_STEP
        if has_scaler:
            which = "the arguments that follow the first one, which contains the scaler"
            remedy = f"If fun takes the first argument, too, pass it twice. {_OF_A_STEP}"
        raise TypeError(f"fun must accept {which}, but {describe(fun)} does not: {error}. {remedy}") from error


def _checked(fun: Function, has_aux: bool) -> Function:
    """Returns a loss function that raises if it returns a container in place of a loss, as a training step does."""

    @functools.wraps(fun, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        loss = out[0] if has_aux and isinstance(out, (tuple, list)) else out
        if isinstance(loss, (tuple, list, dict)):
            raise TypeError(f"fun must return the loss, got {describe(loss)} from {describe(fun)}. {_OF_A_STEP}")
        return out

    return checked


def _with_scale(arguments: PyTree, state: ScalerState, loss_scale: jax.Array) -> PyTree:
    """Returns arguments with another scale in copies of the scaler, as for the inner gradient of a penalty."""

    def replaced(x: Any) -> Any:
        is_copy = is_scaler(x) and np.array_equal(x.loss_scale, state.loss_scale)
        return x._replace(loss_scale=loss_scale) if is_copy else x

    return jax.tree.map(replaced, arguments, is_leaf=lambda x: is_scaler(x) or is_nnx_object(x))
