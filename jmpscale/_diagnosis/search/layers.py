"""Finds which layers are at fault, if several of them run the same line."""

import collections
import enum
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.run.modes import Mode, Part, Site
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.causes import Cause, Groups, few, find_wrong_groups
from jmpscale._diagnosis.search.fit import Fit
from jmpscale._diagnosis.search.lines import Lines, Suspects
from jmpscale._diagnosis.search.not_finite import RepairTrials
from jmpscale._diagnosis.search.repair import Repair
from jmpscale._diagnosis.thresholds import SAME_SIZE
from jmpscale._diagnosis.trace.layers import Place, find_places, first_name, without_common
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.traced_step import TracedStep
from jmpscale._programs.jaxpr import Key
from jmpscale._programs.source import is_installed


class LayerName(enum.Enum):
    """What names a layer; the values are the words before the name."""

    SCOPE = "in"  # the scopes of its operations
    ARGUMENT = "in the layer of"  # an argument that its operations read
    ARGUMENT_BEFORE = "computed from"  # the argument that is read last before them


class WrongLayers(NamedTuple):
    """The layers in which operations of a line are wrong, of several that run the line."""

    names: tuple[str, ...]  # such as `Model/Block_7` or `params['layers'][7]['w']`
    kind: LayerName

    def describe(self) -> str:
        """Returns the names after the words that belong to them."""
        return f"{self.kind.value} {enumerate_names(self.names)}"


Layers = Mapping[Part, WrongLayers]
NO_LAYERS: Layers = MappingProxyType({})


def find_layers(
    step: TracedStep, trials: GradientTrials, fit: Fit, repair: Repair | None, suspects: Suspects | None
) -> Layers:
    """Finds the layers at fault in the lines where an error begins, or in the worst line of a moderate error."""
    searches: dict[Part, _Search] = {}
    if repair and repair.lines:
        searches = {part: _of_cause(trials, x, repair.lines) for part, x in repair.causes.items()}
    elif suspects and fit.exponent is not None:
        searches = {suspects.part: _of_suspects(trials, suspects, fit.exponent)}
    several = {part: x for part, x in searches.items() if x.may_find}
    places = find_places(step.program, step.gradients) if several else {}
    found = {part: x.find(_names([places[key] for key in x.keys], step.gradients)) for part, x in several.items()}
    return {part: layers for part, layers in found.items() if layers}


def find_layers_not_finite(step: TracedStep, repair: RepairTrials, site: Site) -> WrongLayers | None:
    """Finds the layers in which operations make infinities or NaN, in float32 too."""
    keys = repair.keys(site)
    search = _Search(site.part.path, keys, lambda groups: repair.origins(site, groups))
    if not search.may_find:
        return None
    places = find_places(step.program, step.gradients)
    return search.find(_names([places[key] for key in keys], step.gradients))


class _Search(NamedTuple):
    """A search for layers of which each one is wrong alone."""

    path: Path
    keys: list[Key]  # of the operations of a line
    find_wrong: Callable[[Groups], list[int]]  # returns which groups of these operations are wrong alone, if few are

    @property
    def may_find(self) -> bool:
        """Whether a layer says more than the line."""
        return len(self.keys) > 1 or is_installed(self.path[-1])

    def find(self, names: Sequence[tuple[LayerName, list[str]]]) -> WrongLayers | None:
        """Finds the layers by the first kind of names that distinguishes them."""
        divisions = [(kind, x) for kind, x in names if len(set(x)) > 1]
        if not divisions and is_installed(self.path[-1]):  # it says whose layer of a library it is
            return next((WrongLayers((x[0],), kind) for kind, x in names if x[0]), None)
        for kind, of_operations in divisions:
            layers = list(dict.fromkeys(of_operations))
            groups = [[i for i, x in enumerate(of_operations) if x == layer] for layer in layers]
            wrong = [layers[i] for i in self.find_wrong(groups)]
            if wrong and all(wrong) and 2 * len(wrong) <= len(layers):
                return WrongLayers(tuple(wrong), kind)
        return None


def _of_cause(trials: GradientTrials, cause: Cause, lines: Lines) -> _Search:
    def find_wrong(groups: Groups) -> list[int]:
        return find_wrong_groups(trials, cause, lines, groups)

    return _Search(cause.site.part.path, trials.program.keys(cause.site), find_wrong)


def _of_suspects(trials: GradientTrials, suspects: Suspects, exponent: int) -> _Search:
    """Returns a search for the layers that make most of the error that a line has alone."""
    sites = [site for site in trials.program.sites if site.part == suspects.part]
    keys = [key for site in sites for key in trials.program.keys(site)]

    def is_large(chosen: Collection[int]) -> bool:
        modes = iter([Mode.AS_WRITTEN if i in chosen else Mode.FLOAT32 for i in range(len(keys))])
        of_sites = {site: tuple(itertools.islice(modes, len(trials.program.keys(site)))) for site in sites}
        return trials.error(of_sites, Mode.FLOAT32, exponent) > suspects.alone / SAME_SIZE

    def find_wrong(groups: Groups) -> list[int]:
        def operations(chosen: Collection[int]) -> set[int]:
            return {i for number in chosen for i in groups[number]}

        found = few(len(groups), lambda chosen: is_large(operations(chosen)))
        return found if found and not is_large(operations(set(range(len(groups))).difference(found))) else []

    return _Search(suspects.part.path, keys, find_wrong)


def _names(places: Sequence[Place], gradients: Sequence[str]) -> list[tuple[LayerName, list[str]]]:
    """Returns names of the layers of some operations, the finest division into layers first."""
    scopes = _without_common_end([x.scopes for x in places])
    read = [first_name(x, gradients) for x in without_common([x.read for x in places])]
    before = [first_name(x, gradients) for x in without_common([x.before for x in places])]
    read_or_before = [x or y for x, y in zip(read, before, strict=True)]
    names = [(LayerName.SCOPE, scopes)]
    # In a line that runs once, two arguments are not of two layers.
    calls = max(collections.Counter(x.code for x in places).values())
    if calls > 1 or len(places) == 1:
        names.append((LayerName.ARGUMENT, read))
    names.sort(key=lambda names: len(set(names[1])), reverse=True)
    return [*names, (LayerName.ARGUMENT_BEFORE, read_or_before)] if calls >= len(set(read_or_before)) else names


def _without_common_end(scopes: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the paths of scopes, without the last scopes as long as they have the same name for all operations."""
    found = list(scopes)
    while len(set(found)) > 1 and all(found) and len({x[-1] for x in found}) == 1:
        found = [x[:-1] for x in found]
    return ["/".join(x) for x in found]
