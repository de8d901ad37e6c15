"""Which outputs of a program depend on which of its values."""

import functools
from collections.abc import Mapping, Sequence

from jax.extend import core

from jmpscale._programs.flow import Labels, Rule, follow, of_operands, union
from jmpscale._programs.jaxpr import Caller, held_jaxprs, unscales
from jmpscale._programs.scopes import is_backward

_BACKWARD: Labels = frozenset(["backward"])


class Dependence:
    """Which outputs of a program depend on which of its inputs, and on a backward pass.

    A gradient depends on the parameters, but through the backward pass only; the parameters after a step depend on the
    parameters before it without this detour. Unscaled gradients are results of the backward pass, too, although the
    loss, on which the parameters have an influence, is one of their factors.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self._jaxpr = program.jaxpr

    def depends(self, output: int, input: int) -> bool:
        """Tests whether an output is computed from an input, apart from what is computed through a backward pass.

        What a condition selects does not depend on the condition.
        """
        return input in self._values[output]

    def is_backward(self, output: int) -> bool:
        """Tests whether an output is computed from the result of a backward pass, as gradients and updates are."""
        return self._values[output] >= _BACKWARD

    def is_influenced(self, output: int, input: int) -> bool:
        """Tests whether an output depends on an input in any way, except through the condition of a loop."""
        return input in self._influences[output]

    def is_influenced_by_gradients(self, output: int) -> bool:
        """Tests whether an output depends on the result of a backward pass, as gated values do, too."""
        return self._influences[output] >= _BACKWARD

    @functools.cached_property
    def _values(self) -> list[Labels]:
        """The inputs from which each output is computed; the labels end at a backward pass."""

        def mark(eqn: core.JaxprEqn, caller: Caller, results: list[Labels]) -> list[Labels]:
            return [_BACKWARD] * len(results) if is_backward(eqn) or unscales(eqn) else results

        return _follow(self._jaxpr, self._inputs, mark, _of_values)

    @functools.cached_property
    def _influences(self) -> list[Labels]:
        def mark(eqn: core.JaxprEqn, caller: Caller, results: list[Labels]) -> list[Labels]:
            return [x | _BACKWARD for x in results] if is_backward(eqn) or unscales(eqn) else results

        return _follow(self._jaxpr, self._inputs, mark, with_conditions=True)

    @property
    def _inputs(self) -> list[Labels]:
        return [frozenset([i]) for i in range(len(self._jaxpr.invars))]


def find_sources(program: core.ClosedJaxpr, outputs: Sequence[int], numbers: Mapping[int, Mapping[int, int]]) -> Labels:
    """Returns the results of some equations on which some outputs of a program depend.

    `numbers` has the numbers of these results, by the identity of the equation and the position among its results.
    """

    def mark(eqn: core.JaxprEqn, caller: Caller, results: list[Labels]) -> list[Labels]:
        own = numbers.get(id(eqn), {})
        return [frozenset([own[i]]) if i in own else x for i, x in enumerate(results)]

    found = _follow(program.jaxpr, (), mark)
    return union([found[i] for i in outputs])


def _of_values(eqn: core.JaxprEqn, caller: Caller, operands: list[Labels]) -> list[Labels]:
    """Returns the labels of all operands but the condition of a select."""
    return of_operands(eqn, caller, operands[1:] if eqn.primitive.name == "select_n" else operands)


def _follow(
    jaxpr: core.Jaxpr,
    inputs: Sequence[Labels],
    mark: Rule,
    rule: Rule = of_operands,
    *,
    with_conditions: bool = False,
) -> list[Labels]:
    def enter(eqn: core.JaxprEqn, caller: Caller, operands: list[Labels]) -> list[Labels]:
        if eqn.primitive.name == "xla_pmap":  # JAX before 0.8; an interpreter does not enter it
            return _follow(next(held_jaxprs(eqn)), operands, mark, rule, with_conditions=with_conditions)
        return rule(eqn, caller, operands)

    return follow(jaxpr, enter, inputs=inputs, mark=mark, with_conditions=with_conditions)
