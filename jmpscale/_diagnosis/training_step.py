"""`diagnose_step`, which diagnoses a training step as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmpscale._base.compat import axis_names_in_scope
from jmpscale._base.frameworks import is_nnx
from jmpscale._base.gradients import GradientCall, ScaledCall, observed_by
from jmpscale._base.text import describe
from jmpscale._base.trace import trace
from jmpscale._base.tree import as_array, is_array, is_traced
from jmpscale._diagnosis.api import diagnose
from jmpscale._diagnosis.report import Diagnosis
from jmpscale._diagnosis.scaled_call import differentiated_call
from jmpscale._diagnosis.step import check_concrete, copied


class _Found(BaseException):  # a step may catch every Exception
    """Ends a step at the call to diagnose."""

    def __init__(self, call: GradientCall, axes: dict[str, int]) -> None:
        super().__init__()
        self.call, self.axes = call, axes


def diagnose_step(step: Callable[..., Any]) -> Callable[..., Diagnosis]:
    """Creates a function that diagnoses a training step as it is, at its first `jmpscale.value_and_grad`.

    Use it if the loss function is defined inside the step, or if the step prepares its arguments. The step runs with
    the arguments of the call, up to the first call of `value_and_grad`, and `diagnose` receives that call. If the step
    differentiates a function of `scaled_backward` by itself, this call counts as well, unless the function takes Flax
    NNX objects or closes over what is differentiated.

    The step may be compiled, donate its arguments, accumulate gradients in `jax.lax.scan`, or be a whole run in one
    `jax.jit`. Up to the gradient it runs without being compiled, one operation at a time, and a loop one iteration at a
    time. So a generation of text or a rollout before the gradient can take minutes: then diagnose the function
    that follows it. Prints, and writes to files or to global variables, before the gradient happen. Containers and
    Flax NNX objects among the arguments are copied.

    Args:
      step: the training step. It computes the gradient outside of `jax.pmap`, `jax.shard_map` and `jax.vmap`, in which
        arrays have no values. If it is mapped over devices, pass the mapped function instead, on one device:
        `jax.vmap(device_step, in_axes=None, out_axes=None, axis_name="data", axis_size=1)`.

    Returns:
      `f(*args, **kwargs) -> Diagnosis`, with the arguments of the step.

    Raises:
      TypeError: `step` is not callable; it computes no gradient with arguments that have values; a call of a function
        of `scaled_backward` does not show what is differentiated; or as `diagnose`.
      ValueError: as `diagnose`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> @jax.jit
    ... def train_step(w, scaler, x):
    ...     def loss_fn(w):
    ...         return jnp.mean(((x @ w) * 1e-6).astype(jnp.float32))
    ...
    ...     loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, w)
    ...     return w - grads.astype(w.dtype), jmpscale.update(scaler, jmpscale.all_finite(grads))
    >>> w, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4), jnp.float16)
    >>> jmpscale.diagnose_step(train_step)(w, jmpscale.dynamic(), x).fitting_scales
    (16.0, 524288.0)
    """
    if not callable(step):
        raise TypeError(f"step must be the training step, got {describe(step)}. Call diagnose_step(step)(*args).")

    def diagnose_step_of(*args: Any, **kwargs: Any) -> Diagnosis:
        check_concrete({"args": args, "kwargs": kwargs})
        call, axes = _first_gradient(step, *copied((args, kwargs)))

        def fun(*args: Any, **kwargs: Any) -> Any:
            run: Callable[[], Any] = lambda: call.fun(*args, **kwargs)  # noqa: E731
            for name, size in axes.items():
                run = jax.vmap(run, in_axes=(), out_axes=None, axis_name=name, axis_size=size)
            return run()

        run = diagnose(fun if axes else call.fun, call.argnums, call.has_aux, transform=call.transform)
        try:
            return run(call.scaler, *call.args, **call.kwargs)
        except jax.errors.UnexpectedTracerError as error:  # fun closes over them
            raise _mapped(step) from error

    diagnose_step_of.__name__ = f"diagnose_step_of_{getattr(step, '__name__', 'step')}"
    return diagnose_step_of


def _first_gradient(step: Callable[..., Any], args: Any, kwargs: Any) -> tuple[GradientCall, dict[str, int]]:
    """Returns the first call of `value_and_grad` whose arguments have values, and the sizes of the axes around it."""
    is_mapped = False

    def observer(observed: GradientCall | ScaledCall) -> None:
        nonlocal is_mapped
        call = differentiated_call(observed) if isinstance(observed, ScaledCall) else observed
        if call is None:
            return
        axes = {name: int(jax.lax.psum(1, name)) for name in axis_names_in_scope()}
        if set(axes.values()) == {1}:
            call = _on_one_device(call, tuple(axes))
        if any(map(is_traced, jax.tree.leaves((call.scaler, call.args, call.kwargs)))):
            is_mapped = True
        else:
            raise _Found(call, axes)

    try:
        with observed_by(observer), jax.disable_jit():
            step(*args, **kwargs)
    except _Found as found:
        return found.call, found.axes
    except Exception as error:
        # Not every operation runs in jax.shard_map without being compiled, and not every mesh.
        if is_mapped or "shard_map" in str(error):
            raise _mapped(step) from error
        if "AOT" in str(error):  # jax.disable_jit does not enter a program that was compiled ahead of time
            raise _without_gradient(step) from error
        raise
    raise _mapped(step) if is_mapped else _without_gradient(step)


def _without_gradient(step: Callable[..., Any]) -> TypeError:
    """Returns an error for a step that computes no gradient while it runs."""
    return TypeError(
        f"step must call jmpscale.value_and_grad, or differentiate a function of scaled_backward, which "
        f"{describe(step)} does not, unless it is a program that has been compiled already. Pass the function itself; "
        "for a step that is written with scale, call diagnose(loss_fn)(scaler, params, batch)."
    )


def _on_one_device(call: GradientCall, axes: tuple[str, ...]) -> GradientCall:
    """Returns a call in which values that `jax.vmap` has mapped over one device are arrays.

    Such values are results of `jax.lax.axis_index`, for example, and are arguments of the loss function or values that
    it closes over.
    """

    def value_of(x: Any) -> Any:
        if not is_traced(x):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.lax.psum(jax.random.key_data(x), axes)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.lax.psum(x, axes).astype(x.dtype)

    scaler, args, kwargs = jax.tree.map(value_of, (call.scaler, call.args, call.kwargs))
    call = call._replace(scaler=scaler, args=args, kwargs=kwargs)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_nnx)
    if any(is_traced(x) or is_nnx(x) for x in leaves):  # it is mapped by another transformation than jax.vmap
        return call
    # A NumPy array would be a constant of the trace.
    arrays = jax.tree.map(lambda x: as_array(x) if is_array(x) else x, (args, kwargs))
    with jax.disable_jit(False):
        traced = trace(lambda args, kwargs: call.fun(*args, **kwargs), *arrays, name=describe(call.fun))
    if not any(map(is_traced, traced.inputs)):
        return call
    positions = {id(x): i for i, x in enumerate(jax.tree.leaves(arrays))}
    values = list(map(value_of, traced.inputs))

    def fun(*args: Any, **kwargs: Any) -> Any:
        given = jax.tree.leaves((args, kwargs))
        inputs = [given[positions[id(x)]] if id(x) in positions else x for x in values]
        return traced.unflatten(traced._replace(inputs=inputs).evaluate())

    return call._replace(fun=fun)


def _mapped(step: Callable[..., Any]) -> TypeError:
    """Returns an error for a step that computes its gradients where arrays have no values."""
    return TypeError(
        f"step must call jmpscale.value_and_grad with arrays that have values, but {describe(step)} calls it inside of "
        "jax.pmap, jax.shard_map, jax.vmap or another gradient. Diagnose the mapped function itself, on the arguments "
        "of one device or example. If it uses the name of an axis: diagnose_step(jax.vmap(device_step, in_axes=None, "
        'out_axes=None, axis_name="data", axis_size=1))(state, batch).'
    )
