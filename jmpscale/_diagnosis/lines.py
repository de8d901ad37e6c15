"""Runs a step with other modes, and finds the lines that must compute in float32, and the reasons."""

import bisect
import copy
import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    CHANGES,
    LARGEST_LOSS_ERROR,
    LARGEST_SET,
    MOST_CALLS,
    MOST_SUSPECTS,
    NEGLIGIBLE,
    NOISE,
    SAME_SIZE,
    SMALL_ERROR,
    TRIED_ALONE,
    WRONG_ERROR,
)


class Reason(enum.Enum):
    """Why a result must be computed in float32."""

    OVERFLOW = "overflows"
    OVERFLOW_AND_ROUNDING = "overflows and loses precision"
    UNDERFLOW = "underflows"
    ROUNDING = "loses precision"

    @property
    def is_overflow(self) -> bool:
        return self in (Reason.OVERFLOW, Reason.OVERFLOW_AND_ROUNDING)


class Cause(NamedTuple):
    """Where an error begins, and why."""

    site: Site
    reason: Reason


class WrongCalls(NamedTuple):
    """Which calls of a line are wrong alone, such as the 8th of 12 layers of a loop in Python."""

    site: Site
    numbers: tuple[int, ...]  # from 1, in the order of the forward pass
    total: int
    inputs: tuple[str, ...] = ()  # the names of the arguments that the calls cast, if each of them casts one

    @property
    def text(self) -> str:
        """The numbers of the calls, such as `8 of 12`, or the names of the arguments, such as `params['w']`."""
        return ", ".join(self.inputs) or f"{', '.join(map(str, self.numbers))} of {self.total}"


class Lines(NamedTuple):
    """A minimal set of lines that must compute in float32, in program order, and what remains if they do."""

    paths: list[Path]
    exponent: int  # of a loss scale that fits then
    scales: Scales
    limit: float = WRONG_ERROR  # the largest error that is right

    @property
    def is_minimal(self) -> bool:
        """Whether each line was tried without; the lines of a larger set are not."""
        return len(self.paths) <= LARGEST_SET


class Suspects(NamedTuple):
    """Lines that make most of an error that need not be harmful, the worst one first."""

    part: Part  # with the largest error alone
    alone: float  # this error
    paths: list[Path]
    error: float  # with these lines in float32


class Trials:
    """Runs a step with other modes, and compares it with the reference: the step in float32, at a scale of 1."""

    def __init__(self, programs: ModalPrograms, inputs: Sequence[str], *, has_scaler: bool = True) -> None:
        """`inputs` are the names of the constants of the step, empty for those that are not arguments."""
        self._inputs, self._has_scaler = inputs, has_scaler
        self.set_programs(programs)
        self._recording = programs.recording.of_gradients()
        self._statistics: dict[float, dict[Site, Statistics]] = {}
        self.reference = self._run_in_float32(1.0)
        self.loss = float(self.reference[0])
        self.measured = measure(self.reference, self.reference)
        changes = [self._error_of_a_change(change) for change in CHANGES]
        # A gradient decides if it is more than rounding noise, and not negligible beside the others. The gradient of a
        # bias before a normalization is zero. In a computed one there is only rounding noise, which the smallest change
        # of the arguments replaces by other noise.
        norms, noise = self.measured.norms[1:], np.max(changes, axis=0)[1:]
        self.decisive = (noise < NOISE) & (norms > 0) & (norms >= NEGLIGIBLE * norms.max(initial=0.0))
        # Rounding the arguments to half precision changes them by half as much, or less.
        rounding = max((2.0 ** -jnp.finfo(site.dtype).nmant for site in self.step.sites), default=2.0**-10)
        self._largest_loss_error = max(LARGEST_LOSS_ERROR, changes[0][0] / CHANGES[0] * rounding)

    def _error_of_a_change(self, change: float) -> np.ndarray:
        """Returns the relative change of the loss and of each gradient in float32, after a change of all arguments."""
        consts = [_perturb(x, change) for x in self.step.consts]
        return measure(self._recording.run(1.0, {}, Mode.FLOAT32, consts)[0], self.reference).errors

    def of(self, step: Step) -> "Trials":
        """Returns trials of another form of the step, which is compared with the same reference."""
        trials = copy.copy(self)
        trials.set_programs(ModalPrograms(step))
        return trials

    def set_programs(self, programs: ModalPrograms) -> None:
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

    def is_wrong_by_overflow(self, exponent: int) -> bool:
        """Tests whether results overflow, and the range of float32 makes the error much smaller."""
        modes = {x: Mode.RANGE for x, found in self.statistics(2.0**exponent).items() if found.overflow}
        if not modes:
            return False
        written, with_range = (self.error(x, Mode.AS_WRITTEN, exponent) for x in ({}, modes))
        return with_range < written / SAME_SIZE

    def find_lines(self, exponents: Sequence[int], limit: float = WRONG_ERROR) -> Lines | None:
        """Finds a minimal set of lines that must compute in float32, so that no error exceeds `limit` at a loss scale.

        Returns None if the step is wrong with all lines in float32, too. Of several scales, it is the first one.
        """
        paths = self.step.paths
        scales = list(dict.fromkeys(exponents))

        def is_right(modes: Modes, exponent: int) -> bool:
            return self.error(modes, Mode.AS_WRITTEN, exponent) <= limit

        def fits(chosen: Iterable[int]) -> bool:
            modes = self.kept([paths[i] for i in chosen])
            for exponent in scales:
                if is_right(modes, exponent):
                    scales.remove(exponent)
                    scales.insert(0, exponent)  # it probably fits the next set, too
                    return True
            return False

        if not fits(range(len(paths))):
            return None
        kept = [paths[i] for i in smallest_set(len(paths), fits)]
        exponent = next(k for k in exponents if is_right(self.kept(kept), k))
        return Lines(kept, exponent, self.find_scales(exponent, kept), limit)

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

        The first cause has the largest error, or is the first one of several with errors of this size.

        If the range of float32 makes the error much smaller, with the precision as written, the result overflows or
        underflows. Rounding is the reason for an error that is not `finite` only if nothing else is.
        """
        kept = self.kept(lines.paths)
        statistics = self.statistics(2.0**lines.exponent)

        def error(site: Site, mode: Mode) -> float:
            return self.error(kept | {site: mode}, Mode.AS_WRITTEN, lines.exponent)

        def reason(site: Site) -> Reason:
            found = statistics[site]
            # Not `<=`: both may be infinite.
            if error(site, Mode.RANGE) < error(site, Mode.AS_WRITTEN) / SAME_SIZE:
                return Reason.OVERFLOW if found.overflow else Reason.UNDERFLOW if found.underflow else Reason.ROUNDING
            return Reason.OVERFLOW_AND_ROUNDING if found.overflow else Reason.ROUNDING

        def rank(cause: Cause) -> tuple[bool, bool, bool]:
            # A result that is only infinite because its operand is too large is not the first choice.
            fits = statistics[cause.site].max_abs <= cause.site.limit
            is_smaller = error(cause.site, Mode.AS_WRITTEN) < largest_error / SAME_SIZE
            return cause.reason is Reason.ROUNDING and not finite, is_smaller, cause.reason.is_overflow and fits

        # An error of the forward pass explains the errors of the backward pass.
        for backward in (False, True):
            wrong = [x for x in kept if x.part.backward == backward and error(x, Mode.AS_WRITTEN) > lines.limit]
            if wrong:
                largest_error = max(error(x, Mode.AS_WRITTEN) for x in wrong)
                return sorted([Cause(x, reason(x)) for x in wrong], key=rank)
        return [Cause(next(iter(kept)), Reason.ROUNDING)]

    def find_calls(self, cause: Cause, lines: Lines) -> WrongCalls | None:
        """Finds the few calls of a line of which each one is wrong if it alone computes as it is written.

        If the line overflows or underflows, a call in which it only rounds does not count, although the overflow may
        amplify its rounding. Returns None if there are none, or many, as if the line is called once; if the line is
        still wrong with these calls in float32; and if it is not certain which call an operation belongs to.
        """
        site, kept = cause.site, self.kept(lines.paths)
        calls = self.step.calls(site)
        if calls is None:
            return None

        def error(chosen: Collection[int], mode: Mode, others: Mode = Mode.FLOAT32) -> float:
            of_operations = tuple(mode if call in chosen else others for call in calls.of_operations)
            return self.error(kept | {site: of_operations}, Mode.AS_WRITTEN, lines.exponent)

        def is_wrong(chosen: range) -> bool:
            as_written = error(chosen, Mode.AS_WRITTEN)
            if as_written <= lines.limit or cause.reason in (Reason.ROUNDING, Reason.OVERFLOW_AND_ROUNDING):
                return as_written > lines.limit
            return as_written > SAME_SIZE * error(chosen, Mode.RANGE)  # equal without values out of range

        found: list[int] = []
        pending = [range(calls.total)]
        while pending and len(found) <= MOST_CALLS:
            chosen = pending.pop()
            if is_wrong(chosen):
                middle = len(chosen) // 2
                found += chosen if middle == 0 else []
                pending += [chosen[middle:], chosen[:middle]] if middle else []
        if not 0 < len(found) <= min(MOST_CALLS, calls.total - 1):
            return None
        without = error(found, Mode.FLOAT32, Mode.AS_WRITTEN)
        if without > lines.limit and not without < error(range(calls.total), Mode.AS_WRITTEN) / SAME_SIZE:
            return None
        inputs = tuple(self._inputs[calls.inputs[i]] for i in sorted(found)) if calls.inputs else ()
        if not all(inputs):  # a cast of an array that is not an argument
            return None
        return WrongCalls(site, tuple(i + 1 for i in sorted(found)), calls.total, inputs)

    def errors_alone(self, exponent: int) -> dict[Part, float]:
        """Returns the error if one part alone computes in half precision; nothing if there are too many parts."""
        parts = self.step.parts if len(self.step.parts) <= TRIED_ALONE else []
        alone = {part: {x: Mode.AS_WRITTEN for x in self.step.sites if x.part == part} for part in parts}
        return {part: self.error(modes, Mode.FLOAT32, exponent) for part, modes in alone.items()}

    def find_suspects(self, alone: Mapping[Part, float], exponent: int) -> Suspects | None:
        """Finds the lines with the largest errors alone: as many as make the error small in float32, if few do."""
        if not alone:
            return None
        parts = sorted(alone, key=lambda part: -alone[part])
        paths = list(dict.fromkeys(part.path for part in parts))
        sets = [paths[:count] for count in range(1, min(MOST_SUSPECTS, len(paths)) + 1)]
        errors = [self.error(self.kept(chosen), Mode.AS_WRITTEN, exponent) for chosen in sets]
        found = next((i for i, error in enumerate(errors) if error < SMALL_ERROR), 0)
        return Suspects(parts[0], alone[parts[0]], sets[found], errors[found])


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
