"""Examines a training step: its loss scales, its lines, why they fail, and its update."""

import math
from collections.abc import Callable

from jmpscale._diagnosis.examined import Examined, SensitiveLoss, scale_of_rows
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.advice import find_advice
from jmpscale._diagnosis.search.fit import Fit, Present, find_fit
from jmpscale._diagnosis.search.layers import find_layers
from jmpscale._diagnosis.search.lines import find_suspects
from jmpscale._diagnosis.search.repair import Repair, find_repair
from jmpscale._diagnosis.search.update import Update, examine_update
from jmpscale._diagnosis.tell.describe_not_finite import describe_not_finite
from jmpscale._diagnosis.tell.report import Diagnosis
from jmpscale._diagnosis.tell.write_report import report_not_finite, write_report
from jmpscale._diagnosis.thresholds import AcceptedErrors
from jmpscale._diagnosis.trace.program import Program
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._state import ScalerState


def examine(
    step: TracedStep,
    scaler: ScalerState | None,
    with_float32_results: Callable[[], Program | None],
    accepted: AcceptedErrors,
) -> Diagnosis:
    """Examines a step at the loss scale of a scaler, or at the scale 1 without one.

    `with_float32_results` returns the program of the step with float32 results of `autocast`, if it has others.
    """
    present = Present(scaler)
    trials = _trials(step, present, accepted)
    if not trials.measured.are_finite:
        return report_not_finite(step, trials, present, describe_not_finite(step, trials, present))
    fit = find_fit(trials, present)
    repair = find_repair(trials, fit, with_float32_results)
    lines = repair.lines if repair else None
    alone = {}
    if lines or fit.error >= accepted.small:
        alone = trials.errors_alone(round(math.log2(scale_of_rows(fit, repair))))
    suspects = find_suspects(trials, fit, alone) if repair is None else None
    return write_report(
        Examined(
            step,
            trials,
            fit,
            repair,
            alone,
            suspects,
            find_advice(fit, lines, has_decisive=bool(trials.decisive.any())),
            _find_sensitive_loss(trials, fit, repair),
            _examine_update(step, trials, fit, accepted),
            find_layers(step, trials, fit, repair, suspects),
        )
    )


def _trials(step: TracedStep, present: Present, accepted: AcceptedErrors) -> GradientTrials:
    names = step.program.names
    return GradientTrials(
        Forms(step.program, 1 + len(step.gradients)),
        step.gradients,
        frozenset(step.gradients).intersection(names) or frozenset(filter(None, names)),
        accepted,
        has_scaler=present.has_scaler,
        may_be_scaled=present.has_scaler and step.state is not None,
        may_be_halved=present.has_scaler and (present.config.mode == "dynamic" or present.scale != 1),
    )


def _find_sensitive_loss(trials: GradientTrials, fit: Fit, repair: Repair | None) -> SensitiveLoss | None:
    """Returns the error of a loss that is not wrong only because its arguments, if rounded, change it as much.

    If lines must compute in float32, the summary is about them; near a minimum, it has the error already.
    """
    if (repair and repair.lines) or fit.is_near_minimum or not trials.loss:
        return None
    error = abs(fit.loss - trials.loss) / abs(trials.loss)
    return SensitiveLoss(error, trials.loss_error_of_rounded_arguments()) if trials.is_ill_conditioned(error) else None


def _examine_update(step: TracedStep, trials: GradientTrials, fit: Fit, accepted: AcceptedErrors) -> Update:
    if step.update is None or not step.results:
        return Update()
    best = fit.scales.best
    scale = fit.present.scale if fit.scale_fits or best is None else 2.0**best
    program, gradients = step.update.with_given(trials.given(scale)), step.update.gradients
    return examine_update(program, gradients, step.results, scale, accepted)
