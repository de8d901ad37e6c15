"""What a diagnosis has measured of a training step, from which its summary and its numbers are written."""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.run.fitting_scales import Errors, Scales, largest
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modes import Part, Site, Statistics
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.advice import Advice
from jmpscale._diagnosis.search.causes import Cause, WrongCasts
from jmpscale._diagnosis.search.lines import Lines, Suspects
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._state import ScalerConfig, ScalerState, static


class SensitiveLoss(NamedTuple):
    """A loss that differs from float32, but not by more than rounding of its arguments can change it.

    Errors are relative.
    """

    error: float  # as written
    error_of_arguments: float  # in float32, with only the arguments rounded


class Findings(NamedTuple):
    """What was measured of a step."""

    step: TracedStep
    forms: Forms  # of its program
    trials: GradientTrials
    scaler: ScalerState | None  # the present one; without one, the scale is 1, and cannot change
    loss: float  # as written
    loss_error: float  # relative, if it is more than rounding, otherwise 0
    errors: Errors  # of the gradients at the present scale
    sensitive_loss: SensitiveLoss | None = None
    not_finite: str = ""  # what makes the step infinite or NaN, in float32 too
    scales: Scales = Scales({}, None, None)
    error_elsewhere: float | None = None  # if the loss is near a minimum: after a change of the parameters
    overflows: bool = False  # whether results overflow, and cause a moderate error
    lines: Lines | None = None  # that must compute in float32, if they were looked for and found
    cause: Cause | None = None  # where the error begins, if it is known
    casts: Mapping[Part, WrongCasts] = MappingProxyType({})  # of the lines that cast several arguments
    scales_with_float32_results: Scales | None = None  # of autocast, if it has others and lines were found
    alone: Mapping[Part, float] = MappingProxyType({})  # the errors of the parts that were tried alone
    suspects: Suspects | None = None  # of a moderate error
    advice: Advice | None = None  # the scaler that is advised, if the present one should change
    update: Update = Update()

    @property
    def has_scaler(self) -> bool:
        return self.scaler is not None

    @property
    def config(self) -> ScalerConfig:
        return (self.scaler or static(1.0)).config

    @property
    def scale(self) -> float:
        """The present scale."""
        return 1.0 if self.scaler is None else float(self.scaler.loss_scale)

    @property
    def is_new(self) -> bool:
        """Whether the scaler has seen no step."""
        return self.scaler is not None and not (int(self.scaler.total_skips) or int(self.scaler.finite_steps))

    @property
    def scale_of_rows(self) -> float:
        """The scale at which rows are measured: the present one; if there are lines and it does not fit, another."""
        exponent = self.lines.exponent if self.lines and self.lines.paths else self.present
        return self.scale if exponent == self.present else 2.0**exponent

    @property
    def present(self) -> int:
        """The exponent of the power of two that is nearest to the present scale."""
        return round(math.log2(self.scale))

    @property
    def statistics(self) -> Mapping[Site, Statistics]:
        return self.trials.statistics(self.scale_of_rows)

    @property
    def not_entered(self) -> list[str]:
        """The operations on whose results in half precision the comparison depends."""
        return list(dict.fromkeys(x.name for x in self.trials.not_entered if x.reaches_outputs))

    @property
    def accurate(self) -> bool:
        """Whether a scale fits, the loss is right, and no overflow makes the gradients worse."""
        is_right = self.is_near_minimum or not self.loss_error
        return self.scales.fitting is not None and is_right and not self.overflows

    @property
    def is_near_minimum(self) -> bool:
        """Whether errors are large only because the loss is near a minimum."""
        return self.error_elsewhere is not None

    @property
    def error(self) -> float:
        """The largest error of a gradient at the present scale."""
        return largest(self.errors)

    @property
    def scale_fits(self) -> bool:
        """Whether the present scale is in the range that fits, or less than a factor of two outside it and fits."""
        fitting, exponent = self.scales.fitting, math.log2(self.scale)
        if fitting is None or not fitting[0] - 1 < exponent < fitting[1] + 1:
            return False
        is_inside = fitting[0] <= exponent <= fitting[1]
        return is_inside or bool((self.errors <= self.scales.limits).all())

    @property
    def exponent(self) -> int | None:
        """The exponent of the present scale if it fits, otherwise of the best one; None if gradients are not finite."""
        return self.present if self.scale_fits else self.scales.best

    @property
    def error_at_exponent(self) -> float:
        """The largest error of a gradient at the scale of `exponent`."""
        return self.error if self.scale_fits else self.scales.smallest_error

    @property
    def is_small(self) -> bool:
        """Whether the present scale is smaller than all that fit."""
        low, _ = self.scales.fitting or (0, 0)
        return self.scale < 2.0**low

    def name(self, path: Path, named: Collection[Path] = ()) -> str:
        """Returns the name of a line, with a line that calls it if another call of it is not named."""
        paths = [*self.forms.precision.paths, *self.update.all_paths]  # all lines with results in half precision
        others = [other for other in paths if other[-1] == path[-1] and other not in (path, *named)]
        calls = (n for n in range(2, len(path) + 1) if all(other[-n:] != path[-n:] for other in others))
        first = next(calls, 1) if others else 1
        return path[-1] if first == 1 else f"{path[-1]}, called at {path[-first]}"

    def names(self, paths: Collection[Path]) -> str:
        """Returns the names of lines, as in `a, b and c`."""
        return enumerate_names(list(dict.fromkeys(self.name(path, paths) for path in paths)), limit=12)
