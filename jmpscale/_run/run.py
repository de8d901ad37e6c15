"""Runs a step as it is written, and in float32, on the same batches."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import PyTree, check_has_values, check_no_refs, is_array, is_real, structure
from jmpscale._run.forms import Form, State, form_as_written, form_in_float32, widened
from jmpscale._run.measure import LARGE_CHANGE, ROUNDING, Difference, Differences, changed
from jmpscale._run.traced_run import Leaf, TracedRun, arrays_of, as_arrays

_LARGER = 1.1  # by how much the error of a later step must be larger
_LARGEST = 10.0  # errors of a step beyond are equal
_BEHIND = 0.25  # the missing part of a change from which on a leaf has fallen behind


class LeafOfRun(NamedTuple):
    """What a run makes of a leaf of its state, from the first step to the last."""

    leaf: Leaf
    written: Difference  # its change as written, beside the change in float32
    spread: Difference  # the change in float32 from a state that is rounded otherwise, beside the same
    spread_of_value: float  # the difference of the values after these runs in float32, relative to the value
    step: float  # a step in float32 from another state nearby, relative to the change in float32

    @property
    def missing(self) -> float:
        """The part of the change in float32 that the leaf does not make."""
        return 1 - self.written.progress


class WorstStep(NamedTuple):
    """The step whose changes differ most from the changes of the same step in float32, from the same state."""

    step: int
    error: float  # of the leaf with the largest error, if it has fallen behind; otherwise less
    arguments: tuple[Callable[..., Any], list[Any], dict[str, Any]]


class Measured(NamedTuple):
    """All that is measured in a run."""

    traced: TracedRun  # of the first batch
    steps: int
    losses: np.ndarray  # as written, in float32, and in float32 from a state that is rounded otherwise, by steps
    loss_nearby: float  # in float32, after a change of the state by 10%
    leaves: list[LeafOfRun]
    skips: tuple[int, int]  # as written, and in float32
    worst: WorstStep | None
    as_written: list[str]  # the operations in half precision that run as written in float32, too


def run_beside_float32(step: Callable[..., Any], state: Sequence[PyTree], batches: Iterable[PyTree]) -> Measured:
    """Runs a step for each batch: as written, and in float32 from the same state and from one rounded otherwise.

    Raises:
      ValueError: there are no batches, or they differ in structure.
    """
    runs: _Runs | None = None
    for i, batch in enumerate(batches):
        check_no_refs(batch, f"batch {i}")
        check_has_values(batch, f"batch {i}", "diagnose_run")
        runs = runs or _Runs(step, state, batch)
        runs.advance(batch)
    if runs is None:
        raise ValueError("batches must contain a batch for each step, got none. An iterator may be exhausted already.")
    return runs.measured()


class _Forms(NamedTuple):
    """A step for batches of one type, in both forms."""

    traced: TracedRun
    written: Form
    float32: Form


class _Runs:
    """Three runs, which take each step together."""

    def __init__(self, step: Callable[..., Any], state: Sequence[PyTree], batch: PyTree) -> None:
        self._step, self._initial, self._structure = step, state, structure(batch)
        self._forms: dict[str, _Forms] = {}
        self._current, self._batch = self._forms_for(batch), arrays_of(batch)
        self._traced = self._current.traced
        self._differences = Differences(self._traced)
        self._start = widened(self._traced.values)
        self._start_otherwise = changed(self._traced, self._start, ROUNDING)
        self._written, self._float32, self._otherwise = self._traced.values, self._start, self._start_otherwise
        self._losses: list[tuple[Any, Any, Any]] = []
        self._worst: WorstStep | None = None

    def advance(self, batch: PyTree) -> None:
        """Takes a step with a batch."""
        if structure(batch) != self._structure:
            raise ValueError(
                f"batches must have one structure, got {structure(batch)} as batch {len(self._losses)}, and "
                f"{self._structure} as the batches before it. Convert it, or omit it."
            )
        self._current, self._batch = self._forms_for(batch), arrays_of(batch)
        before = self._written
        self._written, loss = self._current.written.run(before, self._batch)
        single, _ = self._in_float32(widened(before))
        self._float32, loss_float32 = self._in_float32(self._float32)
        self._otherwise, loss_otherwise = self._in_float32(self._otherwise)
        if self._skips(self._written) == self._skips(before):
            self._compare(before, single)
        self._losses.append((loss, loss_float32, loss_otherwise))

    def measured(self) -> Measured:
        """Returns what the runs have shown."""
        skips = [self._skips(state) - self._skips(self._traced.values) for state in (self._written, self._float32)]
        nearby = changed(self._traced, self._float32, LARGE_CHANGE)
        after, loss_nearby = self._in_float32(nearby)
        return Measured(
            traced=self._traced,
            steps=len(self._losses),
            losses=np.asarray(jax.device_get(self._losses), np.float64).T if self._traced.loss else np.zeros((3, 0)),
            loss_nearby=math.nan if loss_nearby is None else float(loss_nearby),
            leaves=self._leaves(self._differences.norms(nearby, after)),
            skips=(skips[0], skips[1]),
            worst=self._worst,
            as_written=list(dict.fromkeys(name for x in self._forms.values() for name in x.float32.as_written)),
        )

    def _leaves(self, steps: Sequence[float]) -> list[LeafOfRun]:
        """Returns the leaves, given the norms of their changes in a step from a state nearby."""
        differences, start = self._differences, self._start
        written = differences.measure(start, self._written, start, self._float32)
        spread = differences.measure(self._start_otherwise, self._otherwise, start, self._float32)
        apart = differences.norms(self._float32, self._otherwise)
        values = differences.norms([jnp.zeros_like(x) if is_real(x) else x for x in start], self._float32)
        changes = differences.norms(start, self._float32)
        spreads = map(_ratio, apart, values)
        return list(map(LeafOfRun, differences.leaves, written, spread, spreads, map(_ratio, steps, changes)))

    def _forms_for(self, batch: PyTree) -> _Forms:
        """Returns the compiled step for batches of this type; values that are not arrays are part of the type."""
        leaves = jax.tree.leaves(as_arrays(batch))
        key = repr([(x.shape, x.dtype) if is_array(x) else x for x in leaves])
        if key not in self._forms:
            traced = TracedRun(self._step, self._initial, batch)
            self._forms[key] = _Forms(traced, form_as_written(traced), form_in_float32(traced))
        return self._forms[key]

    def _in_float32(self, state: State) -> tuple[State, Any]:
        return self._current.float32.run(state, self._batch)

    def _skips(self, state: State) -> int:
        return sum(int(np.max(state[x.input])) for x in self._traced.leaves if x.counts_skips)

    def _compare(self, before: State, single: State) -> None:
        """Compares a step with the same step in float32, and keeps it if it is the worst one so far.

        A leaf counts as much as it has fallen behind, because the changes of a step may be rounded in a right run, too,
        as in Kahan summation.
        """
        errors = list(map(_error_of_step, self._differences.measure(before, self._written, before, single)))
        if self._worst and max(errors, default=0.0) <= _LARGER * self._worst.error:
            return
        run = self._differences.measure(self._start, self._written, self._start, self._float32)
        behind = [min(abs(1 - x.progress) / _BEHIND, 1.0) if x.is_finite else 1.0 for x in run]
        error = max((x * part for x, part in zip(errors, behind, strict=True)), default=0.0)
        if self._worst is None or error > _LARGER * self._worst.error:
            self._worst = WorstStep(len(self._losses), error, self._current.traced.arguments(before, self._batch))


def _error_of_step(x: Difference) -> float:
    """Returns the error of the change of a leaf in a step, if it can be compared."""
    if not (x.is_decisive and x.is_finite_in_reference):
        return 0.0
    return min(x.error, _LARGEST) if x.is_finite else _LARGEST


def _ratio(x: float, size: float) -> float:
    return x / size if size else math.inf
