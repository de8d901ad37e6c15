"""`diagnose_step`, which diagnoses a training step as it is."""

from collections.abc import Callable
from typing import Any

import jax

from jmpscale._algorithm.get_scaler import find_scaler
from jmpscale._base.step_call import StepCall
from jmpscale._base.text import describe
from jmpscale._base.tree import find_instances
from jmpscale._diagnosis.examine import examine
from jmpscale._diagnosis.report import Diagnosis
from jmpscale._diagnosis.step import check_concrete
from jmpscale._diagnosis.whole_step import trace_whole_step, trace_with_float32_results
from jmpscale._state import ScalerState


def diagnose_step(step: Callable[..., Any]) -> Callable[..., Diagnosis]:
    """Creates a function that diagnoses a whole training step as it is, in any precision, with a scaler or without.

    Args:
      step: the training step.

    Returns:
      `f(*args, **kwargs) -> Diagnosis`, with the arguments of the step.
    """
    if not callable(step):
        raise TypeError(f"step must be the training step, got {describe(step)}. Call diagnose_step(step)(*args).")

    def diagnose_step_of(*args: Any, **kwargs: Any) -> Diagnosis:
        check_concrete({"args": args, "kwargs": kwargs})
        call = StepCall(step, args, kwargs)
        scalers = [x for x in find_instances(call.arguments, ScalerState) if x.config.mode != "disabled"]
        scaler = find_scaler(scalers[0]) if scalers else None
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            whole = trace_whole_step(call)
            return examine(whole, scaler, whole.arguments, lambda: trace_with_float32_results(call))

    diagnose_step_of.__name__ = f"diagnose_step_of_{getattr(step, '__name__', 'step')}"
    return diagnose_step_of
