"""Runs a step with other modes, and finds the lines that must compute in float32, and the reasons."""

import bisect
import copy
import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._diagnosis.errors import Measured, measure
from jmpscale._diagnosis.fitting_scales import Errors, Scales, at_one_scale, largest, search
from jmpscale._diagnosis.modal_step import ModalPrograms
from jmpscale._diagnosis.modes import Mode, Modes, Part, Site, Statistics
from jmpscale._diagnosis.program import Operation, Path
from jmpscale._diagnosis.step import Step
from jmpscale._diagnosis.thresholds import (
    CHANGE,
    LARGEST_ERROR,
    LARGEST_LOSS_ERROR,
    LARGEST_SET,
    MOST_CALLS,
    NEGLIGIBLE,
    NOISE,
    TRIED_ALONE,
    ULP,
)


class Reason(enum.Enum):
    """Why a result must be computed in float32."""

    OVERFLOW = "overflows"
    UNDERFLOW = "underflows"
    ROUNDING = "loses precision"


class Cause(NamedTuple):
    """Where an error begins, and why."""

    site: Site
    reason: Reason


class Calls(NamedTuple):
    """Which calls of a line are wrong alone, such as the 8th of 12 layers of a loop in Python."""

    site: Site
    numbers: tuple[int, ...]  # from 1, in the order of the forward pass
    total: int

    @property
    def text(self) -> str:
        """The numbers of the calls, such as `8 of 12`."""
        return f"{', '.join(map(str, self.numbers))} of {self.total}"


class Lines(NamedTuple):
    """A minimal set of lines that must compute in float32, in program order, and what remains if they do."""

    paths: list[Path]
    exponent: int  # of a loss scale that fits then
    scales: Scales


class Trials:
    """Runs a step with other modes, and compares it with the reference: the step in float32, at a scale of 1."""

    def __init__(self, programs: ModalPrograms, *, has_scaler: bool = True) -> None:
        self._has_scaler = has_scaler
        self._set_programs(programs)
        self._recording = programs.recording.of_gradients()
        self._statistics: dict[float, dict[Site, Statistics]] = {}
        self.reference = self._run_in_float32(1.0)
        self.loss = float(self.reference[0])
        self.measured = measure(self.reference, self.reference)
        perturbed = [_perturb(x, ULP) for x in self.step.consts]
        changed = measure(self._recording.run(1.0, {}, Mode.FLOAT32, perturbed)[0], self.reference)
        # A gradient decides if it is more than rounding noise, and not negligible beside the others. The gradient of a
        # bias before a normalization is zero. In a computed one there is only rounding noise, which the smallest change
        # of the arguments replaces by other noise.
        norms = self.measured.norms[1:]
        self.decisive = (changed.errors[1:] < NOISE) & (norms > 0) & (norms >= NEGLIGIBLE * norms.max(initial=0.0))
        # Rounding the arguments to half precision changes them by half as much, or less.
        rounding = max((2.0 ** -jnp.finfo(site.dtype).nmant for site in self.step.sites), default=2.0**-10)
        self._largest_loss_error = max(LARGEST_LOSS_ERROR, changed.errors[0] / ULP * rounding)

    def of(self, step: Step) -> "Trials":
        """Returns trials of another form of the step, which is compared with the same reference."""
        trials = copy.copy(self)
        trials._set_programs(ModalPrograms(step))
        return trials

    def _set_programs(self, programs: ModalPrograms) -> None:
        """Sets the step that the trials run; no error of it is known yet."""
        self.step = programs.precision.of_gradients()
        self._errors: dict[tuple[frozenset[tuple[Site, Mode | tuple[Mode, ...]]], Mode, int], tuple[Errors, float]] = {}

    @property
    def not_entered(self) -> list[Operation]:
        """The operations that run in half precision in the reference, too."""
        return list(self._recording.not_entered)

    def compare(self, outputs: Sequence[Any], reference: Sequence[Any] | None = None) -> tuple[Errors, float]:
        """Returns the errors of the gradients, 0 if one is not decisive; and of the loss, 0 if it is only rounding."""
        found: Measured = measure(outputs, self.reference if reference is None else reference)
        errors = np.where(found.severity[1:].any(), np.inf, np.where(self.decisive, found.errors[1:], 0.0))
        return errors, float(found.errors[0]) if found.errors[0] > self._largest_loss_error else 0.0

    def error(self, modes: Modes, default: Mode, exponent: int) -> float:
        """Returns the largest error of a gradient, at least 1 if the loss is wrong, infinity if one is not finite."""
        errors, loss_error = self.errors(modes, default, exponent)
        return max(largest(errors), loss_error, 1.0 if loss_error else 0.0)

    def errors(self, modes: Modes, default: Mode, exponent: int) -> tuple[Errors, float]:
        """Returns the errors of a run as `compare` does; runs it once."""
        key = frozenset(modes.items()), default, exponent
        if key not in self._errors:
            self._errors[key] = self.compare(self.step.run(2.0**exponent, modes, default)[0])
        return self._errors[key]

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

    def largest_exponent(self, paths: Collection[Path] = ()) -> int:
        """Returns the exponent of the largest scale at which the backward pass does not overflow outside of `paths`."""
        backward = [(x, found.max_abs) for x, found in self.statistics(1.0).items() if x.part.backward]
        limits = [math.log2(x.limit / max_abs) for x, max_abs in backward if max_abs and x.part.path not in paths]
        return max(-100, min(100, math.floor(min(limits, default=0.0))))

    def kept(self, paths: Collection[Path]) -> dict[Site, Mode]:
        """Returns the modes with which some lines compute in float32."""
        return {site: Mode.FLOAT32 for site in self.step.sites if site.part.path in paths}

    def forward_errors(self, exponent: int, modes: Modes = MappingProxyType({})) -> Errors:
        """Returns the errors of the decisive gradients if the backward pass computes in float32."""
        return self.errors({**modes, **self._backward_in_float32()}, Mode.AS_WRITTEN, exponent)[0]

    def forward_error_elsewhere(self) -> float:
        """Returns the largest error of the forward pass, in a gradient or the loss, after a change of all arguments."""

        def error(change: float) -> float:
            consts = [_perturb(x, change) for x in self.step.consts]
            written, _ = self.step.run(1.0, self._backward_in_float32(), Mode.AS_WRITTEN, consts)
            errors, loss_error = self.compare(written, self.step.run(1.0, {}, Mode.FLOAT32, consts)[0])
            return max(largest(errors), loss_error)

        return max(error(CHANGE), error(-CHANGE))

    def _backward_in_float32(self) -> dict[Site, Mode]:
        return {site: Mode.FLOAT32 for site in self.step.sites if site.part.backward}

    def find_lines(self, exponents: Sequence[int]) -> Lines | None:
        """Finds a minimal set of lines that must compute in float32, so that one of the loss scales fits.

        Returns None if the step is wrong with all lines in float32, too.
        """
        paths = self.step.paths
        scales = list(dict.fromkeys(exponents))

        def fits(chosen: Iterable[int]) -> bool:
            modes = self.kept([paths[i] for i in chosen])
            for exponent in scales:
                if self.error(modes, Mode.AS_WRITTEN, exponent) <= LARGEST_ERROR:
                    scales.remove(exponent)
                    scales.insert(0, exponent)  # it probably fits the next set, too
                    return True
            return False

        if not fits(range(len(paths))):
            return None
        kept = [paths[i] for i in smallest_set(len(paths), fits)]
        return Lines(kept, scales[0], self.find_scales(scales[0], kept))

    def find_scales(self, exponent: int, paths: Collection[Path] = ()) -> Scales:
        """Finds the loss scales that fit, beginning with one, if some lines compute in float32."""
        modes = self.kept(paths)

        def errors_at(exponent: int) -> Errors:
            errors, loss_error = self.errors(modes, Mode.AS_WRITTEN, exponent)
            return errors + (math.inf if loss_error else 0.0)

        if not self._has_scaler:
            return at_one_scale(errors_at(exponent), exponent)
        forward_errors = functools.partial(self.forward_errors, modes=modes)
        return search(errors_at, forward_errors, exponent, self.largest_exponent(paths))

    def find_causes(self, lines: Lines, *, finite: bool) -> list[Cause]:
        """Finds where an error begins, and the reason, by computing only one result of the lines as it is written.

        The first cause is the most probable one.

        If the step is right with the range of float32 and the precision as written, the result overflows or underflows.
        Rounding is the reason for an error that is not `finite` only if nothing else is.
        """
        kept = self.kept(lines.paths)
        statistics = self.statistics(2.0**lines.exponent)

        def error(site: Site, mode: Mode) -> float:
            return self.error(kept | {site: mode}, Mode.AS_WRITTEN, lines.exponent)

        def reason(site: Site) -> Reason:
            """Returns the reason of an error that the range of float32 removes, and rounding for any other."""
            with_range = error(site, Mode.RANGE)
            was_infinite = math.isinf(error(site, Mode.AS_WRITTEN)) and not math.isinf(with_range)
            if not (was_infinite or with_range <= LARGEST_ERROR):
                return Reason.ROUNDING
            found = statistics[site]
            return Reason.OVERFLOW if found.overflow else Reason.UNDERFLOW if found.underflow else Reason.ROUNDING

        def rank(cause: Cause) -> tuple[bool, bool]:
            # A result that is only infinite because its operand is too large is not the first choice.
            fits = statistics[cause.site].max_abs <= cause.site.limit
            return cause.reason is Reason.ROUNDING and not finite, cause.reason is Reason.OVERFLOW and fits

        # An error of the forward pass explains the errors of the backward pass.
        for backward in (False, True):
            sites = [site for site in kept if site.part.backward == backward]
            causes = [Cause(site, reason(site)) for site in sites if error(site, Mode.AS_WRITTEN) > LARGEST_ERROR]
            if causes:
                return sorted(causes, key=rank)
        return [Cause(next(iter(kept)), Reason.ROUNDING)]

    def find_calls(self, cause: Cause, lines: Lines) -> Calls | None:
        """Finds the few calls of a line of which each one is wrong if it alone computes as it is written.

        If the line overflows or underflows, a call in which it only rounds does not count, although the overflow may
        amplify its rounding. Returns None if there are none, or many, as if the line is called once.
        """
        site, kept = cause.site, self.kept(lines.paths)
        count, size = self.step.calls.get(site.part.path, 1), self.step.counts[site]
        if count == 1 or size % count:  # the backward pass of the first layer may have fewer operations
            return None

        def error(calls: range, mode: Mode) -> float:
            modes = [mode if i in calls else Mode.FLOAT32 for i in range(count)]
            of_operations = tuple(mode for mode in modes for _ in range(size // count))
            return self.error(kept | {site: of_operations}, Mode.AS_WRITTEN, lines.exponent)

        def is_wrong(calls: range) -> bool:
            as_written = error(calls, Mode.AS_WRITTEN)
            if as_written <= LARGEST_ERROR or cause.reason is Reason.ROUNDING:
                return as_written > LARGEST_ERROR
            return as_written > 2 * error(calls, Mode.RANGE)  # without values out of range, the two are equal

        found: list[int] = []
        pending = [range(count)]
        while pending and len(found) <= MOST_CALLS:
            calls = pending.pop()
            if is_wrong(calls):
                middle = len(calls) // 2
                found += calls if middle == 0 else []
                pending += [calls[middle:], calls[:middle]] if middle else []
        if not 0 < len(found) <= min(MOST_CALLS, count - 1):
            return None
        # The backward pass runs the calls in reverse.
        numbers = sorted(count - i if site.part.backward else i + 1 for i in found)
        return Calls(site, tuple(numbers), count)

    def errors_alone(self, exponent: int) -> dict[Part, float]:
        """Returns the error if one part alone computes in half precision; nothing if there are too many parts."""
        parts = self.step.parts if len(self.step.parts) <= TRIED_ALONE else []
        alone = {part: {x: Mode.AS_WRITTEN for x in self.step.sites if x.part == part} for part in parts}
        return {part: self.error(modes, Mode.FLOAT32, exponent) for part, modes in alone.items()}


def smallest_set(count: int, fits: Callable[[Iterable[int]], bool]) -> list[int]:
    """Returns a set of integers below `count` that fits, and does not fit without any one of them.

    All of them together must fit, and so must any superset of a set that fits. It takes about `k log2(count)` calls for
    a set of k integers.
    """
    kept: list[int] = []
    start = 0
    while not fits(kept):
        if len(kept) == LARGEST_SET:
            return [*kept, *range(start, count)]
        # Without the integers below the new start the rest does not fit, and with the last of them it does.
        start = bisect.bisect_left(range(count), True, start, key=lambda i: not fits([*kept, *range(i, count)]))
        kept.append(start - 1)
    return kept


@jax.jit
def _perturb(x: jax.Array, fraction: float) -> jax.Array:
    """Changes values by a fraction, up or down, depending on their bits; not integers, which may be indices."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.int32)
    up = ((bits ^ (bits >> 7) ^ (bits >> 13)) & 1) == 1
    changed = x * jnp.where(up, 1 + fraction, 1 - fraction).astype(x.dtype)
    return jnp.where(x == jnp.round(x), x, changed)
