"""Phrases that several sentences of a summary have."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from jmpscale._base.text import enumerate_names, format_percentage
from jmpscale._diagnosis.examined import Examined
from jmpscale._diagnosis.run.fitting_scales import Errors, largest
from jmpscale._diagnosis.run.modes import Part
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.program import Result
from jmpscale._programs.source import is_installed


def size(fraction: float) -> str:
    return format_percentage(fraction).replace(">", "more than ")


def by(fraction: float) -> str:
    return f"by {size(fraction)}"


def by_gradient(examined: Examined, errors: Errors | None) -> str:
    """Returns the largest error, with the gradient that has it, and its part of the norm if the error is not small.

    A slice along the first axis of a gradient is named only if its error is not small.
    """
    if errors is None or not len(errors):
        return by(math.inf if errors is None else 0.0)
    errors = named_errors(examined, errors)
    name, text = name_of_worst(examined, errors), by(largest(errors))
    if not name:
        return text
    if largest(errors) < examined.trials.accepted.small or len(errors) == 1:
        return f"{text}, in {name}"
    norms = np.where(examined.trials.is_compared, examined.trials.measured.norms[1:], 0.0)
    share = float(norms[np.argmax(errors)] / np.linalg.norm(norms[: len(examined.step.gradients)]))
    return f"{text}, in {name}, which has {format_percentage(share)} of their norm"


def named_errors(examined: Examined, errors: Errors) -> Errors:
    """Returns the errors of the gradients alone if the errors of their slices are small, too."""
    return errors[: len(examined.step.gradients)] if largest(errors) < examined.trials.accepted.small else errors


def name_of_worst(examined: Examined, errors: Errors) -> str:
    """Returns the name of the gradient with the largest error; empty if there is none, or the error is infinite."""
    return examined.trials.names[int(np.argmax(errors))] if 0 < largest(errors) < math.inf else ""


def describe_alone(examined: Examined, part: Part, error: float) -> str:
    """Names a line with its error alone."""
    which = "backward" if part.backward else "forward"
    makes = f"makes an error of {size(error)}" if math.isfinite(error) else "makes values that are not finite"
    return f" Alone, the {which} pass of {examined.name(part.path)} {makes}"


def describe_layers(examined: Examined, part: Part) -> str:
    """Names the layers in which a line is wrong, as in `in Model/Block_7`; empty if they are not known."""
    return examined.layers[part].describe() if part in examined.layers else ""


def describe_leaves(leaves: Sequence[Result]) -> str:
    """Names the first of some leaves of the state, counts the others, and names other parts of the state with them."""
    first, *others = leaves
    if not others:
        return first.name
    noun = "leaf" if len(others) == 1 else "leaves"
    parts = [part for part in dict.fromkeys(x.part for x in others) if part not in ("", first.part)]
    also = f", also of {enumerate_names(parts)}" if parts else ""
    return f"{first.name} (and {len(others)} other {noun}{also})"


def describe_edit(examined: Examined, paths: Collection[Path]) -> str:
    """Says how a user computes a line in float32, if autocast converts a matmul there."""
    own = [path for path in paths if not is_installed(path[-1])]
    is_converted = own and not examined.trials.program.autocast_paths.isdisjoint(paths)
    return ', with precision="highest" where autocast converts a matmul' if is_converted else ""
