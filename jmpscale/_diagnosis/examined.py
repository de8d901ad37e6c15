"""What a diagnosis has measured of a training step, from which it is written."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jmpscale._base.text import enumerate_names
from jmpscale._diagnosis.run.fitting_scales import Errors, Scales
from jmpscale._diagnosis.run.modes import Part, Site, Statistics
from jmpscale._diagnosis.run.trials import GradientTrials
from jmpscale._diagnosis.search.advice import Advice
from jmpscale._diagnosis.search.draws import CoarseChoice
from jmpscale._diagnosis.search.fit import Fit, Present
from jmpscale._diagnosis.search.inputs import CoarseInput
from jmpscale._diagnosis.search.integers import WrongIndices
from jmpscale._diagnosis.search.layers import NO_LAYERS, Layers
from jmpscale._diagnosis.search.lines import Suspects
from jmpscale._diagnosis.search.repair import Repair
from jmpscale._diagnosis.search.update import Update
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._diagnosis.trace.traced_step import TracedStep


class SensitiveLoss(NamedTuple):
    """A loss that differs from float32, but not by more than rounding of its arguments can change it.

    Errors are relative.
    """

    error: float  # as written
    error_of_arguments: float  # in float32, with only the arguments rounded


class Examined(NamedTuple):
    """What was measured of a step that is finite in float32."""

    step: TracedStep
    trials: GradientTrials
    fit: Fit
    repair: Repair | None  # if lines must compute in float32
    alone: Mapping[Part, float] = MappingProxyType({})  # the errors of the parts that were tried alone
    suspects: Suspects | None = None  # of a moderate error
    advice: Advice | None = None  # the scaler that helps the program as it is, if the present one should change
    advice_then: Advice | None = None  # the scaler that is right once lines compute in float32, if not the present one
    factors: Scales | None = None  # of a loss without a scaler, if another number would make the gradients right
    changes_of_reference: Errors | None = None  # with the loss scale, if it changes
    sensitive_loss: SensitiveLoss | None = None
    update: Update = Update()
    wrong_indices: WrongIndices | None = None
    coarse_inputs: tuple[CoarseInput, ...] = ()
    coarse_choices: tuple[CoarseChoice, ...] = ()
    layers: Layers = NO_LAYERS  # at fault
    others: tuple["Examined", ...] = ()  # of a step with several scalers: the gradients of the others

    @property
    def present(self) -> Present:
        return self.fit.present

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients; of several scalers, those that belong to this one."""
        return self.names_of_gradients(self.trials.is_compared[: len(self.step.gradients)])

    @property
    def is_accurate(self) -> bool:
        """Whether a scale fits, the loss is right, and the range of the dtype does not make the gradients worse."""
        return self.fit.is_right and self.repair is None and self.factors is None

    @property
    def scale_of_rows(self) -> float:
        """The scale at which rows are measured."""
        return scale_of_rows(self.fit, self.repair)

    @property
    def statistics(self) -> Mapping[Site, Statistics]:
        return self.trials.statistics(self.scale_of_rows)

    @property
    def not_entered(self) -> list[str]:
        """The operations on whose results in half precision the comparison depends."""
        return self.trials.names_not_entered

    @property
    def chosen(self) -> list[Path]:
        """The lines that must compute in float32."""
        found = [x.repair.lines.paths for x in (self, *self.others) if x.repair and x.repair.lines]
        unchanged = self.update.unchanged.paths if self.update.unchanged else ()
        stalled = [path for x in self.update.stalled for path in x.paths]
        indices = self.wrong_indices.paths if self.wrong_indices else ()
        chosen = {*itertools.chain(*found), *indices, *self.update.paths, *unchanged, *stalled}
        return [path for path in self.paths if path in chosen]

    @property
    def paths(self) -> list[Path]:
        """All lines with results, or constants, in half precision."""
        return list(dict.fromkeys([*self.trials.all_paths, *self.update.all_paths]))

    def name(self, path: Path, named: Collection[Path] = ()) -> str:
        """Returns the name of a line, with a line that calls it if another call of it is not named."""
        others = [other for other in self.paths if other[-1] == path[-1] and other not in (path, *named)]
        calls = (n for n in range(2, len(path) + 1) if all(other[-n:] != path[-n:] for other in others))
        first = next(calls, 1) if others else 1
        if first == 1:
            return path[-1]
        caller = path[-first].partition(" ")[0]
        return f"{path[-1].removesuffix(')')}, called at {caller})"

    def each_name(self, paths: Collection[Path]) -> tuple[str, ...]:
        """Returns the names of lines."""
        return tuple(dict.fromkeys(self.name(path, paths) for path in paths))

    def names_of_gradients(self, chosen: Iterable[bool]) -> tuple[str, ...]:
        """Returns the names of the chosen gradients and slices, each once: a parameter may have several gradients."""
        return tuple(dict.fromkeys(itertools.compress(self.trials.names, chosen)))

    def names_of_layers(self, part: Part) -> tuple[str, ...]:
        """Returns the names of the layers in which a line is wrong, of several that run it."""
        return self.layers[part].names if part in self.layers else ()

    def names(self, paths: Collection[Path]) -> str:
        """Returns the names of lines, as in `a, b and c`."""
        return enumerate_names(self.each_name(paths), limit=12)


def scale_of_rows(fit: Fit, repair: Repair | None) -> float:
    """Returns the scale at which rows are measured: the present one, or one that fits if lines compute in float32."""
    lines = repair.lines if repair else None
    exponent = lines.exponent if lines and lines.paths else fit.present.exponent
    return fit.present.scale if exponent == fit.present.exponent else 2.0**exponent
