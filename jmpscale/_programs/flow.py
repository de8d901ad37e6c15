"""Follows sets of labels through a program, with its data flow or against it, into loops and branches."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jmpscale._programs.jaxpr import ENTERED, PROGRAM, Caller, called_jaxpr, split_scan_inputs, split_while_inputs

Labels = frozenset[Any]
Rule = Callable[[core.JaxprEqn, Caller, list[Labels]], list[Labels]]

NONE: Labels = frozenset()


def union(labels: Sequence[Labels]) -> Labels:
    """Returns the union of sets: one of them if it holds all others, because the values of a program share sets."""
    largest = max(labels, key=len, default=NONE)
    return largest if all(x <= largest for x in labels) else NONE.union(*labels)


def of_operands(eqn: core.JaxprEqn, caller: Caller, operands: list[Labels]) -> list[Labels]:
    """Returns the labels of all operands for each result."""
    return [union(operands)] * len(eqn.outvars)


def _unmarked(eqn: core.JaxprEqn, caller: Caller, labels: list[Labels]) -> list[Labels]:
    return labels


def follow(
    jaxpr: core.Jaxpr,
    rule: Rule = of_operands,
    *,
    constants: Sequence[Labels] = (),
    inputs: Sequence[Labels] = (),
    mark: Rule = _unmarked,
    with_conditions: bool = True,
    with_tests: bool = False,
) -> list[Labels]:
    """Returns the labels of the outputs of a program, given labels of all its constants, of its inputs, or no labels.

    `rule` returns the labels of the results of an operation, given the labels of its operands. `mark` replaces the
    labels of the results of any equation, also of a loop or a call, whose equations are followed by the rule. The
    condition of a branch gives its labels to the results only `with_conditions`, and the condition of a loop only
    `with_tests`.
    """
    return _Following(rule, mark, with_conditions, with_tests).run(jaxpr, inputs, PROGRAM, constants)


def follow_back(
    jaxpr: core.Jaxpr,
    labels: Sequence[Labels],
    rule: Rule,
    *,
    mark: Rule = _unmarked,
    repeats: Callable[[core.JaxprEqn], bool] = lambda _: True,
) -> list[Labels]:
    """Returns the labels of the inputs of a program, given the labels of its outputs.

    `rule` returns the labels of the operands of an operation, given the labels of its results. `mark` replaces the
    labels of the operands of any equation, also of a loop or a call. The condition of a loop or a branch has the labels
    of all results. A loop `repeats` if an iteration reads what the one before has made.
    """
    return _FollowingBack(rule, mark, repeats).run(jaxpr, labels, PROGRAM)


class _Following:
    def __init__(self, rule: Rule, mark: Rule, with_conditions: bool, with_tests: bool) -> None:
        self._rule, self._mark = rule, mark
        self._with_conditions, self._with_tests = with_conditions, with_tests

    def run(
        self, jaxpr: core.Jaxpr, inputs: Sequence[Labels], caller: Caller, constants: Sequence[Labels] = ()
    ) -> list[Labels]:
        found: dict[Any, Labels] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), NONE)
        for variables, labels in ((jaxpr.constvars, constants), (jaxpr.invars, inputs)):
            found.update(zip(variables, labels, strict=bool(labels)))

        def read(x: Any) -> Labels:
            return NONE if isinstance(x, core.Literal) else found[x]

        for eqn in jaxpr.eqns:
            results = self._mark(eqn, caller, self._equation(eqn, list(map(read, eqn.invars)), caller))
            found.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: core.JaxprEqn, operands: list[Labels], caller: Caller) -> list[Labels]:
        name = eqn.primitive.name
        if name not in ENTERED:
            return self._rule(eqn, caller, operands)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return special.get(name, self._call)(eqn, operands, caller.inside(eqn))

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
        cond_consts, body_consts, carry = split_while_inputs(eqn, operands)
        while True:
            [tested] = self.run(eqn.params["cond_jaxpr"].jaxpr, [*cond_consts, *carry], inside)
            test = tested if self._with_tests else NONE
            outputs = self.run(eqn.params["body_jaxpr"].jaxpr, [*body_consts, *carry], inside)
            after = [x | y | test for x, y in zip(carry, outputs, strict=True)]
            if after == carry:
                return carry  # the loop may run no iteration
            carry = after

    def _cond(self, eqn: core.JaxprEqn, operands: list[Labels], inside: Caller) -> list[Labels]:
        branches = [self.run(branch.jaxpr, operands[1:], inside) for branch in eqn.params["branches"]]
        condition = operands[0] if self._with_conditions else NONE
        return [condition | union(found) for found in zip(*branches, strict=True)]


class _FollowingBack:
    def __init__(self, rule: Rule, mark: Rule, repeats: Callable[[core.JaxprEqn], bool]) -> None:
        self._rule, self._mark, self._repeats = rule, mark, repeats

    def run(self, jaxpr: core.Jaxpr, labels: Sequence[Labels], caller: Caller) -> list[Labels]:
        found: dict[Any, Labels] = {}

        def add(variables: Sequence[Any], labels: Sequence[Labels]) -> None:
            for x, new in zip(variables, labels, strict=True):
                if not isinstance(x, core.Literal):
                    found[x] = found.get(x, NONE) | new

        add(jaxpr.outvars, labels)
        for eqn in reversed(jaxpr.eqns):
            operands = self._equation(eqn, [found.get(x, NONE) for x in eqn.outvars], caller)
            add(eqn.invars, self._mark(eqn, caller, operands))
        return [found.get(x, NONE) for x in jaxpr.invars]

    def _equation(self, eqn: core.JaxprEqn, results: list[Labels], caller: Caller) -> list[Labels]:
        name = eqn.primitive.name
        if name not in ENTERED:
            return self._rule(eqn, caller, results)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return special.get(name, self._call)(eqn, results, caller.inside(eqn))

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
        cond_consts, body_consts, _ = map(len, split_while_inputs(eqn, eqn.invars))
        tested = self.run(eqn.params["cond_jaxpr"].jaxpr, [union(results)], inside)
        with_test = [x | y for x, y in zip(results, tested[cond_consts:], strict=True)]
        # The condition reads what the iteration before has made.
        carry = with_test if self._repeats(eqn) else results
        while True:
            inputs = self.run(eqn.params["body_jaxpr"].jaxpr, carry, inside)
            before = [x | y for x, y in zip(with_test, inputs[body_consts:], strict=True)]
            if before == carry or not self._repeats(eqn):
                return [*tested[:cond_consts], *inputs[:body_consts], *before]
            carry = with_test = before

    def _cond(self, eqn: core.JaxprEqn, results: list[Labels], inside: Caller) -> list[Labels]:
        branches = [self.run(branch.jaxpr, results, inside) for branch in eqn.params["branches"]]
        return [union(results), *(union(found) for found in zip(*branches, strict=True))]
