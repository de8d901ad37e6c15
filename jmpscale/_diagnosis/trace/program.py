"""A training step as a program of the loss scale, and what it returns."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jmpscale._base.types import is_below_half
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import equations, type_of


class Program(NamedTuple):
    """A program of the loss scale."""

    jaxpr: core.Jaxpr
    consts: list[Any]  # the arrays that it depends on: first the arguments of a step, and then others
    names: tuple[str, ...]  # of the constants, such as `params['w']`; empty for those that are not arguments

    def with_outputs(self, variables: Sequence[Any]) -> "Program":
        """Returns a program that computes nothing but some variables of this one."""
        return self._replace(jaxpr=without_dead_code(with_outputs(self.jaxpr, variables)))

    def first_outputs(self, count: int) -> "Program":
        """Returns a program that computes nothing but the first outputs of this one."""
        return self if count == len(self.jaxpr.outvars) else self.with_outputs(self.jaxpr.outvars[:count])

    def has_below_half(self) -> bool:
        """Tests whether the program has numbers of fewer bits than float16, such as float8."""
        results = (x for eqn, _ in equations(self.jaxpr) for x in eqn.outvars)
        return any(is_below_half(type_of(x)) for x in itertools.chain(self.jaxpr.constvars, results))

    def depends_on_scale(self) -> bool:
        """Tests whether an output depends on the loss scale, by data flow."""
        return any(flow.follow(self.jaxpr, inputs=[frozenset(["scale"])]))


class Result(NamedTuple):
    """A result of a step that is compared with float32."""

    name: str  # as Python code, such as `params['w']`
    dtype: np.dtype
    output: int  # its position among the outputs of the step
    input: int | None = None  # the position of its old value among the arguments; None if it is not a leaf of the state
    # Whether it is computed from its old value, not only through gradients: rounding adds up over the steps. A leaf
    # that is not, such as a copy in half precision of float32 parameters, has no change that could be lost.
    is_changed: bool = False
    is_gradient_led: bool = False  # whether it depends on a gradient
    part: str = ""  # the part of the state that contains the leaf, such as `params`; empty if it is a part itself

    @property
    def is_leaf(self) -> bool:
        """Whether it is the new value of a leaf of the state."""
        return self.input is not None


def with_outputs(jaxpr: core.Jaxpr, outvars: Sequence[Any]) -> core.Jaxpr:
    """Returns a program with other variables as its outputs."""
    debug_info: Any = jaxpr.debug_info
    return jaxpr.replace(outvars=list(outvars), debug_info=debug_info._replace(result_paths=("",) * len(outvars)))


def without_dead_code(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program without the equations on which no output depends."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def close_over(jaxpr: core.Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> tuple[core.Jaxpr, list[Any]]:
    """Returns a program whose last inputs have become its first constants, with these values, and all constants."""
    count = len(jaxpr.invars) - len(values)
    inputs, closed_over = jaxpr.invars[:count], jaxpr.invars[count:]
    found = [*values, *consts]
    # In JAX 0.12, the variables of constants that are not attached are inputs.
    closed = core.ClosedJaxpr(jaxpr.replace(constvars=[*closed_over, *jaxpr.constvars], invars=inputs), found)
    return closed.jaxpr, found
