"""Finds the lines that must compute in float32 because no loss scale is the remedy, and why."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jmpscale._diagnosis.run.fitting_scales import Scales
from jmpscale._diagnosis.run.modes import Part
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.causes import Cause, WrongCasts, find_casts, find_causes
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.search.lines import Lines, find_lines
from jmpscale._diagnosis.thresholds import REMAINS, SAME_SIZE
from jmpscale._diagnosis.trace.program import Program


class Repair(NamedTuple):
    """What makes gradients right that are wrong at each loss scale."""

    overflows: bool = False  # whether results overflow, or underflow, and cause a moderate error
    lines: Lines | None = None  # that must compute in float32; None if the step is wrong in float32, too
    cause: Cause | None = None  # where the error begins; None if no lines must change
    causes: Mapping[Part, Cause] = MappingProxyType({})  # the first one of each part, if it is wrong alone
    casts: Mapping[Part, WrongCasts] = MappingProxyType({})  # of the lines that cast several arguments
    scales_with_float32_results: Scales | None = None  # of `autocast`, if it has others


def find_repair(trials: GradientTrials, fit: Fit, with_float32_results: Callable[[], Program | None]) -> Repair | None:
    """Finds the lines that must compute in float32; returns None if no line must."""
    present, scales = fit.present, fit.scales
    if fit.is_near_minimum:
        return None
    best = present.exponent if scales.best is None else scales.best
    # Scales of which one probably fits if the lines that overflow, or underflow, compute in float32.
    exponents, limit = [present.exponent, best, trials.largest_exponent() - 2, 0, 24, -12], trials.accepted.gradient
    if not present.has_scaler:
        exponents = [present.exponent]
    overflows, error = False, max(fit.error_at_exponent, fit.loss_error)
    if math.isfinite(error):
        limit = min(limit, error * REMAINS)
    if fit.is_right:
        # An error of rounding may be harmless, but an overflow that changes gradients is a fault.
        error, exponent = fit.error_at_exponent, fit.exponent
        if error < trials.accepted.small or exponent is None:
            return None
        # Without a scaler, no factor of the loss helps an underflow that is tried here.
        underflows = not present.has_scaler and trials.is_wrong_by_range(exponent)
        if not underflows and not trials.is_wrong_by_overflow(exponent):
            return None
        exponents, limit, overflows = [exponent], error / SAME_SIZE, True
    lines = find_lines(trials, exponents, limit) if trials.program.sites else None
    if lines is None or not lines.paths:
        return Repair(overflows, lines)
    form = with_float32_results()
    in_form = trials.of(form).find_scales(best) if form else None
    finite = math.isfinite(fit.loss) and scales.best is not None
    causes = find_causes(trials, lines, finite=finite)
    first = {x.site.part: x for x in reversed(causes)}  # the first cause of each part
    casts = {part: found for part, x in first.items() if (found := find_casts(trials, x, lines))}
    return Repair(overflows, lines, causes[0], first, casts, in_form)
