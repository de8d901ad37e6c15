"""The sentences of a summary, with what they say as data."""

from collections.abc import Iterable
from typing import NamedTuple

from jmpscale._diagnosis.tell.report import DiagnosisFinding


class Told(NamedTuple):
    """Sentences, and the finding that they describe; None if nothing is wrong."""

    text: str
    finding: DiagnosisFinding | None = None


def join(told: Iterable[Told]) -> str:
    return " ".join(x.text for x in told if x.text)
