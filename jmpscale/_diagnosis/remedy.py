"""Tries a remedy before a report recommends it: the program runs with some of its matmuls in float32."""

from collections.abc import Callable
from typing import NamedTuple

from jax.extend import core

from jmpscale._autocast import matmuls_in_float32
from jmpscale._base.source import user_line
from jmpscale._diagnosis.causes import lines_to_change
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
    lines: list[str] = []
    for _ in range(_ROUNDS):
        candidates = [[x for x in lines_to_change(origin) if x not in lines] for origin in findings.origins]
        new = next(filter(None, candidates), None)
        if new is None:
            break
        lines += new
        step, lines = _trace_with_float32(trace, lines)
        if not lines:
            break
        progress("tries a remedy")
        findings = examine(step, scale, progress)
        if findings.healthy:
            break
    return Remedy(lines, findings) if lines else None


def _trace_with_float32(trace: Callable[[], Step], lines: list[str]) -> tuple[Step, list[str]]:
    """Traces a step with the matmuls of some lines in float32; returns the lines that have such matmuls, too."""
    kept: set[str] = set()

    def is_kept(eqn: core.JaxprEqn) -> bool:
        line = user_line(eqn)
        if line in lines:
            kept.add(line)
        return line in lines

    with matmuls_in_float32(is_kept):
        step = trace()
    return step, [line for line in lines if line in kept]
