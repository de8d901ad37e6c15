"""Finds the factors by which a loss must be multiplied that no scaler scales, but perhaps a number or another library.

The program does not show where it is scaled. But the backward pass is linear, so each of its operations can round its
results as it does if the loss, and with it each result, is larger by a power of two.
"""

from jmpscale._diagnosis.run.fitting_scales import Errors, Scales, search
from jmpscale._diagnosis.run.modes import Mode
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.thresholds import SAME_SIZE


def find_factors(trials: GradientTrials, fit: Fit) -> Scales | None:
    """Returns the powers of two that fit as factors of the loss; None if no factor helps, or none is needed."""
    is_right = fit.is_near_minimum or fit.error < trials.accepted.small
    if fit.present.has_scaler or is_right or fit.loss_error or not trials.is_wrong_by_range(0):
        return None
    error = trials.error({}, Mode.AS_WRITTEN, 0)

    def forward_errors(_: int) -> Errors:
        return trials.forward_errors(0)

    found = search(trials.errors_of_factor, forward_errors, 0, trials.largest_exponent(), trials.accepted.gradient)
    if found.fitting is None or found.fitting[0] <= 0 <= found.fitting[1]:
        return None
    return found if found.smallest_error < error / SAME_SIZE else None
