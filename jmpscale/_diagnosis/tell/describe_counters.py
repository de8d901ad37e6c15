"""The sentences about counters in half precision."""

from jmpscale._diagnosis.search.counters import Counter
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told


def describe_counters(update: Update) -> list[Told]:
    """Describes counters that will stop, except those that have stopped, which are told already."""
    bad = {x.result.name for x in update.bad}
    return [_describe(x) for x in update.counters if x.result.name not in bad]


def _describe(x: Counter) -> Told:
    name, dtype = x.result.name, x.result.dtype.name
    text = (
        f"{name} will stop at {x.stop:g}: each step adds {x.increment:g}, which is too little beside larger numbers of "
        f"{dtype}. Keep it in float32, or as an integer."
    )
    return Told(text, DiagnosisFinding(FindingKind.STALLED, (name,), dtype=dtype))
