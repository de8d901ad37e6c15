"""Finds whether the reference changes with the loss scale, so that it is not one: float32 is linear in the scale."""

import numpy as np

from jmpscale._diagnosis.run.fitting_scales import Errors
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.thresholds import OTHER_SCALES, TOLERANCE


def find_changes_of_reference(trials: GradientTrials, fit: Fit) -> Errors | None:
    """Returns the changes of the gradients in float32 at other loss scales; None if they are the same at some.

    It runs the step only if the present scale does not fit, or gradients in float32 change at twice the scale.
    """
    if not fit.present.has_scaler or (fit.scale_fits and not trials.changes_at_two):
        return None
    changes = np.min([trials.change_in_float32(2.0**k) for k in OTHER_SCALES], axis=0)
    return changes if (changes > TOLERANCE).any() else None
