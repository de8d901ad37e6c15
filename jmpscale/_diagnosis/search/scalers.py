"""Divides the gradients of a step among its scalers, by running the step in float32 with other loss scales.

A gradient depends on a scaler if it is NaN at a loss scale of NaN. It may depend on several, as if the next loss reads
the parameters that the first scaler has changed: the first one reaches more gradients, and it belongs to the other one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.tree import bit_pattern
from jmpscale._diagnosis.run.errors import measure
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modes import Mode
from jmpscale._diagnosis.run.scaler_group import ScalerGroup
from jmpscale._diagnosis.thresholds import TOLERANCE
from jmpscale._diagnosis.trace.scalers import StepScaler


def find_groups(scalers: Sequence[StepScaler], forms: Forms) -> list[ScalerGroup]:
    """Returns the scalers of a step, each with its copies and gradients, so that no gradient depends on a later one.

    The gradients that depend on no scaler are a group, too.
    """
    runs = _Runs(scalers, forms)
    reached = {x: np.any([runs.is_nan[i] for i in x], axis=0) for x in _join_copies(scalers, runs)}
    rest, found = np.ones(len(runs.gradients), bool), []
    for copies, of_copies in sorted(reached.items(), key=lambda item: item[1].sum()):
        first = scalers[copies[0]]
        found.append(ScalerGroup(first.name, first.state, copies, rest & of_copies, runs.scales))
        rest &= ~of_copies
    found.append(ScalerGroup("", None, (), rest, runs.scales))
    return [x for x in reversed(found) if x.gradients.any()] or found[-1:]


class _Runs:
    """The gradients in float32: as they are, and with a loss scale that is NaN, or doubled."""

    def __init__(self, scalers: Sequence[StepScaler], forms: Forms) -> None:
        program = forms.recording.of_gradients()
        self.scales = np.asarray([x.state.loss_scale for x in scalers], np.float32)

        def gradients(factors: np.ndarray | float) -> list[Any]:
            return program.run(self.scales * factors, {}, Mode.FLOAT32)[0][1:]

        self.gradients, each = gradients(1.0), np.eye(len(scalers), dtype=bool)
        self.is_nan = [_are_nan(gradients(np.where(chosen, np.nan, 1.0))) for chosen in each]
        doubled = [gradients(np.where(chosen, 2.0, 1.0)) for chosen in each]
        self.changes = [self._differ(found) for found in doubled]
        # Gradients that are scaled, and not unscaled.
        self.grows = [x & ~self._differ([y / 2 for y in found]) for x, found in zip(self.changes, doubled, strict=True)]

    def _differ(self, found: Sequence[Any]) -> np.ndarray:
        """Tests which of some gradients differ from those of the step; powers of two are exact."""
        return measure(found, self.gradients).errors > TOLERANCE if found else np.zeros(0, bool)


def _are_nan(gradients: Sequence[Any]) -> np.ndarray:
    return np.asarray(jax.device_get([jnp.isnan(x).any() for x in gradients]), bool)


def _join_copies(scalers: Sequence[StepScaler], runs: _Runs) -> list[tuple[int, ...]]:
    """Returns the scalers with their copies, with one that scales first.

    Two scalers are copies if a gradient changes with the scale of each: one of them scales it, or a part of the loss,
    and the other one unscales it. A scaler that reaches no gradient may be a copy of one that is equal.
    """

    def are_copies(i: int, j: int) -> bool:
        is_unused = not runs.is_nan[i].any() or not runs.is_nan[j].any()
        is_equal = is_unused and _values(scalers[i]) == _values(scalers[j])
        return is_equal or bool((runs.changes[i] & runs.changes[j]).any())

    def scaling_first(copies: tuple[int, ...]) -> tuple[int, ...]:
        first = max(copies, key=lambda i: (runs.grows[i].any(), runs.is_nan[i].any()))
        return first, *(i for i in copies if i != first)

    joined: list[tuple[int, ...]] = []
    for i in range(len(scalers)):
        copies = [x for x in joined if any(are_copies(i, j) for j in x)]
        joined = [*(x for x in joined if x not in copies), (*(j for x in copies for j in x), i)]
    return list(map(scaling_first, joined))


def _values(scaler: StepScaler) -> tuple[object, ...]:
    *arrays, config = scaler.state
    return (*map(bit_pattern, arrays), config)
