"""Which parts of the result of a training step depend on which parts of its arguments."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.tree import PyTree, is_array, is_real
from jmpscale._programs.dependence import Dependence
from jmpscale._step.call import StepCall, is_array_type
from jmpscale._step.parts import Part


class StepDependence:
    """Which leaves of a result depend on which leaves of the arguments; nothing is known without a program.

    Leaves are given by their positions among the leaves of `out` and of `call.arguments`.
    """

    def __init__(self, call: StepCall, out: PyTree, program: core.ClosedJaxpr | None) -> None:
        self._program = program
        self._known = Dependence(program) if program else None
        self._arrays = list(filter(is_array, jax.tree.leaves(call.arguments)))
        # The program takes and returns arrays only.
        self._inputs, self._outputs = _numbered(call.arguments), _numbered(out)

    @property
    def is_known(self) -> bool:
        """Whether the program is known; JAX cannot trace every step."""
        return self._known is not None

    def depends(self, news: Iterable[int], olds: Iterable[int]) -> bool:
        """Tests whether any of some results is computed from its old value, not only through a backward pass."""
        known = self._known
        return known is not None and any(known.depends(i, k) for i, k in self._numbers(news, olds))

    def is_backward(self, new: Part) -> bool:
        """Tests whether a result is computed from the result of a backward pass."""
        known = self._known
        return known is not None and any(map(known.is_backward, self._outputs_of(new.leaves)))

    def is_influenced_by_gradients(self, new: Part) -> bool:
        """Tests whether a result depends on a backward pass in any way, as gated values do."""
        known = self._known
        return known is not None and any(map(known.is_influenced_by_gradients, self._outputs_of(new.leaves)))

    def has_influence(self, old: Part, results: Iterable[int]) -> bool:
        """Tests whether any of some results depends on a part of the arguments in any way."""
        known = self._known
        inputs = [self._inputs[i] for i in old.leaves if i in self._inputs]
        return known is not None and any(known.is_influenced(i, k) for i in self._outputs_of(results) for k in inputs)

    def is_changed(self, old: Part, new: Part) -> bool:
        """Tests whether the step may change a leaf of a part."""
        if self._program is None or len(old.leaves) != len(new.leaves):
            return True
        outputs, inputs = self._program.jaxpr.outvars, self._program.jaxpr.invars
        return any(outputs[i] is not inputs[k] for i, k in self._numbers(new.leaves, old.leaves))

    def are_near(self, news: Sequence[Part], old: Part) -> list[bool]:
        """Tests which of some results differ from their old value by less than half, in a run of the program."""
        program = self._program
        if program is None:
            return [True] * len(news)

        @jax.jit
        def run(arrays: list[Any]) -> list[Any]:
            outputs = jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)
            pairs = [self._numbers(new.leaves, old.leaves) for new in news]
            return [_is_near([(outputs[i], arrays[k]) for i, k in numbers]) for numbers in pairs]

        return list(map(bool, run(self._arrays)))

    def _numbers(self, news: Iterable[int], olds: Iterable[int]) -> list[tuple[int, int]]:
        """Returns the numbers of arrays and of their old values among the outputs and the inputs of the program."""
        pairs = zip(news, olds, strict=True)
        return [(self._outputs[i], self._inputs[k]) for i, k in pairs if i in self._outputs and k in self._inputs]

    def _outputs_of(self, results: Iterable[int]) -> list[int]:
        return [self._outputs[i] for i in results if i in self._outputs]


def _is_near(pairs: Sequence[tuple[Any, Any]]) -> jax.Array:
    """Tests whether new values differ from old ones by less than half of their norm."""
    real = [(jnp.asarray(new, np.float32), jnp.asarray(old, np.float32)) for new, old in pairs if is_real(old)]
    return _sum_of_squares([new - old for new, old in real]) < _sum_of_squares([old for _, old in real]) / 4


def _sum_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    return sum((jnp.sum(x**2) for x in arrays), jnp.zeros(()))


def _numbered(tree: PyTree) -> dict[int, int]:
    """Returns the number of each array among the arrays of a tree, by its position among the leaves."""
    positions = [i for i, leaf in enumerate(jax.tree.leaves(tree)) if is_array_type(leaf)]
    return {position: number for number, position in enumerate(positions)}
