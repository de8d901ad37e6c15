"""Finds which layers are at fault, if several of them run the same line."""

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jmpscale._diagnosis.run.modes import Part, Site
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.causes import Cause, find_wrong_groups
from jmpscale._diagnosis.search.lines import Lines
from jmpscale._diagnosis.search.repair import Repair
from jmpscale._diagnosis.trace.layers import Place, find_places, first_name, without_common
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._programs.source import is_installed


class LayerName(enum.Enum):
    """What names a layer: the values are the words before its name."""

    SCOPE = "in"  # the scopes of its operations
    ARGUMENT = "in the layer of"  # an argument that its operations read
    ARGUMENT_BEFORE = "computed from"  # the argument that is read last before them


class WrongLayers(NamedTuple):
    """The layers in which operations of a line are wrong, of several that run the line."""

    site: Site
    names: tuple[str, ...]  # such as `Model/Block_7` or `params['layers'][7]['w']`
    kind: LayerName


Layers = Mapping[Part, WrongLayers]
NO_LAYERS: Layers = MappingProxyType({})


def find_layers(step: TracedStep, trials: GradientTrials, repair: Repair | None) -> Layers:
    """Finds the layers at fault for the lines in which an error begins."""
    if repair is None or repair.lines is None:
        return NO_LAYERS
    several = {part: x for part, x in repair.causes.items() if _may_name(trials, x.site)}
    places = find_places(step.program, step.gradients) if several else {}
    lines, found = repair.lines, {}
    for part, cause in several.items():
        own = [places[key] for key in trials.program.keys(cause.site)]
        if layers := _find(trials, cause, lines, _names(own, step.gradients)):
            found[part] = layers
    return found


def _may_name(trials: GradientTrials, site: Site) -> bool:
    """Tests whether a layer says more than the line: of a line in a library, it is the module of the user."""
    return len(trials.program.keys(site)) > 1 or is_installed(site.part.path[-1])


def _find(
    trials: GradientTrials, cause: Cause, lines: Lines, names: Sequence[tuple[LayerName, list[str]]]
) -> WrongLayers | None:
    """Finds the layers that are wrong alone, by the first kind of names that distinguishes them."""
    for kind, of_operations in names:
        layers = list(dict.fromkeys(of_operations))
        if len(layers) == 1:
            wrong = layers if is_installed(cause.site.part.path[-1]) else []
        else:
            groups = [[i for i, x in enumerate(of_operations) if x == layer] for layer in layers]
            wrong = [layers[i] for i in find_wrong_groups(trials, cause, lines, groups)]
        if wrong and all(wrong) and (2 * len(wrong) <= len(layers) or len(layers) == 1):
            return WrongLayers(cause.site, tuple(wrong), kind)
    return None


def _names(places: Sequence[Place], gradients: Sequence[str]) -> list[tuple[LayerName, list[str]]]:
    """Returns names of the layers of some operations, the finest division into layers first."""
    scopes = [x.scope for x in places]
    read = [first_name(x, gradients) for x in without_common([x.read for x in places])]
    before = [first_name(x, gradients) for x in without_common([x.before for x in places])]
    read_or_before = [x or y for x, y in zip(read, before, strict=True)]
    certain = [(LayerName.SCOPE, scopes), (LayerName.ARGUMENT, read)]
    certain.sort(key=lambda names: len(set(names[1])), reverse=True)
    return [*certain, (LayerName.ARGUMENT_BEFORE, read_or_before)]
