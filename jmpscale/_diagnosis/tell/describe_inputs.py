"""The sentences about what is in half precision before a step begins."""

from collections.abc import Sequence

from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told
from jmpscale._diagnosis.trace.rounded import Rounded


def describe_rounded(found: Sequence[Rounded]) -> list[Told]:
    """Names what is probably rounded: integers that their dtype cannot tell apart, and constants."""
    told = [_describe_integers(x) for x in found if x.are_large_integers]
    constants = [x for x in found if not x.name and x.value.ndim and not x.are_integers]
    if constants:
        which = list(dict.fromkeys(f"{x.value.dtype}{list(x.value.shape)} at {x.line}" for x in constants))
        more = f" and {len(which) - 3} more" if len(which) > 3 else ""
        names = f"{', '.join(which[:3])}{more}"
        told.append(Told(f"Constants in half precision were taken as they are, but may be rounded: {names}."))
    return told


def _describe_integers(x: Rounded) -> Told:
    dtype = x.value.dtype.name
    text = (
        f"{x.name or 'A constant'} holds integers up to {x.max_abs:g} in {dtype}, which cannot tell neighbors of this "
        f"size apart: pass it in float32 or as integers. It is used at {x.line}."
    )
    names = (x.name,) if x.name else ()
    return Told(text, DiagnosisFinding(FindingKind.ROUNDED_INPUT, names, (x.line,), dtype))
