"""The sentences about the update of a step."""

import math

from jmpscale._base.text import format_percentage
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.search.findings import Findings
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.tell.phrases import by, describe_leaves
from jmpscale._diagnosis.thresholds import LOST


def describe_update(findings: Findings, worst: Change) -> str:
    """Describes an update that is wrong: the leaf, the size, the remedy, and the line."""
    update = findings.update
    what = _what(worst, update)
    if not update.is_repaired and not update.paths:
        return f"{what}, even if all lines compute in float32."
    lines = findings.names(update.paths)
    what_then = "the result" if not worst.result.is_leaf else "the update"
    then = f"{what_then} differs {by(update.error_then)}" if update.error_then else f"{what_then} does not round"
    results = [x for x in update.bad if not x.result.is_leaf and x is not worst]
    also = f" {_describe_result(results[0], len(results) - 1)}." if results and worst.result.is_leaf else ""
    if worst.is_narrow:
        others = [x for x in update.bad if x.is_narrow]
        kept = "it" if len(others) == 1 else "them"
        made = "They are made at" if also else "The change is made at"
        return (
            f"{what}: keep {kept} in float32, not {worst.result.dtype}.{also} {made} {lines}: if "
            f"{'this line computes' if len(update.paths) == 1 else 'these lines compute'} in float32, {then}."
        )
    return f"{what}.{also} Compute {lines} in float32: then {then}."


def _what(worst: Change, update: Update) -> str:
    is_leaf = worst.result.is_leaf
    others = [x for x in update.bad if x is not worst and x.result.is_leaf == is_leaf]
    same = [x.result for x in (worst, *others) if x.is_narrow == worst.is_narrow]
    if not is_leaf:
        return _describe_result(worst, len(same) - 1)
    leaves = describe_leaves(same)
    subject = "Even with the right gradients, the update" if worst.result.is_gradient_led else "The step"
    if not worst.is_finite_as_written:
        return f"{subject} makes {leaves} infinite or NaN"
    if math.isinf(worst.error):
        return f"{subject} changes {leaves}, and does not in float32"
    if worst.lost > LOST:
        return f"{subject} loses {format_percentage(min(worst.lost, 1.0))} of the change of {leaves}"
    prefix = "Even with the right gradients, the" if worst.result.is_gradient_led else "The"
    return f"{prefix} change of {leaves} differs from float32 {by(worst.error)}"


def _describe_result(worst: Change, count: int) -> str:
    name = "The result" if worst.result.name == "result" else worst.result.name
    others = f" (and {count} other {'result' if count == 1 else 'results'})" if count else ""
    if math.isinf(worst.error):
        expected = "zero" if worst.is_finite_as_written else "finite"
        return f"{name}{others} is not {expected}, but is in float32"
    return f"{name}{others} differs from float32 {by(worst.error)}"
