"""Says what the outputs of a step are, by data flow: the loss, results to compare, and the gradient of which parameter.

The program says it, because a step is any function: what it returns need not have names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jmpscale._diagnosis.trace.operations import moves_values, narrow_dtype
from jmpscale._diagnosis.trace.passes import Pass, Passes
from jmpscale._diagnosis.trace.program import Leaf, Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of
from jmpscale._programs.scopes import is_differentiated

_FROM_FORWARD, _FROM_BACKWARD = frozenset(["forward"]), frozenset(["backward"])
_HALF = "half"


def with_outputs(jaxpr: core.Jaxpr, outvars: Sequence[Any]) -> core.Jaxpr:
    """Returns a program with other variables as its outputs."""
    debug_info: Any = jaxpr.debug_info
    return jaxpr.replace(outvars=list(outvars), debug_info=debug_info._replace(result_paths=("",) * len(outvars)))


def find_losses(jaxpr: core.Jaxpr, results: Sequence[Result]) -> list[int]:
    """Returns which results may be the loss: scalars of a differentiated function, first those with this name.

    The outputs of the program are the results.
    """

    def mark(eqn: core.JaxprEqn, caller: Caller, found: list[flow.Labels]) -> list[flow.Labels]:
        if caller.is_backward(eqn):
            return [_FROM_BACKWARD] * len(found)
        return [_FROM_FORWARD] * len(found) if is_differentiated(eqn) else found

    labels = flow.follow(jaxpr, mark=mark)
    scalars = [
        i
        for i, (result, x, found) in enumerate(zip(results, jaxpr.outvars, labels, strict=True))
        if result.old is None and type_of(x).shape == () and found == _FROM_FORWARD
    ]
    return sorted(scalars, key=lambda i: "loss" not in results[i].name.lower())


def select_compared(jaxpr: core.Jaxpr, count: int, results: Sequence[Result]) -> list[Result | None]:
    """Returns the results that may differ from float32 if the gradients are right, and None for all others.

    The outputs of the program are the loss and the gradients, `count` in all, and then the results.
    """
    passes = Passes(jaxpr, count)

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        found = flow.of_operands(eqn, caller, operands)
        rounds = any(map(narrow_dtype, eqn.outvars)) and not moves_values(eqn)
        return [x | {_HALF, passes.of(eqn, caller)} for x in found] if rounds else found

    def mark(eqn: core.JaxprEqn, caller: Caller, found: list[flow.Labels]) -> list[flow.Labels]:
        return [x | {Pass.BACKWARD} for x in found] if caller.is_backward(eqn) else found

    labels = flow.follow(jaxpr, rule, mark=mark)[count:]

    def compared(result: Result, found: flow.Labels) -> Result | None:
        is_led = Pass.BACKWARD in found
        return result._replace(is_gradient_led=is_led) if (Pass.UPDATE if is_led else _HALF) in found else None

    return [compared(*x) for x in zip(results, labels, strict=True)]


def name_gradients(jaxpr: core.Jaxpr, gradients: Sequence[Any], leaves: Sequence[Leaf]) -> list[str]:
    """Names gradients, which are variables of a program, after the parameters that they change.

    A gradient changes a parameter if it reaches its new value by operations that do not reduce it to a scalar, as a
    norm does. A parameter is a leaf of the state that a differentiated function reads. The gradient of a parameter that
    is frozen changes none, and is named by its shape, if no other parameter has it.
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
    parameters = [x for x in leaves if x.is_parameter] or leaves
    names: list[str] = []
    for i, variable in enumerate(gradients):
        shape = type_of(variable).shape
        of_shape = [x.result for x in parameters if x.result.old.shape == shape]
        candidates = [x.result for x in parameters if i in labels[x.output]] or (of_shape if len(of_shape) == 1 else [])
        fitting = [x for x in candidates if x.old.shape == shape] or candidates
        fresh = [x for x in fitting if x.name not in names] or fitting
        names.append(fresh[0].name if fresh else f"the gradient of {type_of(variable).strip_weak_type()}")
    return names
