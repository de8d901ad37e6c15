"""`diagnose_step`, which diagnoses a training step as it is."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jmpscale._base.options import requires_names_in
from jmpscale._base.text import describe
from jmpscale._diagnosis.arguments import accepted_errors, check_arguments
from jmpscale._diagnosis.examine import examine
from jmpscale._diagnosis.tell.report import Diagnosis
from jmpscale._diagnosis.trace.program import Program
from jmpscale._diagnosis.trace.scalers import find_scalers
from jmpscale._diagnosis.trace.trace_observed import trace_observed, trace_with_float32_results
from jmpscale._diagnosis.trace.trace_step import trace_step
from jmpscale._step.call import StepCall


@requires_names_in("diagnose_step(step)(*args)")
def diagnose_step(step: Callable[..., Any], *, accepted_error: float | None = None) -> Callable[..., Diagnosis]:
    """Creates a function that diagnoses a whole training step as it is, in any precision, with a scaler or without.

    The step is any function that `jax.jit` accepts, compiled or not, of any framework, on one device or several. It is
    traced once, and compared with the same step in float32:

    - The loss and the gradients, as `diagnose` compares them. If an argument contains a scaler on whose scale a
      gradient depends, at power-of-two loss scales; otherwise as they are, as with `scaled_backward` and a number. Of
      several scalers, each is examined by itself, with the gradients that depend on its scale.
      Gradients of several losses are compared together; in a loop, their sum.
    - The change of each leaf of its state, beside the change that the same gradients make if the update computes in
      float32. So a leaf in half precision that is too coarse for its changes is found, such as parameters, an average
      or a sum, and so is rounding in the optimizer. A leaf to which no gradient leads, such as a running mean, and any
      other result are compared with the whole step in float32. A leaf that is not computed from its old value, such as
      a copy in half precision of float32 parameters, is compared by its value.
    - Arguments and constants that are in half precision before the step begins are exact in both runs. They are moved
      within their last place, and named if that changes the gradients in float32.

    The state is what the step returns with the structure and the types of an argument, in the order of the arguments,
    and the Flax NNX objects among the arguments. `Diagnosis.state` names it; if an argument is missing there, pass
    `lambda state, ...: new_state`. Averages and small updates round most late in training, so diagnose a restored state
    too. Neither the arguments nor Flax NNX objects among them are changed.

    Args:
      step: the training step. Python must not read the values of arrays in it, as in `if loss > 0`.
      accepted_error: the largest relative error of the loss, a gradient, a change of the state, and another result,
        that you accept, as for `diagnose`. By default, the change of a leaf that is stored in half precision is wrong
        by more than 50%, and the change of any other leaf, or another result, by more than 20%.

    Returns:
      `f(*args, **kwargs) -> Diagnosis`, with the arguments of the step.

    Raises:
      TypeError: `step` is not callable; an argument is abstract or traced; an argument, or a value that `step` closes
        over, is a `jax.Ref`; or `step` creates one, or reads values by `jax.experimental.io_callback`.
      ValueError: an argument was donated to a compiled function, or `accepted_error` is not between 1e-6 and 0.99.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> @jax.jit
    ... def train_step(params, x):
    ...     loss, grads = jax.value_and_grad(lambda params: jnp.mean((x @ params["w"]) ** 2))(params)
    ...     return {"w": params["w"] - 1e-4 * grads["w"]}, loss
    >>> params, x = {"w": jnp.ones((4, 2), jnp.bfloat16)}, jnp.ones((8, 4), jnp.bfloat16)
    >>> diagnosis = jmpscale.diagnose_step(train_step)(params, x)
    >>> [(change.name, change.error) for change in diagnosis.changes]
    [("params['w']", 1.0)]
    >>> print(diagnosis.summary.partition(":")[0])
    Even with the right gradients, the update loses 100% of the change of params['w']
    """
    if not callable(step):
        raise TypeError(f"step must be the training step, got {describe(step)}. Call diagnose_step(step)(*args).")

    accepts = accepted_errors(accepted_error)

    def diagnose_step_of(*args: Any, **kwargs: Any) -> Diagnosis:
        call = StepCall(step, args, kwargs)
        check_arguments(dict(zip(call.names, call.arguments, strict=True)), "diagnose_step")
        scalers = find_scalers(call)
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            trace = functools.partial(trace_step, call)
            traced, kept = trace_observed(trace)
            traced = traced._replace(kept=kept)
            scaler = scalers[0].state if scalers else None
            if scaler is not None and not traced.of_gradients.depends_on_scale():
                is_dynamic = scaler.config.mode == "dynamic"
                traced, scaler = traced._replace(ignores_scaler=is_dynamic), None

            def with_float32_results() -> Program | None:
                again = trace_with_float32_results(trace)
                return again and again.of_gradients

            return examine(traced, scaler, with_float32_results, accepts)

    diagnose_step_of.__name__ = f"diagnose_step_of_{getattr(step, '__name__', 'step')}"
    return diagnose_step_of
