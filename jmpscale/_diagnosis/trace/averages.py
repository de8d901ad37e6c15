"""Finds leaves in half precision, such as moving averages, whose decay is so close to 1 that rounding removes it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.thresholds import STALLED
from jmpscale._diagnosis.trace.operations import constant_scalar, of_moved
from jmpscale._diagnosis.trace.program import Leaf, Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of


class Average(NamedTuple):
    """A leaf in half precision whose new value is its old one, times the decay, plus something else.

    It is a moving average, or a parameter with weight decay.
    """

    result: Result
    decay: float
    is_read: bool = False  # whether the loss depends on it, as on a parameter or a recurrent state
    hyperparameter: Result | None = None  # the leaf of the state that holds the decay; None for a constant


class _Decay(NamedTuple):
    """The value of a scalar leaf of the state, as optax.inject_hyperparams stores decays."""

    leaf: int
    value: float


class _Factor(NamedTuple):
    """A factor, and the scalar leaf that holds it; None for a constant, or if the value is not known."""

    value: float | None
    leaf: int | None = None


class _Term(NamedTuple):
    """The old value of a leaf, times a factor."""

    leaf: int
    factor: float
    multiplied_by: _Factor | None = None


def find_stalled_averages(jaxpr: core.Jaxpr, leaves: Sequence[Leaf]) -> list[Average]:
    """Returns the leaves that stop moving, because a step changes them by less than half of the last place.

    A step moves an average with decay d by at most 1 - d times its distance from what it averages; to shrink, by 1 - d
    times its value. If this is below half of the smallest distance between two numbers of its dtype, it never shrinks.
    """

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return [frozenset(_converted(x, type_of(eqn.outvars[0]).dtype) for x in operands[0])]
        if name == "mul":
            first, second = map(_factor, eqn.invars, operands)
            return [_times(operands[0], second) | _times(operands[1], first)]
        if name in {"sub", "neg"}:
            return [flow.union([*map(_terms, operands[: 1 if name == "sub" else 0]), _negative(operands[-1])])]
        if name == "add":
            return [flow.union(list(map(_terms, operands)))]
        return (flow.of_operands if name == "reduce_precision" else of_moved)(eqn, caller, operands)

    narrow = {leaf.input: i for i, leaf in enumerate(leaves) if is_narrow(leaf.result)}
    scalars = [i for i, x in enumerate(leaves) if x.result.old.shape == () and not x.is_parameter]
    decays = {leaves[i].input: _Decay(i, float(leaves[i].result.old)) for i in scalars}

    def label(i: int) -> flow.Labels:
        return frozenset(([_Term(narrow[i], 1.0)] if i in narrow else []) + ([decays[i]] if i in decays else []))

    outputs = flow.follow(jaxpr, rule, inputs=[label(i) for i in range(len(jaxpr.invars))])
    found = []
    for i, leaf in enumerate(leaves):
        decay, held_by = _decay([x for x in _terms(outputs[leaf.output]) if x.leaf == i])
        # Parameters that are multiplied by 1 change by their gradients.
        if decay is None or (decay == 1 and leaf.is_parameter):
            continue
        if 1 - decay < STALLED * float(jnp.finfo(leaf.result.dtype).eps):
            hyperparameter = None if held_by is None else leaves[held_by].result
            found.append(Average(leaf.result, decay, leaf.is_parameter, hyperparameter))
    return found


def _terms(labels: flow.Labels) -> frozenset[_Term]:
    return frozenset(x for x in labels if isinstance(x, _Term))


def _converted(label: _Term | _Decay, dtype: np.dtype) -> _Term | _Decay:
    """Returns the label of a value that is converted to a dtype."""
    if isinstance(label, _Term) or not jnp.issubdtype(dtype, np.floating):
        return label
    return label._replace(value=float(np.asarray(label.value).astype(dtype)))


def _factor(x: Any, labels: flow.Labels) -> _Factor:
    """Returns the value of a constant scalar in the program, or of a scalar leaf of the state."""
    decays = [label for label in labels if isinstance(label, _Decay)]
    if decays:
        return _Factor(decays[0].value, decays[0].leaf)
    return _Factor(constant_scalar(x))


def _times(labels: flow.Labels, factor: _Factor) -> flow.Labels:
    if factor.value is None:
        return flow.NONE
    # What is multiplied twice is multiplied in each iteration of a loop, of which the first one shows the decay.
    return frozenset(_Term(x.leaf, x.factor * factor.value, factor) for x in _terms(labels) if not x.multiplied_by)


def _negative(labels: flow.Labels) -> flow.Labels:
    return frozenset(x._replace(factor=-x.factor) for x in _terms(labels))


def _decay(terms: Sequence[_Term]) -> tuple[float | None, int | None]:
    """Returns the factor of an old value in the new one, None if it is not an average; and the leaf that holds it.

    The old value alone is another branch of a gate, or a term of `average + (1 - decay) * (new - average)`.
    """
    multiplied = [(x.factor, x.multiplied_by.leaf) for x in terms if x.multiplied_by]
    if len(multiplied) != 1:
        return None, None
    [(factor, held_by)] = multiplied
    is_difference = factor < 0 and any(not x.multiplied_by for x in terms)
    decay = 1 + factor if is_difference else factor
    return (decay, held_by) if 0.5 <= decay <= 1 else (None, None)
