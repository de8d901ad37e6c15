"""Examines a training step: its loss scales, its lines, why they fail, and its update."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jmpscale._diagnosis.examined import Examined, SensitiveLoss, scale_of_rows
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.scaler_group import LossScales, ScalerGroup
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.advice import find_advice, find_advice_then
from jmpscale._diagnosis.search.draws import find_coarse_choices
from jmpscale._diagnosis.search.factors import find_factors
from jmpscale._diagnosis.search.fit import Fit, Present, find_fit
from jmpscale._diagnosis.search.inputs import find_coarse_inputs
from jmpscale._diagnosis.search.integers import find_wrong_indices
from jmpscale._diagnosis.search.layers import find_layers
from jmpscale._diagnosis.search.lines import find_suspects
from jmpscale._diagnosis.search.reference import find_changes_of_reference
from jmpscale._diagnosis.search.repair import Repair, find_repair
from jmpscale._diagnosis.search.scalers import find_groups
from jmpscale._diagnosis.search.update import Update, examine_update, find_not_finite
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
    """Examines a step at the loss scale of a scaler, or at the scale 1 without one; of several, at the scale of each.

    `with_float32_results` returns the program of the step with float32 results of `autocast`, if it has others.
    """
    forms = Forms(step.program, 1 + len(step.gradients))
    groups: list[ScalerGroup | None] = [None]
    if len(step.scalers) > 1:
        groups = [*find_groups(step.scalers, forms)] or groups
    scales: LossScales = groups[0].scales if groups[0] else 1.0
    found = []
    for group in groups:
        group = group and group._replace(scales=np.asarray(scales))
        present = Present(group.state, group.name) if group else Present(scaler)
        trials = _trials(step, forms, present, accepted, group)
        if not trials.measured.are_finite:
            return report_not_finite(step, trials, present, describe_not_finite(step, trials, present))
        examined = _examine_gradients(step, trials, present, with_float32_results)
        scales = group.at(examined.fit.scale) if group else examined.fit.scale
        found.append(examined)
    first, *others = _worst_first(found)
    update = _examine_update(step, first, scales, accepted)
    return write_report(
        first._replace(
            update=update,
            wrong_indices=None if first.repair else find_wrong_indices(first.trials, first.fit),
            coarse_inputs=tuple(find_coarse_inputs(step, first.trials, first.fit.error_at_exponent)),
            coarse_choices=tuple(find_coarse_choices(step.choices, first.trials)),
            others=tuple(others),
        )
    )


def _examine_gradients(
    step: TracedStep, trials: GradientTrials, present: Present, with_float32_results: Callable[[], Program | None]
) -> Examined:
    """Examines the gradients whose loss scale the trials move."""
    fit = find_fit(trials, present)
    factors, changes = find_factors(trials, fit), find_changes_of_reference(trials, fit)
    repair = None if factors else find_repair(trials, fit, with_float32_results)
    lines = repair.lines if repair else None
    alone = {}
    if lines or fit.error >= trials.accepted.small:
        alone = trials.errors_alone(round(math.log2(scale_of_rows(fit, repair))))
    suspects = find_suspects(trials, fit, alone) if repair is None and factors is None else None
    return Examined(
        step,
        trials,
        fit,
        repair,
        alone,
        suspects,
        find_advice(fit, is_compared=bool(trials.decisive.any()) and changes is None, is_repaired=repair is not None),
        find_advice_then(present, lines),
        factors,
        changes,
        _find_sensitive_loss(trials, fit, repair),
        layers=find_layers(step, trials, fit, repair, suspects),
    )


def _worst_first(found: Sequence[Examined]) -> list[Examined]:
    """Sorts what was measured for several scalers, without those whose gradients cannot be compared if others can."""
    compared = [x for x in found if x.trials.decisive.any()] or list(found[:1])
    return sorted(compared, key=lambda x: (x.fit.scale_fits, x.repair is None, -x.fit.error))


def _trials(
    step: TracedStep, forms: Forms, present: Present, accepted: AcceptedErrors, group: ScalerGroup | None
) -> GradientTrials:
    names = step.program.names
    return GradientTrials(
        forms,
        step.gradients,
        frozenset(step.gradients).intersection(names) or frozenset(filter(None, names)),
        accepted,
        has_scaler=present.has_scaler,
        may_be_scaled=present.has_scaler and step.state is not None,
        may_be_halved=present.has_scaler and (present.config.mode == "dynamic" or present.scale != 1),
        group=group,
    )


def _find_sensitive_loss(trials: GradientTrials, fit: Fit, repair: Repair | None) -> SensitiveLoss | None:
    """Returns the error of a loss that is not wrong only because its arguments, if rounded, change it as much.

    If lines must compute in float32, the summary is about them; near a minimum, it has the error already.
    """
    if (repair and repair.lines) or fit.is_near_minimum or not trials.loss:
        return None
    error = abs(fit.loss - trials.loss) / abs(trials.loss)
    return SensitiveLoss(error, trials.loss_error_of_rounded_arguments()) if trials.is_ill_conditioned(error) else None


def _examine_update(step: TracedStep, examined: Examined, scale: LossScales, accepted: AcceptedErrors) -> Update:
    if step.update is None or step.exact_update is None:
        return Update()
    given = examined.trials.given(scale)
    not_finite: list[str] = []
    if math.isfinite(examined.fit.error_at_exponent):  # otherwise the gradients are the reason
        not_finite = find_not_finite(step.exact_update.with_given(given), step.exact_leaves, scale)
    return examine_update(step.update, given, step.results, scale, accepted, not_finite)
