"""The sentences about random numbers in half precision."""

from collections.abc import Sequence

from jmpscale._base.text import format_percentage
from jmpscale._diagnosis.search.draws import CoarseChoice
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told


def describe_coarse_choices(found: Sequence[CoarseChoice]) -> list[Told]:
    """Describes choices for which random numbers in half precision are too coarse."""
    return list(map(_describe, found))


def _describe(x: CoarseChoice) -> Told:
    choice, draw = x.choice, x.choice.draw
    where = f"{choice.operation} at {choice.line}"
    if choice.candidates:
        effect = f"{where} chooses the first of several equal ones among {choice.candidates:,}"
    else:
        effect = f"{where} separates {format_percentage(x.rare)} of them, which has a large error"
    text = (
        f"The random numbers at {draw.line} are drawn in {draw.dtype}, which has {draw.distinct:,} different ones: "
        f"{effect}. Draw them in float32."
    )
    dtype = draw.dtype.name if draw.dtype else None
    return Told(text, DiagnosisFinding(FindingKind.COARSE_RANDOM, lines=(draw.line,), dtype=dtype))
