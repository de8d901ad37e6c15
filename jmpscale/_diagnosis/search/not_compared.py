"""Finds leaves of the state of which a comparison of the update shows nothing."""

from collections.abc import Collection
from typing import NamedTuple

from jax.extend import core

from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.update_trials import UpdateTrials
from jmpscale._diagnosis.trace.cut import GIVES_GRADIENTS
from jmpscale._diagnosis.trace.operations import moves_values
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs import flow
from jmpscale._programs.jaxpr import Caller, type_of

_ROUNDED = frozenset(["rounded"])


class NotCompared(NamedTuple):
    """Leaves of which the comparison shows nothing."""

    unchanged: tuple[Result, ...] = ()  # in this step, whatever its gradients are, although gradients lead to them
    from_bits: tuple[Result, ...] = ()  # in half precision, computed from the bits of numbers in both runs
    lines: tuple[str, ...] = ()  # that compute them from bits


def find_not_compared(trials: UpdateTrials, known: Collection[str]) -> NotCompared:
    """Finds leaves that do not change in this step, and leaves that are computed from bits, unless they are `known`."""
    changes = [x for x in trials.changes({}) if x.result.is_changed and x.result.name not in known]
    rounded = _rounded_on_purpose(trials)
    candidates = [x.result for x in changes if x.is_zero and x.result.is_gradient_led and x.result.name not in rounded]
    changed = trials.changed_by_other_gradients(candidates)
    unchanged = tuple(x for x in candidates if x.name not in changed)
    lines = _lines_of_bits(trials)
    from_bits = [x.result for x in changes if is_narrow(x.result) and lines[x.result.name] and not x.error]
    from_bits = [x for x in from_bits if not trials.varies_with_random_numbers(x)]
    found = (line for x in from_bits for line in sorted(lines[x.name]))
    return NotCompared(unchanged, tuple(from_bits), tuple(dict.fromkeys(found)))


def _rounded_on_purpose(trials: UpdateTrials) -> set[str]:
    """Returns the names of the results that are rounded in float32, too, such as a parameter with a float32 copy."""

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        if caller.runs_as_written(eqn):
            gives_gradients = GIVES_GRADIENTS in caller.scopes_of(eqn)
            return [flow.NONE if gives_gradients else _ROUNDED] * len(eqn.outvars)
        return flow.of_operands(eqn, caller, operands)

    labels = flow.follow(trials.forms.program.jaxpr, rule)
    return {x.name for x, found in zip(trials.results, labels, strict=True) if found}


def _lines_of_bits(trials: UpdateTrials) -> dict[str, flow.Labels]:
    """Returns for each result the lines that convert bits to its values."""

    def rule(eqn: core.JaxprEqn, caller: Caller, operands: list[flow.Labels]) -> list[flow.Labels]:
        name = eqn.primitive.name
        if name == "bitcast_convert_type" and not is_narrow(type_of(eqn.outvars[0])):
            return [frozenset([caller.line_of(eqn)])]
        keeps = name == "convert_element_type" or moves_values(eqn)
        return flow.of_operands(eqn, caller, operands if keeps else [])

    labels = flow.follow(trials.forms.program.jaxpr, rule)
    return {x.name: found for x, found in zip(trials.results, labels, strict=True)}
