"""Finds which leaves of the state read one another in the update, and which read random numbers.

Only such leaves may be right although rounding changes them: see `lossless.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.trace.program import Program, Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of

_RANDOM = "random"


def find_exchanges(program: Program, results: Sequence[Result]) -> list[Result]:
    """Adds to the results what they read, other than through gradients and conditions.

    These are leaves of the state that read them in turn, and random numbers.
    """

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        if caller.is_backward(eqn):
            return [flow.NONE] * len(eqn.outvars)
        found = flow.union(operands) | ({_RANDOM} if eqn.primitive.name == "random_bits" else set())
        conditions = [np.dtype(bool) == getattr(type_of(x), "dtype", None) for x in eqn.outvars]
        return [flow.NONE if is_condition else found for is_condition in conditions]

    leaves = {id(x.old): i for i, x in enumerate(results) if x.old is not None and is_narrow(x)}
    labels = [frozenset([leaves[id(x)]]) if id(x) in leaves else flow.NONE for x in program.consts]
    read = flow.follow(program.jaxpr, rule, constants=labels)[program.measured :]

    def exchange(i: int, j: Any) -> bool:
        return j not in (i, _RANDOM) and results[i].old.shape == results[j].old.shape and i in read[j]

    def added(i: int, result: Result) -> Result:
        if i not in leaves.values():
            return result
        partners = tuple(results[j].name for j in sorted(read[i] - {_RANDOM}) if exchange(i, j))
        return result._replace(partners=partners, is_random=_RANDOM in read[i])

    return [added(*x) for x in enumerate(results)]
