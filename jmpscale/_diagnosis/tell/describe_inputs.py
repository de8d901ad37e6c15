"""The sentences about what is in half precision before a step begins."""

import math
from collections.abc import Sequence

from jmpscale._diagnosis.search.inputs import CoarseInput
from jmpscale._diagnosis.tell.phrases import by
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told


def describe_coarse_inputs(found: Sequence[CoarseInput]) -> list[Told]:
    """Describes arguments and constants in half precision whose lost digits change the gradients."""
    return list(map(_describe, found))


def _describe(x: CoarseInput) -> Told:
    name = x.name or f"A constant of shape {list(x.shape)}"
    change = f"changes {by(x.error)}" if math.isfinite(x.error) else "is not finite"
    text = (
        f"{name}, which {x.line} reads, has too few digits in {x.dtype}: if its values move by a quarter of the last "
        f"place, the loss or a gradient {change}, in float32 too. Compute and store it in float32."
    )
    names = (x.name,) if x.name else ()
    return Told(text, DiagnosisFinding(FindingKind.ROUNDED_INPUT, names, (x.line,), x.dtype.name, x.error))
