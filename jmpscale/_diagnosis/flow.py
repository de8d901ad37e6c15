"""Follows sets of labels through a program: to the values that depend on a value, and to those on which it depends."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jmpscale._base.jaxpr import CALLS, PROGRAM, Caller, called_jaxpr, split_scan_inputs

Labels = frozenset[Any]
Rule = Callable[[core.JaxprEqn, Caller, list[Labels]], list[Labels]]
RuleBack = Callable[[core.JaxprEqn, Caller, list[Labels]], list[Labels] | None]

NONE: Labels = frozenset()


def union(labels: Sequence[Labels]) -> Labels:
    return NONE.union(*labels)


def follow(jaxpr: core.Jaxpr, labels: Sequence[Labels], rule: Rule) -> list[Labels]:
    """Returns the labels of the outputs of a program, given those of its constants and inputs.

    `rule` returns the labels of the results of an operation. For an equation that holds other equations, the rule
    receives the labels that these give to its results, in place of its operands.
    """
    return _Following(rule).run(jaxpr, labels, PROGRAM)


def follow_back(
    jaxpr: core.Jaxpr,
    labels: Sequence[Labels],
    rule: RuleBack,
    repeats: Callable[[core.JaxprEqn], bool] = lambda _: True,
) -> list[Labels]:
    """Returns the labels of the inputs of a program, given those of its outputs.

    `rule` returns the labels of the operands of an equation, given those of its results; or None for an equation that
    holds others, whose labels are followed. The condition of a branch or a loop has the labels of all results. A loop
    `repeats` if an iteration reads what the one before has made.
    """
    return _FollowingBack(rule, repeats).run(jaxpr, labels, PROGRAM)


def of_operands(eqn: core.JaxprEqn, operands: list[Labels]) -> list[Labels]:
    """Returns the labels of all operands for each result."""
    return [union(operands)] * len(eqn.outvars)


class _Following:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def run(self, jaxpr: core.Jaxpr, labels: Sequence[Labels], caller: Caller) -> list[Labels]:
        variables = [*jaxpr.constvars, *jaxpr.invars]
        found: dict[Any, Labels] = dict.fromkeys(jaxpr.constvars, NONE)
        found.update(zip(variables[len(variables) - len(labels) :], labels, strict=True))

        def read(x: Any) -> Labels:
            return NONE if isinstance(x, core.Literal) else found[x]

        for eqn in jaxpr.eqns:
            found.update(zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars)), caller), strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: core.JaxprEqn, operands: list[Labels], caller: Caller) -> list[Labels]:
        name = eqn.primitive.name
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name not in CALLS and name not in special:
            return self._rule(eqn, caller, operands)
        run = special.get(name, self._call)
        return self._rule(eqn, caller, run(eqn, operands, caller.inside(eqn)))

    def _call(self, eqn: core.JaxprEqn, operands: list[Labels], inside: Caller) -> list[Labels]:
        return self.run(called_jaxpr(eqn).jaxpr, operands, inside)

    def _scan(self, eqn: core.JaxprEqn, operands: list[Labels], inside: Caller) -> list[Labels]:
        consts, carry, xs = split_scan_inputs(eqn, operands)
        while True:
            outputs = self.run(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs], inside)
            after = [x | y for x, y in zip(carry, outputs[: len(carry)], strict=True)]
            if after == carry:
                return outputs
            carry = after

    def _while(self, eqn: core.JaxprEqn, operands: list[Labels], inside: Caller) -> list[Labels]:
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry = operands[last:]
        while True:
            self.run(eqn.params["cond_jaxpr"].jaxpr, [*operands[:first], *carry], inside)
            outputs = self.run(eqn.params["body_jaxpr"].jaxpr, [*operands[first:last], *carry], inside)
            after = [x | y for x, y in zip(carry, outputs, strict=True)]
            if after == carry:
                return carry
            carry = after

    def _cond(self, eqn: core.JaxprEqn, operands: list[Labels], inside: Caller) -> list[Labels]:
        branches = [self.run(branch.jaxpr, operands[1:], inside) for branch in eqn.params["branches"]]
        return [operands[0] | union(found) for found in zip(*branches, strict=True)]


class _FollowingBack:
    def __init__(self, rule: RuleBack, repeats: Callable[[core.JaxprEqn], bool]) -> None:
        self._rule, self._repeats = rule, repeats

    def run(self, jaxpr: core.Jaxpr, labels: Sequence[Labels], caller: Caller) -> list[Labels]:
        found: dict[Any, Labels] = {}

        def add(variables: Sequence[Any], labels: Sequence[Labels]) -> None:
            for x, new in zip(variables, labels, strict=True):
                if not isinstance(x, core.Literal):
                    found[x] = found.get(x, NONE) | new

        add(jaxpr.outvars, labels)
        for eqn in reversed(jaxpr.eqns):
            add(eqn.invars, self._equation(eqn, [found.get(x, NONE) for x in eqn.outvars], caller))
        return [found.get(x, NONE) for x in jaxpr.invars]

    def _equation(self, eqn: core.JaxprEqn, results: list[Labels], caller: Caller) -> list[Labels]:
        operands = self._rule(eqn, caller, results)
        if operands is not None:
            return operands
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return special.get(eqn.primitive.name, self._call)(eqn, results, caller.inside(eqn))

    def _call(self, eqn: core.JaxprEqn, results: list[Labels], inside: Caller) -> list[Labels]:
        return self.run(called_jaxpr(eqn).jaxpr, results, inside)

    def _scan(self, eqn: core.JaxprEqn, results: list[Labels], inside: Caller) -> list[Labels]:
        consts, carry, _ = map(len, split_scan_inputs(eqn, eqn.invars))
        while True:
            inputs = self.run(eqn.params["jaxpr"].jaxpr, results, inside)
            before = [x | y for x, y in zip(results[:carry], inputs[consts : consts + carry], strict=True)]
            if before == results[:carry] or not self._repeats(eqn):
                return inputs
            results = [*before, *results[carry:]]

    def _while(self, eqn: core.JaxprEqn, results: list[Labels], inside: Caller) -> list[Labels]:
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        tested = self.run(eqn.params["cond_jaxpr"].jaxpr, [union(results)], inside)
        carry = [x | y for x, y in zip(results, tested[first:], strict=True)]
        while True:
            inputs = self.run(eqn.params["body_jaxpr"].jaxpr, carry, inside)
            before = [x | y for x, y in zip(carry, inputs[last - first :], strict=True)]
            if before == carry or not self._repeats(eqn):
                return [*tested[:first], *inputs[: last - first], *before]
            carry = before

    def _cond(self, eqn: core.JaxprEqn, results: list[Labels], inside: Caller) -> list[Labels]:
        branches = [self.run(branch.jaxpr, results, inside) for branch in eqn.params["branches"]]
        return [union(results), *(union(found) for found in zip(*branches, strict=True))]
