"""The sentences about a step that is infinite or NaN in float32, too."""

from collections.abc import Collection, Sequence

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.arguments import non_finite
from jmpscale._diagnosis.run.modes import Site
from jmpscale._diagnosis.run.not_finite import RepairTrials
from jmpscale._diagnosis.search.findings import Findings


def describe_not_finite(findings: Findings, trials: RepairTrials) -> str:
    """Describes what makes a step infinite or NaN."""
    if trials.is_finite_with_finite_arguments() and (names := non_finite(findings.step.arguments)):
        return _describe_arguments(names)
    return _describe_origin(trials.origin(), findings.not_entered)


def _describe_arguments(names: Sequence[str]) -> str:
    """Describes arguments that make the step useless."""
    return (
        f"Infinities or NaN in {enumerate_names(names)} reach the loss or a gradient: with zeros in their place, the "
        "loss and the gradients are finite. Correct the data, or gate the state that a skipped step has changed."
    )


def _describe_origin(site: Site | None, not_entered: Collection[str]) -> str:
    """Describes a step that is not finite in float32, given the names of the operations that were not entered."""
    where = f"{site.operation} at {site.part.path[-1]}" if site else "an operation that was not entered"
    if site is None or where in not_entered:
        return (
            f"The result of {where} is not finite, and reaches the loss or a gradient. Whether it is finite in float32 "
            "was not measured: give this operation operands in float32, and diagnose again."
        )
    return (
        f"The result of {where} is not finite in the float32 run either, and reaches the loss or a gradient. No loss "
        "scale helps: correct this line. Common causes are invalid data; a softmax over a row that is masked "
        "everywhere, which needs a finite mask or where=; a derivative such as the derivative of a norm at zero; and a "
        "constant, such as 1e-8 or -1e9, that is zero or infinite in float16."
    )
