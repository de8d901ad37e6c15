"""Finds leaves of the state that a step cannot shrink, or move, by running its update at other values of these leaves.

The new value of an average, or of a parameter with weight decay, is its old value times a decay, plus something else,
which does not depend on it: the gradients are given. So the difference between two runs is the decay, however it is
written.
"""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.run.lossless import norm
from jmpscale._diagnosis.run.modes import Mode, Site, is_near_one, perturbed
from jmpscale._diagnosis.run.update_trials import UpdateTrials
from jmpscale._diagnosis.thresholds import (
    FAR_FROM_AVERAGED,
    LARGE_VALUE,
    LARGEST_NARROW_CHANGE_ERROR,
    SMALLEST_DECAY,
    STALLED,
)
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs import flow


class Stalled(NamedTuple):
    """A leaf that decays in float32, but not as it is written."""

    result: Result
    decay: float  # in float32, with the constants of the program
    dtype: np.dtype  # that rounds the decay: of the leaf, or of a constant
    # Where a constant near 1 is rounded, as 0.999 is to 1 in bfloat16; in float32, too, the decay is 1 then.
    constants: bool = False
    paths: tuple[Path, ...] = ()  # the lines with these constants, if the leaf itself loses nothing
    arguments: tuple[str, ...] = ()  # the arguments that are these constants
    is_distant: bool = False  # whether it moves, but stays far from what it averages

    @property
    def example(self) -> float:
        """A decay that is 1 in the dtype."""
        return 1 - float(jnp.finfo(self.dtype).eps) / 8


class Unchanged(NamedTuple):
    """Leaves that do not change because constants near 1 are rounded."""

    results: tuple[Result, ...]
    paths: tuple[Path, ...]  # the lines with these constants
    dtype: np.dtype  # of the constants


class _Constant(NamedTuple):
    """A constant near 1 in half precision: of an operation, or an array with one value."""

    dtype: np.dtype
    site: Site | None = None
    input: int | None = None  # the position of the array among the constants of the program


class DecayTrials:
    """Runs the update in float32 with other values of the state and of constants."""

    def __init__(self, trials: UpdateTrials) -> None:
        self._trials = trials
        self._program = trials.forms.constants
        arrays = enumerate(trials.forms.program.consts)
        scalars = [(i, x.dtype) for i, x in arrays if is_narrow(x) and x.size == 1 and is_near_one(x.ravel()[0])]
        self.constants = [_Constant(site.dtype, site=site) for site in self._program.sites]
        self.constants += [_Constant(dtype, input=i) for i, dtype in scalars]

    def run(self, changed: Sequence[_Constant] = (), values: Mapping[int, Any] = MappingProxyType({})) -> list[Any]:
        """Returns the results with some constants perturbed, and with other values of some arrays."""
        consts = list(self._trials.program.consts)
        for x in changed:
            if x.input is not None:
                consts[x.input] = perturbed(consts[x.input], x.dtype)
        for i, x in values.items():
            consts[i] = x
        modes = {x.site: Mode.PERTURBED for x in changed if x.site is not None}
        return self._program.run(self._trials.scale, modes, Mode.FLOAT32, consts)[0]

    def decays(self, group: Sequence[int], changed: Sequence[_Constant] = ()) -> dict[int, float]:
        """Returns the decays of some results, none of which is computed from the old value of another one."""
        inputs = [k for i in group if (k := self._trials.results[i].input) is not None]
        consts = self._trials.program.consts

        def run(value: float) -> list[Any]:
            return self.run(changed, {k: jnp.full_like(consts[k], value) for k in inputs})

        first, second = run(LARGE_VALUE), run(2 * LARGE_VALUE)
        return {i: float(jnp.mean((second[i] - first[i]) / LARGE_VALUE)) for i in group}

    def lost(self, group: Sequence[int], decays: Mapping[int, float]) -> dict[int, list[_Constant]]:
        """Returns the results of a group that decay only if constants near 1 are smaller, with these constants."""
        own = {self._trials.results[i].input for i in group}
        constants = [x for x in self.constants if x.input is None or x.input not in own]

        def shrinking(changed: Sequence[_Constant], among: Sequence[int]) -> list[int]:
            after = self.decays(among, changed)
            least = min(float(jnp.finfo(x.dtype).eps) for x in changed) / 8
            return [i for i in among if decays[i] - after[i] > least]

        without = [i for i in group if abs(decays[i] - 1) < SMALLEST_DECAY]
        without = shrinking(constants, without) if constants and without else []
        found: dict[int, list[_Constant]] = {i: [] for i in without}
        for x in constants if without else ():
            for i in shrinking([x], without):
                found[i].append(x)
        return {i: changed for i, changed in found.items() if changed}


def find_stalled(trials: UpdateTrials) -> list[Stalled]:
    """Returns the leaves that a step cannot shrink, because it changes them by less than half of the last place."""
    leaves = [i for i, x in enumerate(trials.results) if x.is_changed]
    if not leaves:
        return []
    runs = DecayTrials(trials)
    found: list[Stalled] = []
    for group in _groups(trials, leaves):
        decays = runs.decays(group)
        lost = runs.lost(group, decays)
        narrow = [i for i in group if i not in lost and _is_stalled(decays[i], trials.results[i])]
        rounded = [trials.results[i] for i in (*narrow, *lost) if is_narrow(trials.results[i])]
        lossless = trials.find_lossless(rounded)
        found += [_of_constants(trials, trials.results[i], constants, lossless) for i, constants in lost.items()]
        own = [trials.results[i] for i in narrow if trials.results[i].name not in lossless]
        found += [Stalled(x, decays[i], x.dtype) for i in narrow if (x := trials.results[i]) in own]
        found += _find_distant(trials, {i: decays[i] for i in group if i not in lost and i not in narrow})
    return found


def _find_distant(trials: UpdateTrials, decays: Mapping[int, float]) -> list[Stalled]:
    """Returns the averages in half precision of other values than gradients that cannot come near to these values.

    Without gradients, the new value of an average that begins at zero shows what it averages. In half precision it does
    not move from a value that is too near. What gradients do is not known: if they vary much from step to step, an
    average moves nevertheless.
    """
    zeros = {i: trials.filled(i, 0.0) for i, x in decays.items() if _is_average(x, trials.results[i])}
    if not zeros:
        return []
    begun = trials.without_gradients(zeros, Mode.FLOAT32)
    averaged = {i: begun[i] / np.float32(1 - decays[i]) for i in zeros}
    dtypes = {i: trials.results[i].dtype for i in zeros}
    far = {i: ((1 + FAR_FROM_AVERAGED) * x).astype(dtypes[i]).astype(np.float32) for i, x in averaged.items()}
    exact, written = (trials.without_gradients(far, mode) for mode in (Mode.FLOAT32, Mode.AS_WRITTEN))
    errors = {i: (float(norm(written[i] - exact[i])), float(norm(exact[i] - x))) for i, x in far.items()}
    wrong = [i for i, (error, change) in errors.items() if error > LARGEST_NARROW_CHANGE_ERROR * change > 0]
    lossless = trials.find_lossless([trials.results[i] for i in wrong])
    found = [(i, trials.results[i]) for i in wrong if trials.results[i].name not in lossless]
    return [Stalled(x, decays[i], x.dtype, is_distant=True) for i, x in found]


def _is_average(decay: float, result: Result) -> bool:
    return is_narrow(result) and SMALLEST_DECAY < 1 - decay < 0.5


def _of_constants(
    trials: UpdateTrials, result: Result, constants: Sequence[_Constant], lossless: Container[str]
) -> Stalled:
    names = trials.program.names
    paths = dict.fromkeys(x.site.part.path for x in constants if x.site is not None)
    arguments = tuple(names[x.input] for x in constants if x.input is not None and names[x.input])
    loses_nothing = not is_narrow(result) or result.name in lossless
    return Stalled(result, 1.0, constants[0].dtype, True, tuple(paths) if loses_nothing else (), arguments)


def _is_stalled(decay: float, result: Result) -> bool:
    return is_narrow(result) and SMALLEST_DECAY < 1 - decay < STALLED * float(jnp.finfo(result.dtype).eps)


def _groups(trials: UpdateTrials, leaves: Sequence[int]) -> list[list[int]]:
    """Divides results into groups in which no result is computed from the old value of another one."""
    of_input = {trials.results[i].input: i for i in leaves}
    jaxpr = trials.forms.program.jaxpr
    labels = [frozenset([of_input[i]]) if i in of_input else flow.NONE for i in range(len(jaxpr.constvars))]
    read = flow.follow(jaxpr, constants=labels)
    groups: list[list[int]] = []
    for i in leaves:
        group = next((x for x in groups if not any(j in read[i] or i in read[j] for j in x)), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def find_unchanged(trials: UpdateTrials, changes: Sequence[Change], known: Container[str]) -> Unchanged | None:
    """Finds leaves that do not change, but do if constants in half precision have other last digits, unless `known`.

    The reference has the constants of the program, so no comparison shows that one of them is rounded, as 0.999 is to 1
    in the bias correction of an average.
    """
    led = [i for i, x in enumerate(changes) if x.is_zero and x.result.is_changed and x.result.is_gradient_led]
    leaves = [i for i in led if changes[i].result.name not in known]
    if not leaves:
        return None
    runs = DecayTrials(trials)

    def changed_by(constants: Sequence[_Constant]) -> list[int]:
        outputs = runs.run(constants)
        return [i for i in leaves if not bool((outputs[i] == on_device(trials.old(trials.results[i]))).all())]

    constants = [x for x in runs.constants if x.site is not None]
    found = [x for x in constants if changed_by([x])] if constants and changed_by(constants) else []
    if not found or not (which := changed_by(found)):
        return None
    paths = dict.fromkeys(x.site.part.path for x in found if x.site is not None)
    return Unchanged(tuple(trials.results[i] for i in which), tuple(paths), found[0].dtype)
