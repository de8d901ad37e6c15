"""Examines a training step: its scales, its operations, and the operations at which its errors begin."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jmpscale._diagnosis.causes import Kind, float32_origins, kind_of, origins
from jmpscale._diagnosis.evaluate import Evaluation, Result, evaluate
from jmpscale._diagnosis.measure import relative_error
from jmpscale._diagnosis.scales import Reference, Scales, measure_scales, run_reference
from jmpscale._diagnosis.step import Step

# A loss differs from float32 by more than rounding if the error exceeds this, and also exceeds the change that follows
# from rounding the arguments.
_LARGEST_LOSS_ERROR = 0.03


class Findings(NamedTuple):
    """What was measured of a step.

    Attributes:
      reference: the step in float32.
      scales: the step as written; None if the step is not finite in float32.
      evaluation: the operations, at `scale`.
      scale: the present scale if another one fits, otherwise the best scale.
      loss_error: the relative error of the loss if it is more than rounding, otherwise 0.
      origins: the results at which errors begin, in program order.
      overflows: the results that overflow at larger scales, if no scale fits because of an underflow.
    """

    reference: Reference
    scales: Scales | None
    evaluation: Evaluation
    scale: float
    loss_error: float
    origins: list[Result]
    overflows: list[Result]

    @property
    def healthy(self) -> bool:
        """Whether a scale fits, and the loss is right."""
        return self.scales is not None and self.scales.fitting is not None and not self.loss_error


def examine(step: Step, scale: float, progress: Callable[[str], None]) -> Findings:
    """Examines a step.

    Args:
      step: the step.
      scale: the present scale.
      progress: a function that is called with a description of the work so far.
    """
    progress("running in float32")
    reference = run_reference(step)
    scales = measure_scales(step, scale, reference, progress) if reference.finite else None
    present_is_relevant = scales is not None and scales.fitting is not None
    best = 0 if scales is None or scales.best is None else scales.best
    evaluated = scale if present_is_relevant else 2.0**best
    evaluation = evaluate(step.jaxpr, step.consts, [np.float32(evaluated)], progress)
    loss_error = loss_error_of(reference, scales)
    found = origins_of(evaluation, reference, scales, loss_error, scale)
    overflows = _overflows_above(step, scales, found, progress) if scales else []
    return Findings(reference, scales, evaluation, evaluated, loss_error, found, overflows)


def _overflows_above(step: Step, scales: Scales, found: list[Result], progress: Callable[[str], None]) -> list[Result]:
    """Returns the results that overflow at the smallest scale that is too large, if a smaller one underflows."""
    underflows = bool(found) and found[0].site.backward and kind_of(found[0]) is Kind.UNDERFLOW
    if scales.fitting is not None or scales.best is None or not underflows:
        return []
    too_large = [k for k, error in scales.errors.items() if k > scales.best and math.isinf(error)]
    if not too_large:
        return []
    evaluation = evaluate(step.jaxpr, step.consts, [np.float32(2.0 ** min(too_large))], progress)
    begins = origins(x.result for x in evaluation.outputs[1:] if x.result is not None)
    return [x for x in begins if kind_of(x) is Kind.OVERFLOW]


def loss_error_of(reference: Reference, scales: Scales | None) -> float:
    """Returns the relative error of the loss if it is more than rounding, otherwise 0."""
    if scales is None:
        return 0.0
    error = relative_error(reference.loss, scales.loss)
    return error if error > max(_LARGEST_LOSS_ERROR, reference.loss_rounding) else 0.0


def origins_of(
    evaluation: Evaluation, reference: Reference, scales: Scales | None, loss_error: float, scale: float
) -> list[Result]:
    """Returns the results at which the errors of the outputs begin, if the present scale does not fit.

    Args:
      evaluation: the operations.
      reference: the step in float32.
      scales: the step as written; None if the step is not finite in float32.
      loss_error: the relative error of the loss if it is more than rounding, otherwise 0.
      scale: the present scale.
    """
    loss, *grads = [x.result for x in evaluation.outputs]
    if scales is None:
        return float32_origins(x for x in (loss, *grads) if x is not None)
    if loss_error and loss is not None:
        return origins([loss])
    if scales.fitting and scales.fitting[0] <= math.log2(scale) <= scales.fitting[1]:
        return []
    pairs = zip(grads, reference.decisive, strict=True)
    decisive = [x for x, decides in pairs if x is not None and (decides or not x.measured.finite)]
    worst = max((x.measured.error for x in decisive), default=0.0)
    present = scales.error if scales.fitting else scales.errors.get(scales.best or 0, math.inf)
    if worst < present / 2:  # the gradients in float32 depend on the scale, too
        return []
    return origins(x for x in decisive if x.measured.error >= worst / 2)
