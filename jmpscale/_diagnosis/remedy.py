"""Tries a remedy before a report recommends it: the program runs with some of its matmuls in float32."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jmpscale._autocast import matmuls_in_float32
from jmpscale._diagnosis.causes import lines_to_change
from jmpscale._diagnosis.evaluate import Result
from jmpscale._diagnosis.findings import Findings, examine
from jmpscale._diagnosis.step import Step

_ROUNDS = 5


class Remedy(NamedTuple):
    """A program with matmuls in float32.

    Attributes:
      lines: the lines of these matmuls.
      findings: what was measured of the program with them.
    """

    lines: list[str]
    findings: Findings


def try_remedy(
    trace: Callable[[], Step], findings: Findings, scale: float, progress: Callable[[str], None]
) -> Remedy | None:
    """Runs a program of `autocast` with the matmuls in float32 at which its errors begin, until no error is left.

    Args:
      trace: traces the training step.
      findings: what was measured of the step.
      scale: the present scale.
      progress: a function that is called with a description of the work so far.

    Returns:
      The remedy, whether it helps or not; None if the matmuls are not converted by `autocast`.
    """
    remedy: Remedy | None = None
    tried: list[str] = []
    kept: list[str] = []
    for _ in range(_ROUNDS):
        untried = _next_lines(findings.origins, tried)
        if not untried:
            break
        tried += untried
        step, lines = _trace_with_float32(trace, tried)
        if lines == kept:  # no other line has a matmul
            break
        kept = lines
        progress("trying a remedy")
        findings = examine(step, scale, progress)
        remedy = Remedy(lines, findings)
        if findings.healthy:
            break
    return remedy


def _next_lines(origins: Sequence[Result], tried: list[str]) -> list[str]:
    """Returns the lines to change for the first origin of an error for which some have not been tried."""
    untried = [[line for line in lines_to_change(origin) if line not in tried] for origin in origins]
    return next(filter(None, untried), [])


def _trace_with_float32(trace: Callable[[], Step], lines: list[str]) -> tuple[Step, list[str]]:
    """Traces a step with the matmuls of some lines in float32; returns the step, and the lines that have matmuls."""
    with matmuls_in_float32(lines) as found:
        step = trace()
    return step, [line for line in lines if line in found]
