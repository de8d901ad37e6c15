"""Which pass of a training step an operation belongs to, by data flow.

Scopes alone do not show it: the equations of a compiled function inside the loss have none.
"""

import enum

from jax.extend import core

from jmpscale._programs import flow
from jmpscale._programs.jaxpr import ENTERED, Caller, Key, equations
from jmpscale._programs.scopes import is_backward


class Pass(enum.Enum):
    """A pass of a training step."""

    FORWARD = "forward"  # what the backward pass, the loss or the gradients depend on
    BACKWARD = "backward"
    UPDATE = "update"  # the rest: accumulation, reductions, optimizer, averages, metrics, running statistics


_NEEDED = frozenset(["needed"])


class Passes:
    """The passes of the operations of a step whose first outputs are the loss and the gradients."""

    def __init__(self, jaxpr: core.Jaxpr, count: int) -> None:
        forward: set[Key] = set()  # the operations on which the backward pass, or one of these outputs, depends

        def rule(eqn: core.JaxprEqn, caller: Caller, results: list[flow.Labels]) -> list[flow.Labels]:
            if any(results) and not caller.is_backward(eqn):
                forward.add(caller.key_of(eqn))
            return [flow.union(results)] * len(eqn.invars)

        def mark(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
            return [_NEEDED] * len(operands) if caller.is_backward(eqn) else operands

        outputs = [_NEEDED if i < count else flow.NONE for i in range(len(jaxpr.outvars))]
        # In a loop of training steps, the next forward pass reads what the update of this one makes.
        inputs = flow.follow_back(jaxpr, outputs, rule, mark=mark, repeats=lambda eqn: not _holds_backward(eqn))
        self._forward = forward
        self.inputs_in_forward = list(map(bool, inputs))  # whether it depends on them

    def of(self, eqn: core.JaxprEqn, caller: Caller) -> Pass:
        if caller.is_backward(eqn):
            return Pass.BACKWARD
        return Pass.FORWARD if caller.key_of(eqn) in self._forward else Pass.UPDATE


def _holds_backward(eqn: core.JaxprEqn) -> bool:
    """Tests whether a loop contains backward passes, which are not part of a larger one."""
    bodies = [eqn.params[name].jaxpr for name in ("jaxpr", "body_jaxpr") if name in eqn.params]
    return any(is_backward(held) for body in bodies for held, _ in equations(body, ENTERED))
