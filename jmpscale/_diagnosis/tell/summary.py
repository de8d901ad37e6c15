"""The summary of a diagnosis, which joins the sentences about its parts, the worst one first."""

from collections.abc import Sequence

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.search.findings import Findings, SensitiveLoss
from jmpscale._diagnosis.tell.describe_gradients import describe_gradients, ends_with_small_error
from jmpscale._diagnosis.tell.describe_update import describe_update
from jmpscale._diagnosis.tell.phrases import by
from jmpscale._diagnosis.trace.rounded import describe_rounded, find_rounded

_IGNORED = (
    "No gradient depends on the dynamic loss scale: scale the loss with this scaler, or create the optimizer with "
    "static(1.0)."
)

_NO_STATE = (
    "No argument is returned with its structure and types, so no update was compared. If the step changes a state, "
    "pass a function that takes the state first and returns it first."
)


def summarize(findings: Findings) -> str:
    """Describes what half precision does to a step, and what to change."""
    text = findings.not_finite or _join(describe_gradients(findings), findings)
    return _describe_comparison(findings.not_entered) + text


def _describe_comparison(not_entered: Sequence[str]) -> str:
    """Describes a comparison in which operations run in half precision; nothing if there are none."""
    if not not_entered:
        return ""
    verb = "runs" if len(not_entered) == 1 else "run"
    return (
        f"The comparison is not entirely float32: {enumerate_names(not_entered)} {verb} in half precision in it, too. "
    )


def _join(gradients: str, findings: Findings) -> str:
    """Joins the description of the gradients with one of the update; the worst comes first."""
    step, update = findings.step, findings.update
    worst = update.worst if update.bad else None
    faults = [describe_update(findings, worst)] if worst and not _is_repaired(findings) else []
    if wrong := [x.result.name for x in update.changes if not x.is_finite]:
        verb = "becomes" if len(wrong) == 1 else "become"
        faults.append(f"{enumerate_names(wrong)} {verb} infinite or NaN, in float32 too: correct this update.")
    no_state = _NO_STATE if step.gradients and step.state == () else ""
    ignored = _IGNORED if step.ignores_scaler and step.gradients else ""
    rounded = describe_rounded(find_rounded(step.of_gradients))
    notes = list(filter(None, [_describe_loss(findings.sensitive_loss), ignored, no_state, rounded]))
    if faults:
        first = [*faults, gradients] if findings.accurate else [gradients, *faults]
        return " ".join(filter(None, [*first, *notes]))
    worst = update.worst
    if worst is not None and worst.result.is_leaf:
        if not step.gradients:
            gradients = f"The step computes no gradient, and its update differs from float32 {by(worst.error)}."
        elif ends_with_small_error(findings):
            gradients = f"{gradients.removesuffix('.')}, and the update {by(worst.error)}."
        else:
            gradients = f"{gradients} The update differs from float32 {by(worst.error)}."
    return " ".join([gradients, *notes])


def _is_repaired(findings: Findings) -> bool:
    """Tests whether only results, such as losses, are wrong, and the lines that are named for gradients repair them."""
    update, lines = findings.update, findings.lines
    named = lines.paths if lines else []
    return all(not x.result.is_leaf for x in update.bad) and update.is_repaired and set(named).issuperset(update.paths)


def _describe_loss(loss: SensitiveLoss | None) -> str:
    """Describes the error of a loss that rounding of its arguments changes as much; nothing if there is none."""
    if loss is None:
        return ""
    change = (
        f"; rounding only the arguments changes it {by(loss.error_of_arguments)}" if loss.error_of_arguments else ""
    )
    return f"The loss differs from float32 {by(loss.error)}{change}."
