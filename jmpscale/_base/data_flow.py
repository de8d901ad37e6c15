"""On which values of a program its outputs depend."""

import operator
from collections.abc import Callable
from functools import reduce

from jax.extend import core

from jmpscale._base.jaxpr import held_jaxprs, split_scan_inputs
from jmpscale._base.source import is_backward

# For each value of a program, an integer with one bit for each value on which it depends.
_Bits = list[int]


class DataFlow:
    """Which outputs of a program depend on which of its inputs, and on a backward pass.

    A gradient depends on the parameters, but through the backward pass only; the parameters after a step depend on the
    parameters before it without this detour. The condition of a branch or a loop does not count as an input of its
    results.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        count = len(program.jaxpr.invars)
        self._backward = 1 << count

        def results(eqn: core.JaxprEqn) -> _Bits | None:
            return [self._backward] * len(eqn.outvars) if is_backward(eqn) else None

        self._outputs = _Flow(results).outputs(program.jaxpr, [1 << i for i in range(count)])

    def depends(self, output: int, input: int) -> bool:
        """Tests whether an output depends on an input, apart from the dependence through a backward pass."""
        return bool(self._outputs[output] >> input & 1)

    def is_backward(self, output: int) -> bool:
        """Tests whether an output depends on the result of a backward pass, as gradients and updates do."""
        return bool(self._outputs[output] & self._backward)


def dependents(program: core.ClosedJaxpr, sources: dict[int, range]) -> list[int]:
    """Returns for each output of a program which results of some equations it depends on, as the bits of an integer.

    `sources` has the numbers of the results of each of these equations, by the identity of the equation.
    """

    def results(eqn: core.JaxprEqn) -> _Bits | None:
        return [1 << number for number in sources[id(eqn)]] if id(eqn) in sources else None

    return _Flow(results).outputs(program.jaxpr, [0] * len(program.jaxpr.invars))


class _Flow:
    """Follows the dependence of values through a program, also in loops and branches."""

    def __init__(self, rule: Callable[[core.JaxprEqn], _Bits | None]) -> None:
        self._rule = rule  # the bits of the results of an equation, whatever its inputs; or None

    def outputs(self, jaxpr: core.Jaxpr, inputs: _Bits) -> _Bits:
        known: dict[core.Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))

        def bits(x: object) -> int:
            return known.get(x, 0) if isinstance(x, core.Var) else 0

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, list(map(bits, eqn.invars))), strict=True))
        return list(map(bits, jaxpr.outvars))

    def _results(self, eqn: core.JaxprEqn, inputs: _Bits) -> _Bits:
        """Returns the bits of the results of an equation."""
        held, count = list(held_jaxprs(eqn)), len(eqn.outvars)
        fixed = self._rule(eqn)
        if fixed is not None:
            return fixed
        if eqn.primitive.name == "cond":
            branches = [self.outputs(branch, inputs[1:]) for branch in held]
            return [reduce(operator.or_, bits) for bits in zip(*branches, strict=True)]
        if eqn.primitive.name == "scan":
            constants, carry, _ = map(len, split_scan_inputs(eqn, inputs))
            return self._loop(held[0], inputs, slice(constants, constants + carry))
        if eqn.primitive.name == "while":
            inputs = inputs[eqn.params["cond_nconsts"] :]
            return self._loop(eqn.params["body_jaxpr"].jaxpr, inputs, slice(eqn.params["body_nconsts"], None))
        if len(held) == 1 and (len(held[0].invars), len(held[0].outvars)) == (len(inputs), count):
            return self.outputs(held[0], inputs)
        return [reduce(operator.or_, inputs, 0)] * count

    def _loop(self, body: core.Jaxpr, inputs: _Bits, carry: slice) -> _Bits:
        """Returns the bits of the results of a loop, whose carry is a slice of the inputs and the first results."""
        while True:
            results = self.outputs(body, inputs)
            # A loop may run no iteration, so what it carries may be what it began with.
            carried = [old | new for old, new in zip(inputs[carry], results, strict=False)]
            if carried == inputs[carry]:
                return carried + results[len(carried) :]
            inputs = inputs.copy()
            inputs[carry] = carried
