"""The sentence about indices that rounding makes wrong."""

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.search.integers import WrongIndices
from jmpscale._diagnosis.tell.phrases import by
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told


def describe_wrong_indices(examined: Examined, found: WrongIndices) -> Told:
    """Describes indices that differ from float32, and the lines that must compute in float32."""
    lines = examined.names(found.paths)
    text = (
        f"The integers at {enumerate_names(found.lines)} are indices, and differ from float32 in "
        f"{format_percentage(found.fraction)} of their places. Compute {lines} in float32: then the gradients differ "
        f"{by(found.error)}."
    )
    dtype = next((x.dtype.name for x in examined.trials.program.sites if x.part.path in found.paths), None)
    fit = examined.fit
    errors = fit.errors if fit.scale_fits else fit.scales.errors_at_best
    names: tuple[str, ...] = ()
    if errors is not None:
        names = examined.names_of_gradients(errors >= examined.trials.accepted.small)
    paths, error = examined.each_name(found.paths), fit.error_at_exponent
    return Told(text, DiagnosisFinding(FindingKind.WRONG_INDICES, names, paths, dtype, error, found.error))
