"""The summary of a diagnosis, which joins what is said about its parts, the worst first."""

import itertools
from collections.abc import Sequence

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.examined import Examined, SensitiveLoss
from jmpscale._diagnosis.tell.describe_draws import describe_coarse_choices
from jmpscale._diagnosis.tell.describe_gradients import describe_gradients, ends_with_small_error
from jmpscale._diagnosis.tell.describe_inputs import describe_coarse_inputs
from jmpscale._diagnosis.tell.describe_integers import describe_wrong_indices
from jmpscale._diagnosis.tell.describe_update import describe_not_compared, describe_update
from jmpscale._diagnosis.tell.phrases import by
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told

_IGNORED = (
    "No gradient depends on the dynamic loss scale: scale the loss with this scaler, or create the optimizer with "
    "static(1.0)."
)

_NO_STATE = (
    "No argument is returned with its structure and types, so no update was compared. If the step changes a state, "
    "pass a function that takes the state first and returns it first."
)


def tell(examined: Examined) -> list[Told]:
    """Describes what half precision does to a step, and what to change."""
    groups = [examined, *examined.others]
    gradients, update = _describe_groups(groups), describe_update(examined)
    indices = [describe_wrong_indices(examined, examined.wrong_indices)] if examined.wrong_indices else []
    notes = [*describe_comparison(examined.not_entered, examined.step.precision), *indices], _notes(examined)
    if update:
        first = [*update, *gradients] if all(x.is_accurate for x in groups) else [*gradients, *update]
        return [*notes[0], *first, *notes[1]]
    return [*notes[0], *_with_update(examined, groups[-1], gradients), *notes[1]]


def _describe_groups(groups: Sequence[Examined]) -> list[Told]:
    """Describes the gradients of each scaler; lines that must change for several, and equal sentences, once."""
    told: list[Told] = []
    for x in itertools.chain(*map(describe_gradients, groups)):
        lines = {*(x.finding.lines if x.finding else ())}
        named = {line for other in told if other.finding for line in other.finding.lines}
        is_told = lines <= named if lines else any(x.text == other.text for other in told)
        # The loss is compared with the gradients of each scaler.
        if not (is_told and x.finding and x.finding.names == ("loss",)):
            told.append(x._replace(text="") if is_told else x)
    return told


def describe_comparison(not_entered: Sequence[str], precision: str) -> list[Told]:
    """Describes a comparison in which operations run with fewer bits than float32; nothing if there are none."""
    if not not_entered:
        return []
    verb = "runs" if len(not_entered) == 1 else "run"
    text = f"The comparison is not entirely float32: {enumerate_names(not_entered)} {verb} in {precision} in it, too."
    return [Told(text, DiagnosisFinding(FindingKind.NOT_COMPARED, lines=tuple(not_entered)))]


def _with_update(examined: Examined, last_group: Examined, gradients: list[Told]) -> list[Told]:
    """Adds the error of an update that is right to the last sentence about the gradients."""
    worst = examined.update.worst
    if worst is None or not worst.result.is_leaf:
        return gradients
    *others, last = gradients
    if not examined.step.gradients:
        return [Told(f"The step computes no gradient, and its update differs from float32 {by(worst.error)}.")]
    if ends_with_small_error(last_group):
        text = f"{last.text.removesuffix('.')}, and the update {by(worst.error)}."
    else:
        text = f"{last.text} The update differs from float32 {by(worst.error)}."
    return [*others, last._replace(text=text)]


def _notes(examined: Examined) -> list[Told]:
    step = examined.step
    notes = [_describe_loss(examined.sensitive_loss)] if examined.sensitive_loss else []
    if step.ignores_scaler and step.gradients:
        notes.append(Told(_IGNORED, DiagnosisFinding(FindingKind.UNUSED_SCALER)))
    if step.gradients and step.state == ():
        notes.append(Told(_NO_STATE, DiagnosisFinding(FindingKind.NOT_COMPARED)))
    notes += describe_not_compared(examined.update.not_compared)
    if step.may_be_state:
        notes.append(Told(_may_be_state(step.may_be_state)))
    drawn = describe_coarse_choices(examined.coarse_choices)
    return [*notes, *describe_coarse_inputs(examined.coarse_inputs), *drawn]


def _may_be_state(names: Sequence[str]) -> str:
    which = enumerate_names(list(names))
    verbs, they = (
        ("come back changed, and were", "they are") if len(names) > 1 else ("comes back changed, and was", "it is")
    )
    return (
        f"{which} {verbs} compared by value, as data. If {they} state, pass a function that takes and returns a tuple "
        "of the state first."
    )


def _describe_loss(loss: SensitiveLoss) -> Told:
    """Describes the error of a loss that rounding of its arguments changes as much."""
    change = (
        f"; rounding only the arguments changes it {by(loss.error_of_arguments)}" if loss.error_of_arguments else ""
    )
    return Told(f"The loss differs from float32 {by(loss.error)}{change}.")
