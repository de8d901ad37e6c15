"""The sentences of a diagnosis of a run."""

from collections.abc import Sequence

import numpy as np

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._diagnosis.tell.report import DiagnosisFinding, FindingKind
from jmpscale._run.run import Measured
from jmpscale._run.verdict import Losses, not_finite_at_end

_STEADY = 0.005  # a difference from all, and from nothing, that is not told


def summarize(
    measured: Measured, losses: Losses | None, findings: Sequence[DiagnosisFinding], diagnosis: str | None
) -> str:
    """Returns the summary of a run; `diagnosis` is the summary of its worst step, if there is one."""
    sentences = [_describe_loss(measured, losses, findings)]
    progress = {x.leaf.name: x.written.progress for x in measured.leaves}
    for x in findings:
        if x.kind is FindingKind.LAGGING:
            sentences.append(_describe_change(x.names, progress[x.names[0]]))
        elif x.kind is FindingKind.NOT_FINITE and (names := [name for name in x.names if name in progress]):
            sentences.append(f"In float32, {_describe_names(names)} would be finite.")
    skips, skips_float32 = measured.skips
    if skips or skips_float32:
        noun = "step is" if skips == 1 else "steps are"
        sentences.append(f"{skips} {noun} skipped, {skips_float32} in float32.")
    if measured.traced.constant:
        constant = enumerate_names(measured.traced.constant)
        sentences.append(f"The step does not return {constant}, which keeps its value.")
    if measured.as_written:
        sentences.append(f"In float32, too, these run as written: {enumerate_names(measured.as_written)}.")
    if diagnosis and measured.worst:
        sentences.append(f"At step {measured.worst.step}: {diagnosis}")
    return " ".join(sentences)


def _describe_loss(measured: Measured, losses: Losses | None, findings: Sequence[DiagnosisFinding]) -> str:
    steps = f"{measured.steps} {'step' if measured.steps == 1 else 'steps'}"
    if not measured.traced.loss:
        return f"In {steps}, the run {_describe_state(findings)}; the step returns no loss."
    if losses is None:
        return _describe_not_finite(measured, steps)
    written, float32, otherwise = (f"{x:.4g}" for x in losses.ends)
    spread = f"{otherwise} from a start that is rounded otherwise"
    if losses.progress is None:
        text = (
            f"In {steps} the loss makes no clear progress in float32, from {losses.start:.4g} to {float32} ({spread})"
        )
        more = f" is {format_percentage(losses.error)} larger," if losses.is_wrong else ""
        return f"{text}; as written it{more} ends at {written}."
    share = f"half precision makes {_describe_share(losses.progress)} of the progress"
    return f"In {steps} the loss falls to {written}, in float32 to {float32} ({spread}): {share}."


def _describe_state(findings: Sequence[DiagnosisFinding]) -> str:
    return "does not change its state as float32 does" if findings else "changes its state as float32 does"


def _describe_not_finite(measured: Measured, steps: str) -> str:
    which = not_finite_at_end(measured.losses)
    first = int(np.argmin(np.isfinite(measured.losses[which[-1]])))
    if which != [0]:
        return f"In {steps} the loss becomes infinite or NaN in float32, too, at step {first}: the run shows nothing."
    last = measured.losses[1, -1]
    return f"In {steps} the loss becomes infinite or NaN, at step {first}; in float32 it ends at {last:.4g}."


def _describe_share(share: float) -> str:
    if share > 1 - _STEADY:
        return "all"
    return "none" if share < _STEADY else format_percentage(share)


def _describe_names(names: Sequence[str]) -> str:
    first, *others = names
    noun = "leaf" if len(others) == 1 else "leaves"
    return f"{first} (and {len(others)} other {noun})" if others else first


def _describe_change(names: Sequence[str], progress: float) -> str:
    verb, does = ("moves", "does") if len(names) == 1 else ("move", "do")
    which = _describe_names(names)
    if abs(progress) < _STEADY:
        return f"{which} {does} not move."
    return f"{which} {verb} {format_percentage(progress)} as far." if progress > 0 else f"{which} {verb} another way."
