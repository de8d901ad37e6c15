"""A loss scale among those of several scalers, which a search moves while the others stay."""

from typing import NamedTuple

import numpy as np

from jmpscale._state import ScalerState

LossScales = float | np.ndarray  # a loss scale, or one for each of several scalers


class ScalerGroup(NamedTuple):
    """A scaler of several, with its copies, and the gradients by which its loss scale is judged."""

    name: str  # as Python code, such as `opt_state['d'].scaler`
    state: ScalerState | None  # None for the gradients that depend on no scaler
    numbers: tuple[int, ...]  # of the scaler and of its copies, among all scalers of the step
    gradients: np.ndarray  # whether each gradient belongs to it
    scales: np.ndarray  # of all scalers of the step

    def at(self, scale: LossScales) -> np.ndarray:
        """Returns the scales of all scalers with another scale of this one, and of its copies in proportion."""
        if np.ndim(scale) or not self.numbers:
            return np.asarray(scale) if np.ndim(scale) else self.scales
        found, moved = self.scales.copy(), list(self.numbers)
        found[moved] *= scale / found[moved[0]]
        return found
