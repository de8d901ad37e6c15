"""Compares what a training step returns with float32, apart from what the rounding of its gradients changes.

A is the step as it is written, B the step whose update alone computes in float32, and C the step in float32. A and B
have the same gradients, so a result to which a gradient leads is compared in A and B, and any other one in A and C.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.lossless import Errors, Values, compare_pair, redraws
from jmpscale._diagnosis.modal_program import Forms, ModalProgram
from jmpscale._diagnosis.modes import Mode, Modes, Part, Site, Statistics
from jmpscale._diagnosis.operations import Path
from jmpscale._diagnosis.passes import Pass
from jmpscale._diagnosis.program import Program, Result
from jmpscale._diagnosis.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import (
    CANCELS,
    IS_RANDOM,
    NOISE_OF_CHANGE,
    TRIED_ALONE,
    AcceptedErrors,
)
from jmpscale._interpreter.compile import compiled_when_called


class Change(NamedTuple):
    """The change of a leaf of the state, or another result, beside its reference."""

    result: Result
    error: float  # the relative L2 norm of the difference; infinite if only the reference is finite, or is zero
    lost: float = 0.0  # the part of the change that is missing: 1 - <written, reference> / <reference, reference>
    is_finite: bool = True  # of the reference
    is_decisive: bool = True  # whether the change is more than the rounding of float32
    is_finite_as_written: bool = True
    is_zero: bool = False  # whether the leaf changes neither as written nor in the reference
    accepted: AcceptedErrors = AcceptedErrors()

    @property
    def is_narrow(self) -> bool:
        """Whether it is a leaf of the state that is stored in half precision."""
        return self.result.old is not None and is_narrow(self.result)

    @property
    def badness(self) -> float:
        """The error in units of the largest one that is accepted."""
        if not self.is_decisive:
            return 0.0
        return self.error / (self.accepted.narrow_change if self.is_narrow else self.accepted.change)


class Unchanged(NamedTuple):
    """Leaves with a gradient that do not change, because constants are rounded."""

    results: tuple[Result, ...] = ()
    paths: tuple[Path, ...] = ()  # the lines with these constants
    dtype: np.dtype | None = None  # of the constants


class Update(NamedTuple):
    """What half precision does to the results of a step."""

    changes: tuple[Change, ...] = ()
    paths: tuple[Path, ...] = ()  # the smallest set of lines that must compute in float32
    is_repaired: bool = True  # whether all changes are right if these lines, or all lines, compute in float32
    error_then: float = 0.0  # the largest error of a decisive change that remains
    alone: Mapping[Part, float] = MappingProxyType({})
    statistics: Mapping[Site, Statistics] = MappingProxyType({})
    sites: tuple[Site, ...] = ()  # of the update
    unchanged: Unchanged = Unchanged()

    @property
    def bad(self) -> list[Change]:
        return [change for change in self.changes if change.badness > 1]

    @property
    def worst(self) -> Change | None:
        """The change that is named: a leaf in half precision before one in float32, and a leaf before other results."""
        found = self.bad or [change for change in self.changes if change.is_decisive and change.error]
        return max(found, key=_importance) if found else None


def _importance(change: Change) -> tuple[bool, bool, float]:
    return change.is_narrow, change.result.old is not None, change.error


def examine_update(forms: Forms, results: Sequence[Result], scale: float, accepted: AcceptedErrors) -> Update:
    """Compares the results of a step at a loss scale, and finds the lines that must compute in float32."""
    if not results:
        return Update()
    program, recording = forms.precision.of_results(), forms.recording.of_results()
    trials = UpdateTrials(program, results, scale, accepted)
    trials.find_lossless(forms.program)
    changes = trials.changes({})
    update = [site for site in program.sites if site.part.pass_ is Pass.UPDATE]
    chosen: list[Path] = []
    then, is_repaired = changes, True
    for is_led, sites in ((True, update), (False, program.sites)):
        if any(x.badness > 1 and x.result.is_gradient_led == is_led for x in then):
            found = trials.find_lines(sites, is_led)
            is_repaired &= found is not None
            chosen += [path for path in found or () if path not in chosen]
            then = trials.changes(_in_float32(program.sites, chosen))
    is_large = max((x.badness for x in changes), default=0.0) > 0.25
    parts = list(dict.fromkeys(site.part for site in update))
    alone = trials.errors_alone(parts) if is_large and len(parts) <= TRIED_ALONE else {}
    recorded = [site for site in recording.sites if site.part.pass_ is Pass.UPDATE]
    records = recording.run(scale, {}, Mode.FLOAT32)[1] if recorded else {}
    statistics = {site: Statistics(*records[site]) for site in recorded if site in records}
    remaining = max((x.error for x in then if x.is_decisive), default=0.0)
    order = [path for path in program.paths if path in chosen]
    unchanged = _find_unchanged(forms, changes, scale)
    return Update(tuple(changes), tuple(order), is_repaired, remaining, alone, statistics, tuple(update), unchanged)


def _find_unchanged(forms: Forms, changes: Sequence[Change], scale: float) -> Unchanged:
    """Finds leaves that do not change, but do if constants in half precision have other last digits.

    The reference has the constants of the program, so no comparison shows that one of them is rounded, as 0.999 is to 1
    in the bias correction of an average.
    """
    leaves = [i for i, x in enumerate(changes) if x.is_zero and x.result.old is not None and x.result.is_gradient_led]
    if not leaves:
        return Unchanged()
    program = forms.constants.of_results()

    def moved(sites: Iterable[Site]) -> list[int]:
        outputs = program.run(scale, dict.fromkeys(sites, Mode.MOVED), Mode.FLOAT32)[0]
        return [i for i in leaves if not bool((outputs[i] == changes[i].result.old).all())]

    found = [site for site in program.sites if moved([site])] if moved(program.sites) else []
    which = moved(found) if found else []
    results = tuple(changes[i].result for i in which)
    return Unchanged(results, tuple(dict.fromkeys(x.part.path for x in found)), found[0].dtype if which else None)


def _in_float32(sites: Iterable[Site], paths: Iterable[Path]) -> dict[Site, Mode]:
    chosen = set(paths)
    return {site: Mode.FLOAT32 for site in sites if site.part.path in chosen}


class UpdateTrials:
    """Runs a step with other modes, and compares its results with their references."""

    def __init__(
        self, program: ModalProgram, results: Sequence[Result], scale: float, accepted: AcceptedErrors
    ) -> None:
        self._program, self._results, self._scale, self._accepted = program, results, scale, accepted
        self._update = {site: Mode.FLOAT32 for site in program.sites if site.part.pass_ is Pass.UPDATE}
        self._reference = self._run_reference()
        self._changes: dict[frozenset[tuple[Site, Any]], list[Change]] = {}
        self._lossless: dict[str, Change] = {}  # by the name of the leaf

    def _run(self, modes: Modes, default: Mode, consts: list[Any] | None = None) -> list[Any]:
        return self._program.run(self._scale, modes, default, consts)[0]

    def _run_reference(self, consts: list[Any] | None = None) -> list[Any]:
        """Returns the results to which a gradient leads from the float32 update, and others from the float32 step."""
        given = self._run(self._update, Mode.AS_WRITTEN, consts)
        all_led = all(x.is_gradient_led for x in self._results)
        whole = given if all_led else self._run({}, Mode.FLOAT32, consts)
        return [x if result.is_gradient_led else y for result, x, y in zip(self._results, given, whole, strict=True)]

    def changes(self, modes: Modes) -> list[Change]:
        """Returns the changes with some modes, and all other operations as written."""
        key = frozenset(modes.items())
        if key not in self._changes:
            values = self._run(modes, Mode.AS_WRITTEN)
            found = [_measure(*x) for x in zip(self._results, values, self._reference, strict=True)]
            changes = [_change(x, *y) for x, y in zip(self._results, jax.device_get(found), strict=True)]
            lossless = [self._lossless.get(x.result.name, x) for x in changes]
            self._changes[key] = [x._replace(accepted=self._accepted) for x in lossless]
        return self._changes[key]

    def find_lossless(self, program: Program) -> None:
        """Finds leaves in half precision whose changes are wrong, but that lose nothing, and accepts their changes."""
        bad = [x for x in self.changes({}) if x.is_narrow and x.badness > 1]
        self._find_pairs([x for x in bad if x.result.partners])
        self._find_random(program, [x for x in bad if x.result.is_random and x.result.name not in self._lossless])
        if self._lossless:
            self._changes.clear()

    def _find_pairs(self, bad: Sequence[Change]) -> None:
        if not bad:
            return
        named = self._values(self._run({}, Mode.AS_WRITTEN), self._reference)
        for change in bad:
            for partner in change.result.partners:
                pair = compare_pair(named[change.result.name], named[partner])
                if pair.cancels < CANCELS and pair.error < self._accepted.narrow_change:
                    self._lossless[change.result.name] = Change(change.result, pair.error)

    def _find_random(self, program: Program, bad: Sequence[Change]) -> None:
        found = {x.result.name: Errors() for x in bad}
        for consts in redraws(program, self._program.consts) if found else ():
            written, reference = self._run({}, Mode.AS_WRITTEN, consts), self._run_reference(consts)
            named = self._values(written, reference)
            for name, errors in found.items():
                errors.add(named[name])
        for change in bad:
            errors = found[change.result.name]
            if 0 < errors.remains < IS_RANDOM:
                self._lossless[change.result.name] = Change(change.result, errors.error, is_decisive=False)

    def _values(self, written: Sequence[Any], reference: Sequence[Any]) -> dict[str, Values]:
        """Returns the new values of the leaves of the state, by name."""
        found = zip(self._results, written, reference, strict=True)
        return {x.name: Values(y, z, x.old) for x, y, z in found if x.old is not None}

    def find_lines(self, sites: Sequence[Site], is_gradient_led: bool) -> list[Path] | None:
        """Finds a minimal set of lines with which no change of the results of one kind is bad."""
        paths = [path for path in self._program.paths if any(site.part.path == path for site in sites)]

        def fits(chosen: Sequence[Path]) -> bool:
            modes = _in_float32(sites, chosen)
            found = [x for x in self.changes(modes) if x.result.is_gradient_led == is_gradient_led]
            return max((x.badness for x in found), default=0.0) <= 1

        return smallest_set(paths, fits)

    def errors_alone(self, parts: Iterable[Part]) -> dict[Part, float]:
        """Returns the largest error of a change if one part of the update alone computes as it is written."""

        def error(part: Part) -> float:
            modes = {site: mode for site, mode in self._update.items() if site.part != part}
            return max(
                (x.error for x in self.changes(modes) if x.is_decisive and x.result.is_gradient_led), default=0.0
            )

        return {part: error(part) for part in parts}


def _change(result: Result, not_finite: float, written_not_finite: float, nonzero: float, *sums: float) -> Change:
    distance, size, product, old = map(float, sums)
    if not_finite:
        return Change(result, 0.0 if written_not_finite else math.inf, is_finite=False, is_decisive=False)
    if written_not_finite:
        return Change(result, math.inf, 1.0, is_finite_as_written=False)
    if (
        result.old is not None and distance and not nonzero
    ):  # zero in float32: it holds what rounding removes from another leaf
        return Change(result, 0.0, is_decisive=False)
    is_decisive = size > NOISE_OF_CHANGE**2 * old or not size
    error = 0.0 if not distance else math.sqrt(distance / size) if size else math.inf
    lost, is_zero = 1 - product / size if size else 0.0, not size and not error
    return Change(result, error, lost, is_decisive=is_decisive, is_zero=is_zero)


def _measure(result: Result, written: Any, reference: Any) -> Any:
    old = np.float32(0) if result.old is None else result.old
    return _numbers(written, reference, old)


@compiled_when_called
def _numbers(written: jax.Array, reference: jax.Array, old: jax.Array) -> jax.Array:
    """Returns whether values of the reference, and as written, are not finite; if the reference is nonzero; and sums.

    The sums are over the square of the difference of the changes, of the square of the change of the reference, of
    the product of the changes, and of the square of the old value, in units of the largest change of the reference,
    because squares overflow and underflow.
    """
    dtype = jnp.promote_types(reference.dtype, np.float32)
    old = jnp.broadcast_to(old.astype(dtype), reference.shape)
    not_finite = [(~jnp.isfinite(z)).astype(dtype) for z in (reference, written)]
    x, y = (jnp.where(jnp.isfinite(z), z.astype(dtype) - old, 0) for z in (written, reference))
    # One reduction with several operands compiles faster than several reductions.
    nonzero = (reference != 0).astype(dtype)
    *flags, largest, largest_written = _reduce(jnp.maximum, *not_finite, nonzero, jnp.abs(y), jnp.abs(x))
    unit = jnp.where(largest > 0, largest, jnp.maximum(largest_written, jnp.finfo(dtype).tiny))
    x, y, old = (jnp.clip(z / unit, -1e12, 1e12) for z in (x, y, old))
    sums = _reduce(jnp.add, (x - y) ** 2, y**2, x * y, old**2)
    return jnp.stack([z.astype(float) for z in (*flags, *sums)])


def _reduce(combine: Callable[[Any, Any], Any], *operands: jax.Array) -> list[jax.Array]:
    """Reduces arrays of one shape and dtype, which are not negative if `combine` is a maximum, to scalars."""
    zeros = tuple(np.zeros((), x.dtype) for x in operands)
    return list(jax.lax.reduce(operands, zeros, lambda x, y: tuple(map(combine, x, y)), range(operands[0].ndim)))
