"""Finds arguments and constants because of which a step has no useful gradients, by running the step without them."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import equations, rewrite, type_of
from jmpscale._base.source import user_line
from jmpscale._base.tree import is_inexact
from jmpscale._diagnosis.float32 import is_narrow
from jmpscale._diagnosis.measure import is_finite, is_zero
from jmpscale._diagnosis.scales import compile_in_float32
from jmpscale._diagnosis.step import Step

_ARITHMETIC = {"add", "div", "mul", "sub"}
_TRIED_CONSTANTS = 8


class Constant(NamedTuple):
    """A constant that half precision holds as zero or infinity."""

    line: str
    operation: str
    dtype: np.dtype
    value: float


def are_finite(outputs: list[Any]) -> bool:
    """Tests whether a loss and gradients are finite."""
    return all(map(is_finite, outputs))


def are_zero(outputs: list[Any]) -> bool:
    """Tests whether a loss or all gradients are zero."""
    loss, *grads = outputs
    return is_zero(loss) or all(map(is_zero, grads))


def harmful_arrays(step: Step) -> list[Any]:
    """Returns the arrays of a step whose infinities or NaN are the reason why it is not finite.

    With zeros in place of all infinities and NaN the step is finite. Each returned array alone makes it non-finite.
    """
    run = compile_in_float32(step)
    zeroed = [jnp.nan_to_num(x, posinf=0.0, neginf=0.0) if is_inexact(x) else x for x in step.consts]
    if not are_finite(run(zeroed)):
        return []
    faulty = [i for i, x in enumerate(step.consts) if is_inexact(x) and not is_finite(x)]
    alone = [i for i in faulty if not are_finite(run([*zeroed[:i], step.consts[i], *zeroed[i + 1 :]]))]
    return [step.consts[i] for i in alone or faulty]  # all of them if only their combination is not finite


def harmful_constant(step: Step, was_finite: bool) -> Constant | None:
    """Returns a constant whose replacement by a nearby number makes a step finite, or nonzero if it was finite."""
    lines = {constant: found.line for found in equations(step.jaxpr) for constant in constants(found.eqn)}
    for constant, line in list(lines.items())[:_TRIED_CONSTANTS]:
        changed = step._replace(jaxpr=rewrite(step.jaxpr, functools.partial(without, constant), {}))
        outputs = compile_in_float32(changed)(step.consts)
        if are_finite(outputs) and not (was_finite and are_zero(outputs)):
            return constant._replace(line=line)
    return None


def constants(eqn: core.JaxprEqn) -> list[Constant]:
    """Returns the operands of an equation that are constants of zero or infinity in half precision."""
    if eqn.primitive.name not in _ARITHMETIC:
        return []
    literals = [x for x in eqn.invars if isinstance(x, core.Literal) and is_narrow(type_of(x)) and np.ndim(x.val) == 0]
    values = [(type_of(x).dtype, float(x.val)) for x in literals]
    return [Constant(user_line(eqn), eqn.primitive.name, *x) for x in values if x[1] == 0 or math.isinf(x[1])]


def without(constant: Constant, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Returns an equation with the nearest finite, nonzero number in place of a constant."""
    if constant not in constants(eqn):
        return [eqn]
    info = jnp.finfo(constant.dtype)
    nearest = math.copysign(info.max if constant.value else info.smallest_subnormal, constant.value)

    def new(x: Any) -> Any:
        is_it = isinstance(x, core.Literal) and is_narrow(type_of(x)) and float(x.val) == constant.value
        return core.Literal(np.asarray(nearest, constant.dtype), type_of(x)) if is_it else x

    return [eqn.replace(invars=[new(x) for x in eqn.invars])]
