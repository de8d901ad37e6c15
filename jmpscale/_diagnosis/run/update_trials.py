"""Runs the update of a step, whose gradients are given, with other modes, and compares its results with float32."""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._base.tree import is_real
from jmpscale._diagnosis.run.changes import Change, measure_changes
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.lossless import (
    ErrorsOfDraws,
    Values,
    error_of_sum,
    may_cancel,
    may_draw,
    norm,
    other_draw,
    sketch,
)
from jmpscale._diagnosis.run.modes import Mode, Modes, Part, Site
from jmpscale._diagnosis.run.moves import perturb
from jmpscale._diagnosis.run.scaler_group import LossScales
from jmpscale._diagnosis.thresholds import DRAWS, LARGE_GRADIENT, OTHER_VALUES, TRIED_ALONE, AcceptedErrors
from jmpscale._diagnosis.trace.cut import UpdateProgram
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs.interpret import widen
from jmpscale._programs.jaxpr import RANDOM, equations


class UpdateTrials:
    """Runs the update with other modes, and compares its results with those in float32."""

    def __init__(
        self,
        update: UpdateProgram,
        given: Sequence[Any],
        results: Sequence[Result],
        scale: LossScales,
        accepted: AcceptedErrors,
    ) -> None:
        """Creates trials of an update with the values that it is given; its first constants are those of the step."""
        self.forms = Forms(update.with_given(given))
        self._gradients = update.gradients
        self._only_as_written = update.written
        self.program = self.forms.precision
        self.results = results
        self.scale, self._accepted = scale, accepted
        self._consts = self.program.consts
        self.reference, self._as_written = self._run({}, Mode.FLOAT32), self._run({}, Mode.AS_WRITTEN)
        self._changes: dict[frozenset[tuple[Site, Any]], list[Change]] = {}
        self._lossless: dict[str, Change] = {}  # by the name of the leaf
        self._draws = any(eqn.primitive.name in RANDOM for eqn, _ in equations(self.forms.program.jaxpr))
        self._noise: set[str] = set()  # the names of the leaves whose changes are noise
        self._tested: set[str] = set()  # the names of the leaves that may be lossless

    def old(self, result: Result) -> Any:
        """Returns the value before the step; None if the result is not a leaf of the state."""
        return None if result.input is None else self._consts[result.input]

    def filled(self, i: int, value: float) -> Any:
        """Returns an array like the value of a leaf before the step, filled with a number."""
        return jnp.full_like(on_device(self.old(self.results[i])), value)

    def _run(self, modes: Modes, default: Mode, consts: list[Any] | None = None) -> list[Any]:
        return self.program.run(self.scale, modes, default, consts)[0]

    def find_noise(self, bad: Sequence[Change]) -> None:
        """Finds leaves whose changes are so small that a small change of what they depend on changes them more.

        When an average has reached what it averages, its change is a small difference, in float32, too.
        """
        own = {x.result.input for x in bad}
        if not own:
            return
        arrays = {i for i, x in enumerate(self.forms.program.consts) if is_real(x) and np.ndim(x)}
        arrays = arrays.difference(own, self._only_as_written)
        others = arrays.union(self._gradients)
        consts = [x * np.float32(1 + OTHER_VALUES) if i in others else x for i, x in enumerate(self._consts)]
        written, changed = self._as_written, self._run({}, Mode.FLOAT32, consts)
        for change in bad:
            i = self.results.index(change.result)
            differences = [x[i] - self.reference[i] for x in (written, changed)]
            error, response = (float(norm(x if change.part is None else x[change.part])) for x in differences)
            if error < response < math.inf:
                self._noise.add(change.result.name)
        self._changes.clear()

    def grown(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the results in float32 at other values of some leaves, with other data and gradients of zeros.

        The values are given by the positions of the results.
        """
        consts = [perturb(x, OTHER_VALUES) for x in self._consts]
        return self._run({}, Mode.FLOAT32, self._with(self._zero_gradients(consts), values))

    def without_gradients(self, values: Mapping[int, Any], mode: Mode) -> list[Any]:
        """Returns the results at other values of some leaves, with gradients of zeros."""
        return self._run({}, mode, self._with(self._zero_gradients(self._consts), values))

    def after_two_steps(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the results as written of two steps, which begin at other values of some leaves."""
        consts = self._with(self._consts, values)
        first = self._run({}, Mode.AS_WRITTEN, consts)
        return self._run({}, Mode.AS_WRITTEN, self._after(first, consts))

    def _zero_gradients(self, consts: Sequence[Any]) -> list[Any]:
        """Returns constants with gradients of zeros."""
        return [jnp.zeros_like(x) if i in self._gradients else x for i, x in enumerate(consts)]

    def _with(self, consts: Sequence[Any], values: Mapping[int, Any]) -> list[Any]:
        inputs = {self.results[i].input: value for i, value in values.items()}
        return [inputs.get(i, x) for i, x in enumerate(consts)]

    def changes(self, modes: Modes) -> list[Change]:
        """Returns the changes with some modes, and all other operations as written."""
        key = frozenset(modes.items())
        if key not in self._changes:
            olds = [self.old(x) if x.is_changed else None for x in self.results]
            written = self._run(modes, Mode.AS_WRITTEN) if modes else self._as_written
            changes = measure_changes(self.results, olds, written, self.reference, self._accepted)
            known = [self._lossless.get(x.result.name, x) for x in changes]
            self._changes[key] = [x._replace(is_decisive=False) if x.result.name in self._noise else x for x in known]
        return self._changes[key]

    def with_lines(self, paths: Collection[Path]) -> dict[Site, Mode]:
        """Returns the modes with which some lines compute in float32."""
        return {site: Mode.FLOAT32 for site in self.program.sites if site.part.path in paths}

    def find_lossless(self, results: Sequence[Result]) -> dict[str, Change]:
        """Returns the changes of the leaves that lose nothing, although they are rounded, by name."""
        unknown = [x for x in results if x.name not in self._tested]
        self._tested.update(x.name for x in unknown)
        if unknown:
            self._find_pairs(unknown)
            self._find_random([x for x in unknown if x.name not in self._lossless])
            self._changes.clear()
        return {x.name: self._lossless[x.name] for x in results if x.name in self._lossless}

    def _find_pairs(self, results: Iterable[Result]) -> None:
        """Finds leaves of which another one takes what rounding removes, and adds it in the next step."""
        pairs = {x: self._possible_partners(x) for x in results}
        if not any(pairs.values()):
            return
        steps = [self._values(*outputs) for outputs in self._two_steps()]
        for result, partners in pairs.items():
            error = min(
                (error_of_sum([(x[result.name], x[name]) for x in steps], sign) for name, sign in partners),
                default=math.inf,
            )
            if error < self._accepted.narrow_change:
                self._lossless[result.name] = Change(result, error)

    def _possible_partners(self, result: Result) -> list[tuple[str, int]]:
        """Returns the leaves whose errors may be those of a leaf, with the sign with which they cancel."""
        own, shape = self._sketches[result.name], np.shape(self.old(result))
        leaves = [x for x in self.results if x.is_changed and np.shape(self.old(x)) == shape]
        others = [x.name for x in leaves if x.name != result.name]
        return [(x, sign) for x in others for sign in (1, -1) if may_cancel(own, self._sketches[x], sign)]

    @functools.cached_property
    def _sketches(self) -> dict[str, list[np.ndarray]]:
        """Sketches of the errors of the leaves after one step and after two, by name.

        The values themselves would take the memory of several states.
        """
        steps = [self._values(*outputs) for outputs in self._two_steps()]
        return {name: [np.asarray(sketch(values[name])) for values in steps] for name in steps[0]}

    def _two_steps(self) -> list[tuple[list[Any], list[Any]]]:
        """Returns the results, as written and in float32, after one step and after two with the same gradients."""
        first = self._as_written, self.reference
        runs = zip((Mode.AS_WRITTEN, Mode.FLOAT32), first, strict=True)
        second = [self._run({}, mode, self._after(outputs, self._consts)) for mode, outputs in runs]
        return [first, (second[0], second[1])]

    def _after(self, outputs: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        """Returns the constants of the next step."""
        consts = list(consts)
        for result, x in zip(self.results, outputs, strict=True):
            if result.input is not None:
                consts[result.input] = widen(x)
        return consts

    def _find_random(self, results: Sequence[Result]) -> None:
        """Finds leaves that are rounded at random, by running the step with other random numbers."""
        if not results or not self._random_inputs:
            return
        _, changes = self._changes_of_draw(0, 1.0)
        groups: dict[float, list[Result]] = {}
        for result in results:
            groups.setdefault(self._factor(result, changes[result.name]), []).append(result)
        for factor, group in groups.items():
            found = {x.name: ErrorsOfDraws() for x in group}
            for draw in range(DRAWS):
                written, reference = self._changes_of_draw(draw, factor)
                for name, errors in found.items():
                    errors.add(written[name], reference[name])
            random = [x for x in group if found[x.name].is_random]
            lossless = (Change(x, found[x.name].error, is_decisive=False) for x in random)
            self._lossless.update((x.result.name, x) for x in lossless)

    def _factor(self, result: Result, change: Any) -> float:
        """Returns the factor of the gradients with which a change is a quarter of the last place.

        With smaller changes, few values would be rounded up in a few draws; larger changes are not lost.
        """
        if not self._gradients:
            return 1.0
        last_place = jnp.abs(on_device(self.old(result))) * float(jnp.finfo(result.dtype).eps)
        ratios = jnp.where(change != 0, last_place / 4 / jnp.abs(change), jnp.nan)
        ratio = float(jnp.nan_to_num(jnp.nanmedian(ratios)))
        return 8.0 ** max(0, round(math.log(max(ratio, 1.0), 8)))

    def _changes_of_draw(self, draw: int, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the changes that gradients, times a factor, make of the leaves, as written and in float32.

        Without known gradients, these are all changes. Otherwise noise, which may be in both runs, and be lost as well,
        is not part of them.
        """
        consts = other_draw(self._consts, self._random_inputs, draw)

        def run(mode: Mode, factor: float) -> list[Any]:
            scaled = [x * np.float32(factor) if i in self._gradients else x for i, x in enumerate(consts)]
            return self._run({}, mode, scaled)

        def changes(mode: Mode) -> dict[str, Any]:
            before = run(mode, 0.0) if self._gradients else [self.old(x) for x in self.results]
            found = zip(self.results, run(mode, factor), before, strict=True)
            return {x.name: y - on_device(z) for x, y, z in found if x.is_changed}

        return changes(Mode.AS_WRITTEN), changes(Mode.FLOAT32)

    def changed_by_other_gradients(self, results: Sequence[Result]) -> set[str]:
        """Returns the names of the leaves that change if gradients are finite, large, and not zero."""
        if not results or not self._gradients:
            return set()

        def other(x: Any) -> jax.Array:
            return jnp.where(jnp.isfinite(x) & (x != 0), LARGE_GRADIENT * x, 1)

        consts = [other(x) if i in self._gradients else x for i, x in enumerate(self._consts)]
        outputs = dict(zip((x.name for x in self.results), self._run({}, Mode.FLOAT32, consts), strict=True))
        return {x.name for x in results if not bool((outputs[x.name] == on_device(self.old(x))).all())}

    def varies_with_random_numbers(self, result: Result) -> bool:
        """Tests whether a result is another one with other random numbers."""
        i, inputs = self.results.index(result), self._random_inputs
        if not inputs:
            return False
        first, second = (self._run({}, Mode.AS_WRITTEN, other_draw(self._consts, inputs, draw))[i] for draw in (0, 1))
        return not bool((first == second).all())

    @property
    def _random_inputs(self) -> list[int]:
        """The positions of the arguments that are random keys, or counts of which keys may be made."""
        if not self._draws:
            return []
        consts, names = self.forms.program.consts, self.program.names
        return [i for i, x in enumerate(consts) if names[i] and may_draw(x)]

    def _values(self, written: Sequence[Any], reference: Sequence[Any]) -> dict[str, Values]:
        """Returns the new values of the leaves of the state, by name."""
        found = zip(self.results, written, reference, strict=True)
        return {x.name: Values(y, z, on_device(self.old(x))) for x, y, z in found if x.is_changed}

    def errors_alone(self) -> dict[Part, float]:
        """Returns the largest error of a change if one part alone computes as it is written.

        Returns nothing if there are too many parts.
        """
        parts = self.program.parts

        def error(part: Part) -> float:
            modes = {site: Mode.FLOAT32 for site in self.program.sites if site.part != part}
            return max((x.error for x in self.changes(modes) if x.is_decisive), default=0.0)

        return {part: error(part) for part in parts} if len(parts) <= TRIED_ALONE else {}
