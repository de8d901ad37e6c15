"""The sentences about the update of a step."""

import math
from collections.abc import Sequence

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.changes import Change
from jmpscale._diagnosis.search.not_compared import NotCompared
from jmpscale._diagnosis.search.stalled import Stalled
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.tell.describe_counters import describe_counters
from jmpscale._diagnosis.tell.phrases import by, describe_leaves
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told
from jmpscale._diagnosis.thresholds import FAR_FROM_AVERAGED, LOST


def describe_update(examined: Examined) -> list[Told]:
    """Describes all that is wrong with the update, the worst first."""
    update = examined.update
    told = [_describe_bad(examined, update.worst)] if update.bad and update.worst and not _is_repaired(examined) else []
    others = _describe_other_changes(examined) if told else []
    stalled = [*_describe_unchanged(examined), *_describe_stalled(examined), *describe_counters(update)]
    return [*told, *others, *stalled, *_describe_not_finite(update)]


def _is_repaired(examined: Examined) -> bool:
    """Tests whether only results, such as losses, are wrong, and the lines that are named for gradients repair them."""
    update, lines = examined.update, examined.repair.lines if examined.repair else None
    named = lines.paths if lines else []
    return not any(x.result.is_leaf for x in update.bad) and update.is_repaired and {*named}.issuperset(update.paths)


def _describe_bad(examined: Examined, worst: Change) -> Told:
    """Describes an update that is wrong: the leaf, the size, the remedy, and the line."""
    update = examined.update
    what = _what(worst, update)
    finding = _finding(examined, _of_one_kind(worst, update.bad))
    if not update.is_repaired and not update.paths:
        return Told(f"{what}, even if all lines compute in float32.", finding)
    lines = examined.names(update.paths)
    what_then = "the update" if worst.result.is_leaf else "the result"
    then = f"{what_then} differs {by(update.error_then)}" if update.error_then else f"{what_then} does not round"
    results = [x for x in update.bad if not x.result.is_leaf and x is not worst]
    also = f" {_describe_result(results[0], len(results) - 1)}." if results and worst.result.is_leaf else ""
    if worst.is_narrow:
        others = [x for x in update.bad if x.is_narrow]
        kept = "it" if len(others) == 1 else "them"
        made = "They are made at" if also else "The change is made at"
        text = (
            f"{what}: keep {kept} in float32, not {worst.result.dtype}.{also} {made} {lines}: if "
            f"{'this line computes' if len(update.paths) == 1 else 'these lines compute'} in float32, {then}."
        )
        return Told(text, finding)
    return Told(f"{what}.{also} Compute {lines} in float32: then {then}.", finding)


def _of_one_kind(worst: Change, changes: Sequence[Change]) -> list[Change]:
    """Returns the changes that one finding holds, the worst one first."""
    others = [x for x in changes if x is not worst and x.is_narrow == worst.is_narrow]
    return [worst, *(x for x in others if x.result.is_leaf == worst.result.is_leaf)]


def _describe_other_changes(examined: Examined) -> list[Told]:
    """Describes the changes that are not of the kind of the worst one; the lines of all have been named."""
    update = examined.update
    named = _of_one_kind(update.worst, update.bad) if update.worst else []
    rest, told = [x for x in update.bad if x not in named], []
    while rest:
        similar = _of_one_kind(rest[0], rest)
        text = f"{_what(rest[0], update)}, too." if rest[0].result.is_leaf else ""
        told.append(Told(text, _finding(examined, similar)))
        rest = [x for x in rest if x not in similar]
    return told


def _finding(examined: Examined, similar: Sequence[Change]) -> DiagnosisFinding:
    worst, update = similar[0], examined.update
    kind = FindingKind.WRONG_CHANGE if worst.result.is_leaf else FindingKind.WRONG_RESULT
    if worst.result.is_leaf and worst.lost > LOST and worst.is_finite_as_written:
        kind = FindingKind.LOST_CHANGE
    lines, then = examined.each_name(update.paths), update.error_then if update.is_repaired else None
    dtype = worst.result.dtype.name if worst.is_narrow else None
    return DiagnosisFinding(kind, tuple(x.name for x in similar), lines, dtype, worst.error, then)


def _what(worst: Change, update: Update) -> str:
    same = [x.result._replace(name=x.name) for x in _of_one_kind(worst, update.bad)]
    if not worst.result.is_leaf:
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


def _describe_unchanged(examined: Examined) -> list[Told]:
    """Describes leaves that do not change because constants are rounded."""
    unchanged = examined.update.unchanged
    if unchanged is None:
        return []
    first, count = unchanged.results[0], len(unchanged.results) - 1
    keep = f"Keep {'them' if count else 'it'} in float32, or compute" if is_narrow(first) else "Compute"
    lines = examined.names(unchanged.paths)
    text = (
        f"{describe_leaves(unchanged.results)} {'do' if count else 'does'} not change, in float32 either, because a "
        f"constant at {lines} is rounded to {unchanged.dtype}. {keep} with constants in float32 there."
    )
    names, dtype = tuple(x.name for x in unchanged.results), unchanged.dtype.name
    kind = FindingKind.ROUNDED_CONSTANT
    return [Told(text, DiagnosisFinding(kind, names, examined.each_name(unchanged.paths), dtype))]


def _describe_stalled(examined: Examined) -> list[Told]:
    """Describes leaves that a step cannot shrink, unless the remedy is told already."""
    bad = {x.result.name for x in examined.update.bad}
    stalled = [x for x in examined.update.stalled if x.result.name not in bad or x.paths or x.arguments]
    groups: dict[tuple[bool, bool, bool], list[Stalled]] = {}
    for x in stalled:
        groups.setdefault((x.result.name in examined.step.gradients, x.constants, x.is_distant), []).append(x)
    return [_describe_group(examined, group) for group in groups.values()]


def _describe_group(examined: Examined, group: Sequence[Stalled]) -> Told:
    first = group[0]
    if first.constants:
        return _describe_constants(examined, group)
    if first.is_distant:
        return _describe_distant(group)
    return _describe_decay(group, first.result.name in examined.step.gradients)


def _describe_distant(group: Sequence[Stalled]) -> Told:
    """Describes averages in half precision that stay far from what they average."""
    leaves, decay, dtype = describe_leaves([x.result for x in group]), group[0].decay, group[0].dtype.name
    they_average, them = ("it averages", "it") if len(group) == 1 else ("they average", "them")
    text = (
        f"{leaves} will stay {FAR_FROM_AVERAGED:.0%} from what {they_average}: with a decay of {decay:.4g}, a smaller "
        f"difference changes nothing in {dtype}. Keep {them} in float32."
    )
    return Told(text, DiagnosisFinding(FindingKind.STALLED, tuple(x.result.name for x in group), dtype=dtype))


def _describe_decay(group: Sequence[Stalled], is_parameter: bool) -> Told:
    """Describes leaves in half precision that are too coarse for their decay."""
    first = group[0]
    leaves, dtype = describe_leaves([x.result for x in group]), first.dtype.name
    if is_parameter:
        what = (
            f"The weight decay of {leaves} is lost where gradients change a number by less than its last place: a "
            f"factor of {first.decay:.6g} changes nothing in {dtype}."
        )
    else:
        what = (
            f"{leaves} will stop moving: each step multiplies it by {first.decay:.6g}, and rounding to {dtype} keeps "
            "it from shrinking."
        )
    text = f"{what} Keep {'it' if len(group) == 1 else 'them'} in float32."
    kind = FindingKind.LOST_DECAY if is_parameter else FindingKind.STALLED
    return Told(text, DiagnosisFinding(kind, tuple(x.result.name for x in group), dtype=dtype))


def _describe_constants(examined: Examined, group: Sequence[Stalled]) -> Told:
    """Describes leaves that are multiplied by a constant that rounding has perhaps made 1."""
    first, dtype = group[0], group[0].dtype.name
    leaves = describe_leaves([x.result for x in group])
    lines = list(dict.fromkeys(path for x in group for path in x.paths))
    arguments = list(dict.fromkeys(name for x in group for name in x.arguments))
    is_parameter = first.result.name in examined.step.gradients
    constant = f"{enumerate_names(arguments)}, which" if arguments else "a constant that"
    keep = [*([] if lines else ["it" if len(group) == 1 else "them"]), *arguments]
    remedy = f"Keep {enumerate_names(keep)} in float32." if keep else ""
    compute = f"Compute {examined.names(lines)} in float32." if lines else ""
    text = (
        f"{leaves} {'does not decay' if is_parameter else 'will stop moving'}: each step multiplies it by {constant} "
        f"is 1 in {dtype}, as {first.example:.4g} is. {' '.join(filter(None, [compute, remedy]))}"
    )
    kind = FindingKind.LOST_DECAY if is_parameter else FindingKind.STALLED
    return Told(text, DiagnosisFinding(kind, tuple(x.result.name for x in group), examined.each_name(lines), dtype))


def describe_not_compared(found: NotCompared) -> list[Told]:
    """Describes leaves of which the comparison shows nothing."""
    told = []
    if found.unchanged:
        verb, they = ("do", "they change") if len(found.unchanged) > 1 else ("does", "it changes")
        text = f"{describe_leaves(found.unchanged)} {verb} not change in this step: diagnose one in which {they}."
        names = tuple(x.name for x in found.unchanged)
        told.append(Told(text, DiagnosisFinding(FindingKind.NOT_COMPARED, names)))
    if found.from_bits:
        text = (
            f"{describe_leaves(found.from_bits)} {'are' if len(found.from_bits) > 1 else 'is'} computed from bits at "
            f"{enumerate_names(list(found.lines))}, which are rounded in the float32 run, too, so nothing is known of "
            "this rounding."
        )
        names = tuple(x.name for x in found.from_bits)
        told.append(Told(text, DiagnosisFinding(FindingKind.NOT_COMPARED, names, found.lines)))
    return told


def _describe_not_finite(update: Update) -> list[Told]:
    wrong = update.not_finite
    if not wrong:
        return []
    verb = "becomes" if len(wrong) == 1 else "become"
    text = f"{enumerate_names(list(wrong))} {verb} infinite or NaN, in float32 too: correct this update."
    return [Told(text, DiagnosisFinding(FindingKind.NOT_FINITE, wrong))]
