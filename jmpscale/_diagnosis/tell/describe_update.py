"""The sentences about the update of a step."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.search.findings import Findings
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.tell.phrases import by, describe_leaves
from jmpscale._diagnosis.thresholds import LOST
from jmpscale._diagnosis.trace.averages import Average
from jmpscale._diagnosis.trace.lost_factors import LostFactor


def describe_stalled(findings: Findings, stalled: Sequence[Average]) -> list[str]:
    """Describes averages that stop moving, and parameters whose weight decay is lost."""
    led = {x.name for x in findings.step.results if x.is_gradient_led}
    parameters = [x for x in stalled if x.is_read and x.result.name in led]
    averages = [x for x in stalled if x not in parameters]
    texts = []
    for found, describe in ((averages, _describe_average), (parameters, _describe_weight_decay)):
        if found:
            leaves, decay = describe_leaves([x.result for x in found]), found[0].hyperparameter
            kept = "it" if len(found) == 1 else "them"
            also = f", and {decay.name}," if decay and is_narrow(decay) else ""
            texts.append(f"{describe(leaves, found[0])} Keep {kept}{also} in float32.")
    return texts


def _describe_average(leaves: str, average: Average) -> str:
    decay = average.hyperparameter
    held = f", which {decay.name} holds in {decay.dtype}," if decay and is_narrow(decay) else ","
    return (
        f"{leaves} will stop moving: it is an average in {average.result.dtype} with a decay of {average.decay:.6g}"
        f"{held} and rounding keeps it from shrinking."
    )


def _describe_weight_decay(leaves: str, parameter: Average) -> str:
    return (
        f"The weight decay of {leaves} is lost where gradients change a number by less than its last place: a factor "
        f"of {parameter.decay:.6g} changes nothing in {parameter.result.dtype}."
    )


def describe_lost_factors(found: Sequence[LostFactor]) -> str:
    """Describes parameters that are rounded only to be multiplied by 1."""
    first, lines = found[0], list(dict.fromkeys(x.line for x in found))
    example = 1 - float(jnp.finfo(first.dtype).eps) / 8
    return (
        f"{describe_leaves([x.result for x in found])} is rounded to {first.dtype} in each step, to be multiplied by a "
        f"constant that is 1 in {first.dtype}, as {example:.4g} is. Compute {enumerate_names(lines)} in float32."
    )


def describe_unchanged(findings: Findings) -> str:
    """Describes leaves that do not change, because constants are rounded."""
    unchanged = findings.update.unchanged
    first, count = unchanged.results[0], len(unchanged.results) - 1
    keep = f"Keep {'them' if count else 'it'} in float32, or compute" if is_narrow(first) else "Compute"
    verb = "do" if count else "does"
    return (
        f"{describe_leaves(unchanged.results)} {verb} not change, in float32 either, because a constant at "
        f"{findings.names(unchanged.paths)} is rounded to {unchanged.dtype}. {keep} with constants in float32 there."
    )


def describe_update(findings: Findings, worst: Change) -> str:
    """Describes an update that is wrong: the leaf, the size, the remedy, and the line."""
    update = findings.update
    what = _what(worst, update)
    if not update.is_repaired and not update.paths:
        return f"{what}, even if all lines compute in float32."
    lines = findings.names(update.paths)
    what_then = "the result" if worst.result.old is None else "the update"
    then = f"{what_then} differs {by(update.error_then)}" if update.error_then else f"{what_then} does not round"
    results = [x for x in update.bad if x.result.old is None and x is not worst]
    also = f" {_describe_result(results[0], len(results) - 1)}." if results and worst.result.old is not None else ""
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
    is_leaf = worst.result.old is not None
    others = [x for x in update.bad if x is not worst and (x.result.old is not None) == is_leaf]
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
