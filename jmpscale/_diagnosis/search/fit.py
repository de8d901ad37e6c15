"""Finds how well gradients fit: at the present loss scale, at others, and away from a minimum of the loss."""

import math
from typing import NamedTuple

import numpy as np

from jmpscale._diagnosis.run.fitting_scales import Errors, Scales, at_one_scale, largest, search
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._state import ScalerConfig, ScalerState, static


class Present(NamedTuple):
    """The scaler of a step; without one, the scale is 1, and cannot change."""

    scaler: ScalerState | None
    name: str = ""  # of the scaler, such as `opt_state['d'].scaler`, if the step has several

    @property
    def has_scaler(self) -> bool:
        return self.scaler is not None

    @property
    def config(self) -> ScalerConfig:
        return (self.scaler or static(1.0)).config

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.loss_scale)

    @property
    def exponent(self) -> int:
        """The exponent of the power of two that is nearest to the scale."""
        return round(math.log2(self.scale))

    @property
    def is_new(self) -> bool:
        """Whether the scaler has seen no step."""
        return self.scaler is not None and not (int(self.scaler.total_skips) or int(self.scaler.finite_steps))

    def is_between(self, exponents: tuple[int, int]) -> bool:
        """Tests whether the scale is between two powers of two."""
        return exponents[0] <= math.log2(self.scale) <= exponents[1]


class Fit(NamedTuple):
    """How well the gradients fit."""

    present: Present
    loss: float  # as it is written
    loss_error: float  # relative, if it is more than rounding, otherwise 0
    errors: Errors  # of the gradients at the present scale
    scales: Scales
    error_elsewhere: float | None = None  # if the loss is near a minimum: after a change of the parameters

    @property
    def is_near_minimum(self) -> bool:
        """Whether errors are large only because the loss is near a minimum."""
        return self.error_elsewhere is not None

    @property
    def is_right(self) -> bool:
        """Whether a scale fits, and the loss is right."""
        return self.scales.fitting is not None and (self.is_near_minimum or not self.loss_error)

    @property
    def error(self) -> float:
        """The largest error of a gradient at the present scale."""
        return largest(self.errors)

    @property
    def scale_fits(self) -> bool:
        """Whether the present scale is in the range that fits, or less than a factor of two outside it and fits."""
        fitting, exponent = self.scales.fitting, math.log2(self.present.scale)
        if fitting is None or not fitting[0] - 1 < exponent < fitting[1] + 1:
            return False
        return self.present.is_between(fitting) or bool((self.errors <= self.scales.limits).all())

    @property
    def exponent(self) -> int | None:
        """The exponent of the present scale if it fits, otherwise of the best one; None if gradients are not finite."""
        return self.present.exponent if self.scale_fits else self.scales.best

    @property
    def scale(self) -> float:
        """The present scale if it fits, otherwise the best one."""
        best = self.scales.best
        return self.present.scale if self.scale_fits or best is None else 2.0**best

    @property
    def error_at_exponent(self) -> float:
        """The largest error of a gradient at the scale of `exponent`."""
        return self.error if self.scale_fits else self.scales.smallest_error

    @property
    def is_small(self) -> bool:
        """Whether the present scale is smaller than all that fit."""
        low, _ = self.scales.fitting or (0, 0)
        return self.present.scale < 2.0**low


def find_fit(trials: GradientTrials, present: Present) -> Fit:
    """Finds the loss scales that fit, and whether a minimum of the loss nearby makes errors large."""
    outputs = trials.run_as_written(present.scale)
    errors, loss_error = trials.compare(outputs, present.scale)
    loss = float(trials.unscaled(outputs, present.scale)[0])
    # A loss that contains a scaled gradient, such as a penalty, may be right at other scales.
    depends_on_scale = present.has_scaler and bool(loss_error) and not trials.errors_as_written(0)[1]
    if depends_on_scale:
        loss_error, errors = 0.0, errors + math.inf
    scales = _find_scales(trials, present, errors, depends_on_scale)
    fit = Fit(present, loss, loss_error, errors, scales)
    error = _error_away_from_minimum(trials, fit)
    if error is None:
        return fit
    return fit._replace(error_elsewhere=error, scales=_find_scales_near_minimum(trials, fit))


def _find_scales(trials: GradientTrials, present: Present, errors: Errors, depends_on_scale: bool) -> Scales:
    def errors_at(exponent: int) -> Errors:
        if 2.0**exponent == present.scale:
            return errors
        found, error_of_loss = trials.errors_as_written(exponent)
        return found + math.inf if depends_on_scale and error_of_loss else found

    largest_error = trials.accepted.gradient
    if not present.has_scaler:
        return at_one_scale(errors, present.exponent, largest_error)
    return search(errors_at, trials.forward_errors, present.exponent, trials.largest_exponent(), largest_error)


def _error_away_from_minimum(trials: GradientTrials, fit: Fit) -> float | None:
    """Returns the error after a change of the parameters, if only a minimum of the loss nearby makes errors large."""
    accepted = trials.accepted
    if accepted.is_chosen or fit.exponent is None or fit.error_at_exponent < accepted.small:
        return None
    return trials.error_away_from_minimum(fit.exponent)


def _find_scales_near_minimum(trials: GradientTrials, fit: Fit) -> Scales:
    """Finds the loss scales that fit by the errors of the backward pass alone.

    The forward pass may have an error of 100% at any scale, as a scale has at which all gradients are zero.
    """
    present, errors = fit.present, {}
    if not present.has_scaler or fit.exponent is None:
        return at_one_scale(fit.errors, present.exponent, math.inf)
    reference = trials.with_backward_in_float32(fit.exponent)

    def backward_errors_at(exponent: int) -> Errors:
        outputs = trials.run_as_written(2.0**exponent)
        errors[exponent] = trials.compare(outputs, 2.0**exponent)[0]
        return trials.compare(outputs, 2.0**exponent, reference)[0]

    none, expected = np.zeros_like(fit.errors), trials.largest_exponent()
    found = search(backward_errors_at, lambda _: none, present.exponent, expected, trials.accepted.gradient)
    at_best = None if found.best is None else errors[found.best]
    return found._replace(errors={k: largest(errors[k]) for k in found.errors}, errors_at_best=at_best, limits=none)
