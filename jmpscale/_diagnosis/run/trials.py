"""Runs the loss and the gradients of a step with other modes, and compares them with float32."""

import copy
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._diagnosis.run.errors import Measured, has_slices, measure
from jmpscale._diagnosis.run.fitting_scales import Errors, Scales, at_one_scale, largest, search
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import Mode, Modes, Part, Site, Statistics, mode_of_factor
from jmpscale._diagnosis.run.moves import perturb
from jmpscale._diagnosis.run.scaler_group import LossScales, ScalerGroup
from jmpscale._diagnosis.thresholds import (
    CHANGE,
    CHANGES,
    MARGIN,
    NEGLIGIBLE,
    NOISE,
    SAME_SIZE,
    TOLERANCE,
    TRIED_ALONE,
    AcceptedErrors,
)
from jmpscale._diagnosis.trace.operations import Operation, Path
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs.jaxpr import Key


class GradientTrials:
    """Runs a step with other modes, and compares it with the reference: the step in float32, at a scale of 1."""

    def __init__(
        self,
        forms: Forms,
        gradients: Sequence[str],
        parameters: Collection[str],
        accepted: AcceptedErrors,
        *,
        has_scaler: bool,
        may_be_scaled: bool,
        may_be_halved: bool,
        group: ScalerGroup | None = None,
    ) -> None:
        """Creates trials of a step.

        `gradients` are the names of its gradients, and `parameters` are the names of the arguments that they change. A
        gradient of a loss function is unscaled; one that a step computes `may_be_scaled`. A value that is unscaled, but
        not scaled, `may_be_halved` at twice the scale, unless the scale is always 1. Of a step with several scalers,
        the loss scale is the one of `group`, and its gradients decide.
        """
        self.accepted, self._has_scaler = accepted, has_scaler
        self._group = group
        self._parameters = parameters
        self.set_forms(forms)
        self._recording = forms.recording.of_gradients(group)
        self._statistics: dict[float, dict[Site, Statistics]] = {}
        self.reference = self._run_in_float32(1.0)
        self.loss = float(self.reference[0])
        # The gradients have errors, and so have their slices along the first axis.
        sliced = [(i, k) for i, x in enumerate(self.reference[1:]) if has_slices(x) for k in range(x.shape[0])]
        self.names = (*gradients, *(f"{gradients[i]}[{k}]" for i, k in sliced))
        of_group = group.gradients if group else np.ones(len(gradients), bool)
        self.is_compared = np.concatenate([of_group, of_group[[i for i, _ in sliced]]])
        self.measured = measure(self.reference, self.reference)
        at_two = self._run_in_float32(2.0) if may_be_scaled or may_be_halved else self.reference
        self._are_scaled = self._find_scaled(at_two) if may_be_scaled else [False] * len(self.reference)
        self.halved = self._find_halved(at_two) & may_be_halved & self.is_compared
        changes = [self._error_of_a_change(change) for change in CHANGES]
        # A gradient decides if it is more than rounding noise, and not negligible beside the others. The gradient of a
        # bias before a normalization is zero. In a computed one there is only rounding noise, which the smallest change
        # of the arguments replaces by other noise.
        norms = np.where(self.is_compared & ~self.halved, self.measured.norms[1:], 0.0)
        noise = np.max(changes, axis=0)[1:]
        self.decisive = (noise < NOISE) & (norms > 0) & (norms >= NEGLIGIBLE * norms.max(initial=0.0))
        changes_at_two = measure(self.unscaled(at_two, 2.0), self.reference).errors[1:]
        self.changes_at_two = bool((changes_at_two[self.decisive] > TOLERANCE).any())
        # Rounding the arguments to half precision changes them by half as much, or less.
        self._digits = min((jnp.finfo(site.dtype).nmant for site in self.program.sites), default=10)
        sensitivity = 0.0 if accepted.is_chosen else changes[0][0] / CHANGES[0] * 2.0**-self._digits
        self._largest_loss_error = max(accepted.loss, sensitivity)

    def is_ill_conditioned(self, loss_error: float) -> bool:
        """Tests whether an error of the loss is accepted only because its arguments, if rounded, change it as much."""
        return self.accepted.loss < loss_error <= self._largest_loss_error

    def loss_error_of_rounded_arguments(self) -> float:
        """Returns the relative change of the loss in float32, after rounding only the arguments to half precision."""
        pairs = zip(self.program.consts, self.program.names, strict=True)
        consts = [_round(x, self._digits) if name else x for x, name in pairs]
        return float(measure(self._recording.run(1.0, {}, Mode.FLOAT32, consts)[0], self.reference).errors[0])

    def _find_scaled(self, at_two: Sequence[Any]) -> list[bool]:
        """Tests which outputs are scaled, such as gradients that the step divides by the scale without our functions.

        They grow with the scale in float32, in which powers of two are exact. `at_two` are the outputs at the scale 2.
        """
        halved, written = (measure(x, self.reference).errors for x in ([x / 2 for x in at_two], at_two))
        return [bool(x < y) for x, y in zip(halved, written, strict=True)][: len(self.reference)]

    def _find_halved(self, at_two: Sequence[Any]) -> np.ndarray:
        """Tests which gradients are halves at twice the scale: values that are unscaled, but not scaled."""
        doubled = measure([2 * x for x in at_two], self.reference)
        return ((doubled.errors == 0) & (doubled.norms > 0))[1:]

    def unscaled(self, outputs: Sequence[Any], scale: float) -> list[Any]:
        """Returns outputs at a loss scale with those that are scaled divided by it."""
        pairs = zip(outputs, self._are_scaled, strict=True)
        return [x.astype(jnp.promote_types(x.dtype, np.float32)) / scale if scaled else x for x, scaled in pairs]

    def _error_of_a_change(self, change: float) -> np.ndarray:
        """Returns the relative change of the loss and of each gradient in float32, after a change of all arguments."""
        consts = [perturb(x, change) for x in self.program.consts]
        return measure(self._recording.run(1.0, {}, Mode.FLOAT32, consts)[0], self.reference).errors

    def errors_of(self, consts: list[Any]) -> tuple[Errors, float]:
        """Returns the errors in float32, as `compare` does, with other values of the arguments and constants."""
        return self.compare(self._recording.run(1.0, {}, Mode.FLOAT32, consts)[0])

    def count(self, comparisons: Mapping[tuple[str, str], np.dtype]) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns how rare the results of some comparisons are, by line and primitive: the fraction, and their number.

        Those on which neither the loss nor a gradient depends are missing.
        """
        records = self._forms.counting(comparisons).run(1.0, {}, Mode.FLOAT32)[1]
        return {(site.part.path[-1], site.operation): (rare, size) for site, (rare, size) in records.items()}

    @property
    def whole_program(self) -> Program:
        """The program of the loss, the gradients and what the update is given."""
        return self._forms.program

    def sampling(self, conversions: Collection[Key]) -> ModalProgram:
        """Returns the step as a program that records a sample of the integers of some conversions."""
        return self._forms.sampling(conversions)

    def of(self, program: Program) -> "GradientTrials":
        """Returns trials of another form of the step, which is compared with the same reference."""
        trials = copy.copy(self)
        trials.set_forms(Forms(program, len(program.jaxpr.outvars)))
        return trials

    def set_forms(self, forms: Forms) -> None:
        """Sets the step that the trials run; no error of it is known yet."""
        self._forms = forms
        self.program = forms.precision.of_gradients(self._group)  # whose lines can compute in float32
        self._errors: dict[tuple[frozenset[tuple[Site, int | tuple[int, ...]]], Mode, int], tuple[Errors, float]] = {}

    def run_as_written(self, scale: float) -> list[Any]:
        """Returns the loss and the gradients as they are written, at a loss scale."""
        return self._run_all_as_written(scale)[: self._forms.measured]

    def loss_as_written(self, scale: float) -> float:
        return float(self.unscaled(self.run_as_written(scale), scale)[0])

    def given(self, scale: LossScales) -> list[Any]:
        """Returns what the update is given, as it is written, at a loss scale."""
        return self._run_all_as_written(scale)[self._forms.measured :]

    def _run_all_as_written(self, scale: LossScales) -> list[Any]:
        """Returns all outputs as they are written, at a loss scale.

        Without a scaler, one run does not repay another compilation. In float16, the compiler may combine operations of
        the form without modes, so that an intermediate result overflows.
        """
        scale = self._group.at(scale) if self._group else scale
        if self._has_scaler or any(site.dtype == np.float16 for site in self.program.sites):
            return self._forms.run_as_written(scale)
        return self._forms.precision.run(scale, {}, Mode.AS_WRITTEN)[0]

    @property
    def all_paths(self) -> list[Path]:
        """The lines with results in half precision, also of what the update is given."""
        return self._forms.precision.paths

    @property
    def names_not_entered(self) -> list[str]:
        """The names of the operations on whose results in half precision the comparison depends."""
        return list(dict.fromkeys(x.name for x in self.not_entered if x.reaches_outputs))

    @property
    def program_of_repair(self) -> ModalProgram:
        """The step, whose infinities and NaN can be replaced by zeros."""
        return self._forms.repair.of_gradients(self._group)

    @property
    def not_entered(self) -> list[Operation]:
        """The operations that run in half precision in the reference, too."""
        return list(self._recording.not_entered)

    def compare(
        self, outputs: Sequence[Any], scale: float = 1.0, reference: Sequence[Any] | None = None
    ) -> tuple[Errors, float]:
        """Returns the errors of the gradients, 0 if one is not decisive; and of the loss, 0 if it is only rounding.

        The outputs are those at a loss scale.
        """
        found: Measured = measure(self.unscaled(outputs, scale), self.reference if reference is None else reference)
        is_finite = not found.severity[1:][self.is_compared].any()
        errors = np.where(self.decisive, found.errors[1:], 0.0) if is_finite else np.full_like(found.errors[1:], np.inf)
        return errors, float(found.errors[0]) if found.errors[0] > self._largest_loss_error else 0.0

    def error(self, modes: Modes, default: Mode, exponent: int) -> float:
        """Returns the largest error of a gradient, at least 1 if the loss is wrong, infinity if one is not finite."""
        errors, loss_error = self.errors(modes, default, exponent)
        return max(largest(errors), loss_error, 1.0 if loss_error else 0.0)

    def errors(self, modes: Modes, default: Mode, exponent: int) -> tuple[Errors, float]:
        """Returns the errors of a run as `compare` does; runs it once."""
        key = frozenset(modes.items()), default, exponent
        if key not in self._errors:
            self._errors[key] = self.compare(self.program.run(2.0**exponent, modes, default)[0], 2.0**exponent)
        return self._errors[key]

    def errors_as_written(self, exponent: int) -> tuple[Errors, float]:
        """Returns the errors of the program without modes, whose operations the compiler may combine."""
        return self.compare(self.run_as_written(2.0**exponent), 2.0**exponent)

    def errors_of_factor(self, exponent: int) -> Errors:
        """Returns the errors of the gradients, as written, if the loss is multiplied by a power of two."""
        program = self._forms.factors.of_gradients(self._group)
        modes = {x: mode_of_factor(exponent) for x in program.sites if x.part.backward}
        return self.compare(program.run(1.0, modes, Mode.AS_WRITTEN)[0])[0]

    def statistics(self, scale: float) -> dict[Site, Statistics]:
        """Returns the statistics of the results in float32, at a loss scale."""
        if scale not in self._statistics:
            self._run_in_float32(scale)
        return self._statistics[scale]

    def _run_in_float32(self, scale: float) -> list[Any]:
        """Returns the loss and the gradients in float32, and keeps the statistics of this run."""
        outputs, records = self._recording.run(scale, {}, Mode.FLOAT32)
        self._statistics[scale] = {site: Statistics(*numbers) for site, numbers in records.items()}
        return outputs

    def change_in_float32(self, scale: float) -> Errors:
        """Returns the errors of the decisive gradients in float32 at another loss scale."""
        found = measure(self.unscaled(self._run_in_float32(scale), scale), self.reference)
        return np.where(self.decisive, found.errors[1:], 0.0)

    def largest_exponent(self, paths: Collection[Path] = ()) -> int:
        """Returns the exponent of the largest scale at which the backward pass does not overflow outside of `paths`."""
        backward = [(x, found.max_abs) for x, found in self.statistics(1.0).items() if x.part.backward]
        limits = [math.log2(x.limit / max_abs) for x, max_abs in backward if max_abs and x.part.path not in paths]
        return max(-100, min(100, math.floor(min(limits, default=0.0))))

    def kept(self, paths: Collection[Path]) -> dict[Site, Mode]:
        """Returns the modes with which some lines compute in float32."""
        return {site: Mode.FLOAT32 for site in self.program.sites if site.part.path in paths}

    def forward_errors(self, exponent: int, modes: Modes = MappingProxyType({})) -> Errors:
        """Returns the errors of the decisive gradients if the backward pass computes in float32."""
        return self.errors({**modes, **self._backward_in_float32()}, Mode.AS_WRITTEN, exponent)[0]

    def error_away_from_minimum(self, exponent: int) -> float | None:
        """Returns the largest error after a change of the parameters, if a minimum nearby makes the present one large.

        Near a minimum of the loss, the gradients vanish, but what rounding adds to them does not. So, after a change of
        the parameters, the gradients are large beside the same rounding. Returns None if this is not the reason: the
        error is not small after the change, or the rounding is smaller, or the range of the dtype makes the error.
        """
        errors, error = self.errors({}, Mode.AS_WRITTEN, exponent)[0], self.error({}, Mode.AS_WRITTEN, exponent)
        if math.isinf(error) or self.error({}, Mode.RANGE, exponent) < error / SAME_SIZE:
            return None
        worst = int(np.argmax(errors))
        rounding = errors[worst] * self.measured.norms[1 + worst]
        found = []
        for change in (CHANGE, -CHANGE):
            changed, norm = self._error_of_other_parameters(worst, change, exponent)
            if changed >= self.accepted.small or changed * norm < rounding / SAME_SIZE:
                return None
            found.append(changed)
        return max(found)

    def _error_of_other_parameters(self, worst: int, change: float, exponent: int) -> tuple[float, float]:
        """Returns the error of a gradient after a change of the parameters, and its norm; infinite for a wrong loss."""
        pairs = list(zip(self.program.consts, self.program.names, strict=True))
        consts = [perturb(x, change) if name in self._parameters else x for x, name in pairs]
        reference = self.program.run(1.0, {}, Mode.FLOAT32, consts)[0]
        norms = measure(reference, reference).norms[1:]
        growth = np.max(norms[self.decisive] / self.measured.norms[1:][self.decisive], initial=1.0)
        if self._has_scaler:  # larger gradients need a smaller scale
            exponent = min(exponent, self.largest_exponent()) - math.ceil(math.log2(growth)) - MARGIN
        written = self.program.run(2.0**exponent, {}, Mode.AS_WRITTEN, consts)[0]
        errors, loss_error = self.compare(written, 2.0**exponent, reference)
        return math.inf if loss_error else float(errors[worst]), float(norms[worst])

    def with_backward_in_float32(self, exponent: int) -> list[Any]:
        """Returns the loss and the gradients, unscaled, if the backward pass computes in float32."""
        modes = self._backward_in_float32()
        return self.unscaled(self.program.run(2.0**exponent, modes, Mode.AS_WRITTEN)[0], 2.0**exponent)

    def _backward_in_float32(self) -> dict[Site, Mode]:
        return {site: Mode.FLOAT32 for site in self.program.sites if site.part.backward}

    def is_wrong_by_overflow(self, exponent: int) -> bool:
        """Tests whether results overflow, and the range of float32 makes the error much smaller."""
        modes = {x: Mode.RANGE for x, found in self.statistics(2.0**exponent).items() if found.overflow}
        if not modes:
            return False
        written, with_range = (self.error(x, Mode.AS_WRITTEN, exponent) for x in ({}, modes))
        return with_range < written / SAME_SIZE

    def is_wrong_by_range(self, exponent: int) -> bool:
        """Tests whether the range of float32 in the backward pass makes the error much smaller."""
        wider = jnp.finfo(np.float32).nexp
        modes = {x: Mode.RANGE for x in self.program.sites if x.part.backward and jnp.finfo(x.dtype).nexp < wider}
        if not modes:
            return False
        return self.error(modes, Mode.AS_WRITTEN, exponent) < self.error({}, Mode.AS_WRITTEN, exponent) / SAME_SIZE

    def find_scales(self, exponent: int, paths: Collection[Path] = ()) -> Scales:
        """Finds the loss scales that fit, beginning with one, if some lines compute in float32."""
        modes = self.kept(paths)

        def errors_at(exponent: int) -> Errors:
            found = self.errors(modes, Mode.AS_WRITTEN, exponent) if modes else self.errors_as_written(exponent)
            errors, loss_error = found
            return errors + (math.inf if loss_error else 0.0)

        if not self._has_scaler:
            return at_one_scale(errors_at(exponent), exponent, self.accepted.gradient)
        forward_errors = functools.partial(self.forward_errors, modes=modes)
        return search(errors_at, forward_errors, exponent, self.largest_exponent(paths), self.accepted.gradient)

    def errors_alone(self, exponent: int) -> dict[Part, float]:
        """Returns the error if one part alone computes in half precision; nothing if there are too many parts."""
        parts = self.program.parts if len(self.program.parts) <= TRIED_ALONE else []
        alone = {part: {x: Mode.AS_WRITTEN for x in self.program.sites if x.part == part} for part in parts}
        return {part: self.error(modes, Mode.FLOAT32, exponent) for part, modes in alone.items()}


def _round(x: jax.Array, digits: int) -> jax.Array:
    """Rounds values to a number of binary digits, in the range of their own dtype; not integers."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    own = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, own.nexp, min(digits, own.nmant))
