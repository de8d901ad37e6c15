"""Finds leaves in half precision, such as moving averages, whose decay is so close to 1 that rounding removes it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base import flow
from jmpscale._base.jaxpr import Caller, type_of
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.operations import of_moved
from jmpscale._diagnosis.program import Leaf, Result
from jmpscale._diagnosis.thresholds import STALLED

_KEEPS = {"convert_element_type", "reduce_precision", "add"}


class Average(NamedTuple):
    """A leaf in half precision whose new value is its old one, times the decay, plus something else.

    It is a moving average, or a parameter with weight decay.
    """

    result: Result
    decay: float
    is_read: bool = False  # whether the loss depends on it, as on a parameter or a recurrent state


class _Term(NamedTuple):
    """The old value of a leaf, times a factor."""

    leaf: int
    factor: float
    is_multiplied: bool = False


def find_stalled_averages(jaxpr: core.Jaxpr, leaves: Sequence[Leaf]) -> list[Average]:
    """Returns the leaves that stop moving, because a step changes them by less than half of the last place.

    A step moves an average with decay d by at most 1 - d times its distance from what it averages; to shrink, by 1 - d
    times its value. If this is below half of the smallest distance between two numbers of its dtype, it never shrinks.
    """

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        name = eqn.primitive.name
        if name == "mul":
            return [_times(operands[0], _number(eqn.invars[1])) | _times(operands[1], _number(eqn.invars[0]))]
        if name in {"sub", "neg"}:
            return [flow.union([*operands[: 1 if name == "sub" else 0], _times(operands[-1], -1.0, counts=False)])]
        return (flow.of_operands if name in _KEEPS else of_moved)(eqn, caller, operands)

    narrow = {leaf.input: i for i, leaf in enumerate(leaves) if is_narrow(leaf.result)}
    labels = [frozenset([_Term(narrow[i], 1.0)]) if i in narrow else flow.NONE for i in range(len(jaxpr.invars))]
    outputs = flow.follow(jaxpr, rule, inputs=labels)
    found = []
    for i, leaf in enumerate(leaves):
        decay = _decay([x for x in outputs[leaf.output] if x.leaf == i])
        # Parameters that are multiplied by 1 change by their gradients.
        if decay is None or (decay == 1 and leaf.is_parameter):
            continue
        if 1 - decay < STALLED * float(jnp.finfo(leaf.result.dtype).eps):
            found.append(Average(leaf.result, decay, leaf.is_parameter))
    return found


def _number(x: Any) -> float | None:
    """Returns the value of a constant scalar in the program; None for anything else."""
    is_scalar = isinstance(x, core.Literal) and jnp.issubdtype(type_of(x).dtype, np.floating)
    return float(np.asarray(x.val).astype(np.float32)) if is_scalar and jnp.shape(x.val) == () else None


def _times(labels: flow.Labels, factor: float | None, *, counts: bool = True) -> flow.Labels:
    if factor is None:
        return flow.NONE
    # What is multiplied twice is multiplied in each iteration of a loop, of which the first one shows the decay.
    kept = [x for x in labels if not (x.is_multiplied and counts)]
    return frozenset(_Term(x.leaf, x.factor * factor, x.is_multiplied or counts) for x in kept)


def _decay(terms: Sequence[_Term]) -> float | None:
    """Returns the factor of an old value in the new one; None if it is not an average.

    The old value alone is another branch of a gate, or a term of `average + (1 - decay) * (new - average)`.
    """
    multiplied = [x.factor for x in terms if x.is_multiplied]
    if len(multiplied) != 1:
        return None
    factor = multiplied[0]
    is_difference = factor < 0 and any(not x.is_multiplied for x in terms)
    decay = 1 + factor if is_difference else factor
    return decay if 0.5 <= decay <= 1 else None
