"""The lines that read what enters a step."""

from collections.abc import Collection

from jax.extend import core

from jmpscale._diagnosis.trace.operations import moves_values, of_moved
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller


def find_readers(program: Program, inputs: Collection[int]) -> dict[int, str]:
    """Returns the first line that computes with each of some constants of a program, if one does."""
    lines: dict[int, str] = {}

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        for i in () if moves_values(eqn) else flow.union(operands):
            lines.setdefault(i, caller.line_of(eqn))
        return of_moved(eqn, caller, operands)

    labels = [frozenset([i]) if i in inputs else flow.NONE for i in range(len(program.consts))]
    flow.follow(program.jaxpr, rule, constants=labels)
    return lines
