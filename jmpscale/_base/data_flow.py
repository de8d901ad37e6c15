"""On which inputs of a program its outputs depend, apart from the dependence through a backward pass."""

import operator
from functools import reduce

from jax.extend import core

from jmpscale._base.jaxpr import held_jaxprs, split_scan_inputs
from jmpscale._base.source import is_backward

# For each value of a program, an integer with one bit for each input on which it depends, and one for a backward pass.
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
        self._outputs = self._bits_of(program.jaxpr, [1 << i for i in range(count)])

    def depends(self, output: int, input: int) -> bool:
        """Tests whether an output depends on an input, apart from the dependence through a backward pass."""
        return bool(self._outputs[output] >> input & 1)

    def is_backward(self, output: int) -> bool:
        """Tests whether an output depends on the result of a backward pass, as gradients and updates do."""
        return bool(self._outputs[output] & self._backward)

    def _bits_of(self, jaxpr: core.Jaxpr, inputs: _Bits) -> _Bits:
        known: dict[core.Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))

        def bits(x: object) -> int:
            return known.get(x, 0) if isinstance(x, core.Var) else 0

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, list(map(bits, eqn.invars))), strict=True))
        return list(map(bits, jaxpr.outvars))

    def _results(self, eqn: core.JaxprEqn, inputs: _Bits) -> _Bits:
        """Returns the bits of the results of an equation."""
        held, count = list(held_jaxprs(eqn)), len(eqn.outvars)
        if is_backward(eqn):
            return [self._backward] * count
        if eqn.primitive.name == "cond":
            branches = [self._bits_of(branch, inputs[1:]) for branch in held]
            return [reduce(operator.or_, bits) for bits in zip(*branches, strict=True)]
        if eqn.primitive.name == "scan":
            constants, carry, _ = map(len, split_scan_inputs(eqn, inputs))
            return self._loop(held[0], inputs, slice(constants, constants + carry))
        if eqn.primitive.name == "while":
            inputs = inputs[eqn.params["cond_nconsts"] :]
            return self._loop(eqn.params["body_jaxpr"].jaxpr, inputs, slice(eqn.params["body_nconsts"], None))
        if len(held) == 1 and (len(held[0].invars), len(held[0].outvars)) == (len(inputs), count):
            return self._bits_of(held[0], inputs)
        return [reduce(operator.or_, inputs, 0)] * count

    def _loop(self, body: core.Jaxpr, inputs: _Bits, carry: slice) -> _Bits:
        """Returns the bits of the results of a loop, whose carry is a slice of the inputs and the first results."""
        before = inputs[carry]
        while True:
            results = self._bits_of(body, inputs)
            after = [old | new for old, new in zip(inputs[carry], results, strict=False)]
            if after == inputs[carry]:
                # A loop may run no iteration, so what it carries may be what it began with.
                carried = [old | new for old, new in zip(before, results, strict=False)]
                return carried + results[len(carried) :]
            inputs = inputs.copy()
            inputs[carry] = after
