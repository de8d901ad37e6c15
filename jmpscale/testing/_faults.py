"""Makes gradients of a training step infinite or NaN.

The overflow of a real step reaches some gradients and not others, and some elements of a gradient. So a flag that is
about some of the gradients may be right for one batch and wrong for the next one.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.compat import in_current_mesh, varying_axes
from jmpscale._base.multiply import multiply_leaf
from jmpscale._programs.dependence import find_sources
from jmpscale._programs.float32 import run_in_widest
from jmpscale._programs.interpret import Interpreter
from jmpscale._programs.jaxpr import ENTERED, Caller, equations, held_jaxprs, unscales

_GROUPS = 8  # of gradients that are changed together, if there are more gradients
_WHOLE, _FIRST, _LAST = range(3)  # which elements of a gradient are changed
# Every value in the first and in the last element: a flag may lose one sign or NaN, or be about a part of an array.
_ELEMENTS = [(_FIRST, np.inf), (_LAST, -np.inf), (_FIRST, np.nan), (_LAST, np.inf), (_FIRST, -np.inf), (_LAST, np.nan)]


class Fault(NamedTuple):
    """A change of some gradients."""

    gradients: np.ndarray  # bool, whether each of the gradients is changed
    place: np.int32  # which of its elements are changed
    value: np.float32  # the value that one element gets


class Faults:
    """The gradients of a program, which are the operands and the results of the compiled function that unscales them.

    A fault is in the operand, so that a flag notices it before and after the unscaling. If scales below 1 are possible,
    at which finite operands have infinite results, it is in the result.
    """

    def __init__(self, program: core.ClosedJaxpr, *, with_small_scales: bool) -> None:
        self._program = program
        self._places = _Places()
        # An equation in a function that the program calls twice occurs once.
        for jaxpr in {id(jaxpr): jaxpr for jaxpr in _entered_jaxprs(program.jaxpr)}.values():
            self._places.add(jaxpr, at_results=with_small_scales)
        self.count = self._places.count
        self.none = self._fault(())

    def all(self, decisions: Sequence[int]) -> list[Fault]:
        """Returns the faults that a step must notice; `decisions` are the outputs of the program that show skips."""
        seen = find_sources(self._program, decisions, self._places.numbers)
        unseen = [i for i in range(self.count) if i not in seen]
        every = range(self.count)
        # Neighbors are often a kernel and a bias, or layers of one block.
        groups = [every[start::_GROUPS] for start in range(min(_GROUPS, self.count))]
        size = math.ceil(self.count / _GROUPS)
        blocks = [every[start : start + size] for start in range(0, self.count, size)] if size > 1 else []
        values = itertools.cycle(_ELEMENTS)
        count = max(2, 2 * math.ceil(3 / len(groups))) if groups else 0
        elements = [self._fault(group, *next(values)) for group in groups for _ in range(count)]
        return [self._fault(group) for group in (unseen, *groups, *blocks) if group] + elements

    def _fault(self, gradients: Sequence[int], place: int = _WHOLE, value: float = 0.0) -> Fault:
        changed = np.zeros(self.count, bool)
        changed[list(gradients)] = True
        return Fault(changed, np.int32(place), np.float32(value))

    def evaluate(self, args: Sequence[Any], fault: Fault) -> tuple[list[Any], jax.Array]:
        """Returns the outputs of the program, computed in float32, and whether the gradients were finite before it.

        If an equation runs several times, as in a loop of several steps, its gradients change the first time.
        """
        run = _WithFault(self._places, fault)
        outputs, records = run.evaluate(self._program, args)
        overflows = [records[run.overflow(key)] for key in self._places.numbers]
        return outputs, jnp.bool_(True) if not overflows else jnp.stack(overflows).max() == 0


class _Places:
    """The results of equations that are gradients, or scaled gradients."""

    def __init__(self) -> None:
        self.count = 0  # of the gradients
        self.numbers: dict[int, dict[int, int]] = {}  # of gradients, by the identity of an equation and the result

    def add(self, jaxpr: core.Jaxpr, *, at_results: bool) -> None:
        """Adds the gradients that a jaxpr unscales, but none that the jaxprs in it unscale."""
        made_by: dict[Any, tuple[core.JaxprEqn, int]] = {
            x: (eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.outvars)
        }
        for eqn in filter(unscales, jaxpr.eqns):
            operands: list[Any] = eqn.invars[: len(eqn.outvars)]  # the gradients, in the order of the results
            for i, operand in enumerate(operands):
                is_made_here = not at_results and not isinstance(operand, core.Literal) and operand in made_by
                holder, k = made_by[operand] if is_made_here else (eqn, i)
                numbers = self.numbers.setdefault(id(holder), {})
                if k not in numbers:  # unscaled twice, it is one gradient
                    numbers[k] = self.count
                    self.count += 1


def _entered_jaxprs(jaxpr: core.Jaxpr) -> Iterator[core.Jaxpr]:
    yield jaxpr
    for eqn, _ in equations(jaxpr, ENTERED):
        if eqn.primitive.name in ENTERED:
            yield from held_jaxprs(eqn)


class _WithFault(Interpreter):
    """Computes in float32, and changes gradients."""

    def __init__(self, places: _Places, fault: Fault) -> None:
        self._numbers, self._fault = places.numbers, fault
        self._indices = {key: i for i, key in enumerate(self._numbers)}
        # The number of times that an equation has run, and whether one of its results was not finite.
        records = {i: jnp.int32(0) for i in range(2 * len(self._numbers))}
        super().__init__(lambda _, eqn, inputs, caller: run_in_widest(eqn, inputs, caller), records=records)

    def overflow(self, key: int) -> int:
        """Returns the index of the record of an overflow in an equation."""
        return len(self._indices) + self._indices[key]

    def run_equation(self, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
        outputs = super().run_equation(eqn, inputs, caller)
        if id(eqn) not in self._numbers:
            return outputs
        with eqn.ctx.manager:
            return self._with_fault(eqn, outputs)

    def _with_fault(self, eqn: core.JaxprEqn, outputs: list[Any]) -> list[Any]:
        """Records whether the gradients that an equation returns are finite, and changes some of them."""
        fault = Fault(*map(in_current_mesh, self._fault))
        index = self._indices[id(eqn)]
        times_run = in_current_mesh(self.records[index])
        self.record(index, times_run + 1)
        outputs = list(outputs)
        for i, number in self._numbers[id(eqn)].items():
            x = outputs[i]
            self.record(self.overflow(id(eqn)), (~jnp.isfinite(x).all()).astype(jnp.int32))
            outputs[i] = _changed(x, fault, fault.gradients[number] & (_like(times_run, x) == 0))
        return outputs


def _changed(x: jax.Array, fault: Fault, flag: jax.Array) -> jax.Array:
    """Changes a gradient if the flag is true: as a whole to infinity of the wrong sign, or NaN where it is zero."""
    place = fault.place
    x = multiply_leaf(x, jnp.where(flag & (place == _WHOLE), -jnp.inf, 1.0))
    is_place = [
        jax.lax.broadcasted_iota(np.int32, x.shape, axis) == jnp.where(place == _LAST, size - 1, 0)
        for axis, size in enumerate(x.shape)
    ]
    one = functools.reduce(operator.and_, is_place, flag & (place != _WHOLE))
    return jnp.where(one, jnp.asarray(fault.value, x.dtype), x)


def _like(count: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a count that varies only over the mesh axes over which `x` varies; `x` keeps its type."""
    axes = tuple(varying_axes(count) - varying_axes(x))
    return jax.lax.pmax(count, axes) if axes else count
