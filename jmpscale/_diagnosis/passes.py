"""Which pass of a training step an operation belongs to, by data flow.

Scopes alone do not show it: the equations of a compiled function inside the loss have none.
"""

import enum
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jmpscale._base.jaxpr import CALLS, PROGRAM, Caller, Key, called_jaxpr, equations, split_scan_inputs
from jmpscale._base.source import is_backward
from jmpscale._interpreter.interpret import ENTERED


class Pass(enum.Enum):
    """A pass of a training step."""

    FORWARD = "forward"  # what the backward pass, the loss or the gradients depend on
    BACKWARD = "backward"
    UPDATE = "update"  # the rest: accumulation, reductions, optimizer, averages, metrics, running statistics


class Passes:
    """The passes of the operations of a step whose first outputs are the loss and the gradients."""

    def __init__(self, jaxpr: core.Jaxpr, count: int) -> None:
        self._forward: set[Key] = set()  # the operations on which the backward pass or an output depends
        outputs = [i < count for i in range(len(jaxpr.outvars))]
        values = self._visit(jaxpr, PROGRAM, outputs)
        self.inputs_in_forward = [values.get(x, False) for x in jaxpr.invars]  # whether it depends on them

    def of(self, eqn: core.JaxprEqn, caller: Caller) -> Pass:
        if caller.backward or is_backward(eqn):
            return Pass.BACKWARD
        return Pass.FORWARD if caller.key_of(eqn) in self._forward else Pass.UPDATE

    def _visit(self, jaxpr: core.Jaxpr, caller: Caller, outputs: Sequence[bool]) -> dict[Any, bool]:
        """Returns for each value whether the backward pass, or one of these outputs, depends on it."""
        needed: dict[Any, bool] = {}

        def add(variables: Sequence[Any], flags: Sequence[bool]) -> None:
            for x, flag in zip(variables, flags, strict=True):
                if flag and not isinstance(x, core.Literal):
                    needed[x] = True

        add(jaxpr.outvars, outputs)
        for eqn in reversed(jaxpr.eqns):
            add(eqn.invars, self._equation(eqn, caller, [needed.get(x, False) for x in eqn.outvars]))
        return needed

    def _inputs(self, jaxpr: core.Jaxpr, caller: Caller, outputs: Sequence[bool]) -> list[bool]:
        needed = self._visit(jaxpr, caller, outputs)
        return [needed.get(x, False) for x in jaxpr.invars]

    def _equation(self, eqn: core.JaxprEqn, caller: Caller, results: list[bool]) -> list[bool]:
        """Returns for each operand of an equation whether it is needed."""
        name, is_transposed = eqn.primitive.name, caller.backward or is_backward(eqn)
        if is_transposed:
            return [True] * len(eqn.invars)
        if name in CALLS:
            return self._inputs(called_jaxpr(eqn).jaxpr, caller.inside(eqn), results)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in special:
            return special[name](eqn, caller.inside(eqn), results)
        if any(results):
            self._forward.add(caller.key_of(eqn))
        return [any(results)] * len(eqn.invars)

    def _scan(self, eqn: core.JaxprEqn, inside: Caller, results: list[bool]) -> list[bool]:
        body = eqn.params["jaxpr"].jaxpr
        consts, carry, _ = map(len, split_scan_inputs(eqn, eqn.invars))
        while True:
            inputs = self._inputs(body, inside, results)
            again = _either(results[:carry], inputs[consts : consts + carry])
            # In a loop of training steps, the next forward pass reads what the update of this one makes.
            if again == results[:carry] or _holds_backward(eqn):
                return inputs
            results = [*again, *results[carry:]]

    def _while(self, eqn: core.JaxprEqn, inside: Caller, results: list[bool]) -> list[bool]:
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        tested = self._inputs(cond, inside, [any(results)])
        carry = _either(results, tested[first:])
        while True:
            inputs = self._inputs(body, inside, carry)
            again = _either(carry, inputs[last - first :])
            if again == carry or _holds_backward(eqn):
                return [*tested[:first], *inputs[: last - first], *again]
            carry = again

    def _cond(self, eqn: core.JaxprEqn, inside: Caller, results: list[bool]) -> list[bool]:
        branches = [self._inputs(branch.jaxpr, inside, results) for branch in eqn.params["branches"]]
        return [any(results), *functools.reduce(_either, branches)]


def _either(x: Sequence[bool], y: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(x, y, strict=True)]


def _holds_backward(eqn: core.JaxprEqn) -> bool:
    """Tests whether a loop contains backward passes, which are not part of a larger one."""
    bodies = [eqn.params[name].jaxpr for name in ("jaxpr", "body_jaxpr") if name in eqn.params]
    return any(is_backward(held) for body in bodies for held, _ in equations(body, ENTERED))
