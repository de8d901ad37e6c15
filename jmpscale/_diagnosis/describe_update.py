"""The sentences about the update of a step."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.averages import Average
from jmpscale._diagnosis.changes import Change
from jmpscale._diagnosis.findings import Findings
from jmpscale._diagnosis.lost_factors import LostFactor
from jmpscale._diagnosis.phrases import by, describe_leaves
from jmpscale._diagnosis.thresholds import LOST
from jmpscale._diagnosis.update import Update


def describe_stalled(stalled: Sequence[Average]) -> str:
    """Describes averages that stop moving."""
    first, leaves = stalled[0], describe_leaves([x.result for x in stalled])
    held = also = ""
    if first.hyperparameter and is_narrow(first.hyperparameter):
        held = f", which {first.hyperparameter.name} holds in {first.hyperparameter.dtype}"
        also = f", and {first.hyperparameter.name},"
    return (
        f"{leaves} will stop moving: it is an average in {first.result.dtype} with a decay of {first.decay:.6g}{held}, "
        f"and rounding keeps it from shrinking. Keep {'it' if len(stalled) == 1 else 'them'}{also} in float32."
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
    if worst.is_narrow:
        others = [x for x in update.bad if x.is_narrow]
        kept = "it" if len(others) == 1 else "them"
        return (
            f"{what}: keep {kept} in float32, not {worst.result.dtype}. The change is made at {lines}: if "
            f"{'this line computes' if len(update.paths) == 1 else 'these lines compute'} in float32, {then}."
        )
    return f"{what}. Compute {lines} in float32: then {then}."


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
