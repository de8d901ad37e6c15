"""The sentences about gradients that are out of range because no scaler scales their loss."""

import math

from jmpscale._base.text import format_scale
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.fitting_scales import Scales, largest
from jmpscale._diagnosis.tell.phrases import by_gradient, describe_alone
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told


def describe_factors(examined: Examined, factors: Scales) -> Told:
    """Describes a backward pass that underflows or overflows, and the factors by which the loss must be multiplied."""
    errors, (low, high) = examined.fit.errors, factors.fitting or (0, 0)
    is_small = low > 0
    how = "Scale the loss, with jmpscale.value_and_grad and a scaler, or by a larger number if it is scaled already"
    if not is_small:
        how = "Scale the loss by a smaller number, or with jmpscale.value_and_grad and a scaler"
    differ = "differ from float32"
    what = f"{differ} {by_gradient(examined, errors)}" if math.isfinite(largest(errors)) else "are not finite"
    then = f"{differ} {by_gradient(examined, factors.errors_at_best)}"
    text = (
        f"The backward pass {'underflows' if is_small else 'overflows'}: the gradients {what}.{_worst_line(examined)} "
        f"{how}: factors from {format_scale(2.0**low)} to {format_scale(2.0**high)} fit, and then the gradients {then}."
    )
    kind = FindingKind.UNDERFLOW if is_small else FindingKind.LARGE_SCALE
    wrong = (errors > factors.limits) & examined.trials.is_compared
    names = examined.names_of_gradients(wrong)
    return Told(text, DiagnosisFinding(kind, names, error=largest(errors), error_then=factors.smallest_error))


def _worst_line(examined: Examined) -> str:
    """Names the line whose backward pass alone has the largest error."""
    backward = {part: error for part, error in examined.alone.items() if part.backward}
    if not backward:
        return ""
    part, error = max(backward.items(), key=lambda x: x[1])
    if math.isfinite(error):
        return f"{describe_alone(examined, part, error)}."
    return f" It does so at {examined.name(part.path)}."
