"""Which outputs of a program depend on which of its values."""

from collections.abc import Sequence

from jax.extend import core

from jmpscale._base.flow import Labels, Rule, follow, of_operands, union
from jmpscale._base.jaxpr import Caller, held_jaxprs
from jmpscale._base.scopes import is_backward

_BACKWARD: Labels = frozenset(["backward"])


class Dependence:
    """Which outputs of a program depend on which of its inputs, and on a backward pass.

    A gradient depends on the parameters, but through the backward pass only; the parameters after a step depend on the
    parameters before it without this detour. The condition of a branch or a loop does not count as an input of its
    results.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        def mark(eqn: core.JaxprEqn, caller: Caller, results: list[Labels]) -> list[Labels]:
            return [_BACKWARD] * len(results) if is_backward(eqn) else results

        inputs = [frozenset([i]) for i in range(len(program.jaxpr.invars))]
        self._outputs = _follow(program.jaxpr, inputs, mark)

    def depends(self, output: int, input: int) -> bool:
        """Tests whether an output depends on an input, apart from the dependence through a backward pass."""
        return input in self._outputs[output]

    def is_backward(self, output: int) -> bool:
        """Tests whether an output depends on the result of a backward pass, as gradients and updates do."""
        return self._outputs[output] >= _BACKWARD


def find_sources(program: core.ClosedJaxpr, outputs: Sequence[int], numbers: dict[int, range]) -> Labels:
    """Returns the results of some equations on which some outputs of a program depend.

    `numbers` has the numbers of the results of each of these equations, by the identity of the equation.
    """

    def mark(eqn: core.JaxprEqn, caller: Caller, results: list[Labels]) -> list[Labels]:
        return [frozenset([i]) for i in numbers[id(eqn)]] if id(eqn) in numbers else results

    found = _follow(program.jaxpr, (), mark)
    return union([found[i] for i in outputs])


def _follow(jaxpr: core.Jaxpr, inputs: Sequence[Labels], mark: Rule) -> list[Labels]:
    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[Labels]) -> list[Labels]:
        if eqn.primitive.name == "xla_pmap":  # JAX before 0.8; an interpreter does not enter it
            return _follow(next(held_jaxprs(eqn)), operands, mark)
        return of_operands(eqn, caller, operands)

    return follow(jaxpr, rule, inputs=inputs, mark=mark, with_conditions=False)
