"""The sentences about a step that is infinite or NaN in float32, too."""

from collections.abc import Sequence

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.arguments import non_finite
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.fit import Present
from jmpscale._diagnosis.search.layers import find_layers_not_finite
from jmpscale._diagnosis.search.not_finite import RepairTrials
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._diagnosis.tell.told import Told
from jmpscale._diagnosis.trace.traced_step import TracedStep


def describe_not_finite(step: TracedStep, trials: GradientTrials, present: Present) -> Told:
    """Describes what makes a step infinite or NaN."""
    repair = RepairTrials(trials.program_of_repair)
    if repair.is_finite_with_finite_arguments() and (names := non_finite(step.arguments)):
        return _describe_arguments(names, present)
    site = repair.origin()
    where = f"{site.operation} at {site.part.path[-1]}" if site else "an operation that was not entered"
    kind = FindingKind.NOT_FINITE
    if site is None or where in trials.names_not_entered:
        text = (
            f"The result of {where} is not finite, and reaches the loss or a gradient. Whether it is finite in float32 "
            "was not measured: give this operation operands in float32, and diagnose again."
        )
        return Told(text, DiagnosisFinding(kind, lines=(site.part.path[-1],) if site else ()))
    layers = find_layers_not_finite(step, repair, site)
    if layers:
        where = f"{where}, {layers.describe()},"
    helps = "No loss scale helps: correct this line." if present.has_scaler else "Correct this line."
    text = (
        f"The result of {where} is not finite in the float32 run either, and reaches the loss or a gradient. {helps} "
        "Common causes are invalid data; a softmax over a row that is masked everywhere, which needs a finite mask or "
        "where=; a derivative such as the derivative of a norm at zero; and a constant, such as 1e-8 or -1e9, that is "
        "zero or infinite in float16."
    )
    found = layers.names if layers else ()
    return Told(text, DiagnosisFinding(kind, lines=(site.part.path[-1],), layers=found))


def _describe_arguments(names: Sequence[str], present: Present) -> Told:
    """Describes arguments that make the step useless."""
    remedy = "Correct the data, or gate the state that a skipped step has changed."
    if not present.has_scaler:
        remedy = "Correct the data; if they are state, diagnose the step that has made them infinite or NaN."
    text = (
        f"Infinities or NaN in {enumerate_names(names)} reach the loss or a gradient: with zeros in their place, the "
        f"loss and the gradients are finite. {remedy}"
    )
    return Told(text, DiagnosisFinding(FindingKind.NOT_FINITE, tuple(names)))
