"""Says what the outputs of a step are, by data flow: the loss, results to compare, and the gradient of which parameter.

The program says it, because a step is any function: what it returns need not have names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jmpscale._diagnosis.trace.operations import rounding_dtypes
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of
from jmpscale._programs.scopes import is_differentiated

_FROM_FORWARD, _FROM_BACKWARD = frozenset(["forward"]), frozenset(["backward"])
_HALF, _LED = "half", "gradient-led"


def find_losses(jaxpr: core.Jaxpr, results: Sequence[Result], scales: Sequence[flow.Labels] = ()) -> list[int]:
    """Returns which results may be the loss: scalars of a differentiated function.

    Those with this name come first, and then those that do not depend on the loss scale; an amax that a backward pass
    returns in place of a gradient depends on it. The outputs of the program are the results; `scales` has a label for
    each input that is a loss scale.
    """

    def mark(eqn: core.JaxprEqn, caller: Caller, found: list[flow.Labels]) -> list[flow.Labels]:
        if caller.is_backward(eqn):
            return [_FROM_BACKWARD] * len(found)
        return [_FROM_FORWARD] * len(found) if is_differentiated(eqn) else found

    labels = flow.follow(jaxpr, mark=mark)
    scalars = [
        i
        for i, (result, x, found) in enumerate(zip(results, jaxpr.outvars, labels, strict=True))
        if not result.is_leaf and type_of(x).shape == () and found == _FROM_FORWARD
    ]
    scaled = flow.follow(jaxpr, inputs=scales)
    return sorted(scalars, key=lambda i: ("loss" not in results[i].name.lower(), bool(scaled[i])))


def select_compared(jaxpr: core.Jaxpr, given: int, results: Sequence[Result]) -> list[Result | None]:
    """Returns the results on which rounding has an influence, and None for all others.

    The outputs of the program are the results, and its last constants are `given`: gradients, and what the loops that
    compute gradients read.
    """

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        if caller.runs_as_written(eqn):
            return [frozenset([_LED])] * len(eqn.outvars)
        found = flow.of_operands(eqn, caller, operands)
        return [x | {_HALF} for x in found] if any(rounding_dtypes(eqn)) else found

    constants = [flow.NONE] * (len(jaxpr.constvars) - given) + [frozenset([_LED])] * given
    labels = flow.follow(jaxpr, rule, constants=constants, with_tests=True)
    pairs = zip(results, labels, strict=True)
    return [result._replace(is_gradient_led=_LED in found) if _HALF in found else None for result, found in pairs]


def name_gradients(
    jaxpr: core.Jaxpr, gradients: Sequence[Any], results: Sequence[Result], is_read: Sequence[bool]
) -> list[str]:
    """Names gradients, which are variables of a step, after the parameters that they change.

    A gradient changes a parameter if it reaches its new value by operations that do not reduce it to a scalar, as a
    norm does. A parameter is a leaf of the state that the forward pass reads; `is_read` says which arguments it reads.
    The gradient of a parameter that is frozen changes none, and is named by its shape, if no other parameter has it.
    """
    indices: dict[Any, set[int]] = {}
    for i, variable in enumerate(gradients):
        indices.setdefault(variable, set()).add(i)

    def size(x: Any) -> int:
        return int(np.prod(getattr(type_of(x), "shape", ())))

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        pairs = list(zip(eqn.invars, operands, strict=True))
        return [
            flow.union([labels for x, labels in pairs if size(x) >= size(y) > 1 or size(x) == size(y)])
            for y in eqn.outvars
        ]

    def mark(eqn: core.JaxprEqn, caller: Caller, found: list[flow.Labels]) -> list[flow.Labels]:
        return [x | indices.get(y, set()) for x, y in zip(found, eqn.outvars, strict=True)]

    labels = flow.follow(jaxpr, rule, mark=mark)
    leaves = [(x, type_of(jaxpr.invars[k]).shape, is_read[k]) for x in results if (k := x.input) is not None]
    parameters = [(x, shape) for x, shape, is_parameter in leaves if is_parameter] or [x[:2] for x in leaves]
    names: list[str] = []
    for i, variable in enumerate(gradients):
        own = type_of(variable).shape
        of_shape = [(x, shape) for x, shape in parameters if shape == own]
        changed = [(x, shape) for x, shape in parameters if i in labels[x.output]]
        candidates = changed or (of_shape if len(of_shape) == 1 else [])
        fitting = [x.name for x, shape in candidates if shape == own] or [x.name for x, _ in candidates]
        fresh = [name for name in fitting if name not in names] or fitting
        names.append(fresh[0] if fresh else f"the gradient of {type_of(variable).strip_weak_type()}")
    return names
