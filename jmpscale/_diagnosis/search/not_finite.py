"""Finds what makes a step infinite or NaN, in float32 too, by running the step without it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jmpscale._base.tree import is_inexact
from jmpscale._diagnosis.run.errors import measure
from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import REPAIR, Mode, Modes, Site
from jmpscale._diagnosis.search.causes import Groups
from jmpscale._diagnosis.search.smallest_set import smallest_set
from jmpscale._diagnosis.thresholds import MOST_NAMED
from jmpscale._diagnosis.trace.operations import Path
from jmpscale._programs.jaxpr import Key
from jmpscale._programs.source import SCALING


class RepairTrials:
    """A step in float32 without some of its infinities and NaN."""

    def __init__(self, program: ModalProgram) -> None:
        self._program = program

    def _severity(self, modes: Modes, consts: list[Any] | None = None) -> float:
        """Returns the `severity` of the loss and the gradients."""
        outputs, _ = self._program.run(1.0, modes, Mode.FLOAT32, consts)
        return measure(outputs, outputs).severity.max()

    def is_finite_with_finite_arguments(self) -> bool:
        """Tests whether a step is finite with zeros in place of the infinities and NaN of its arguments."""
        consts = self._program.consts
        return not self._severity({}, [jnp.nan_to_num(x, posinf=0, neginf=0) if is_inexact(x) else x for x in consts])

    def keys(self, site: Site) -> list[Key]:
        """Returns what identifies the operations of a site."""
        return self._program.keys(site)

    def origins(self, site: Site, groups: Groups) -> list[int]:
        """Returns the few groups of operations of a site that must be repaired; none if all must, or more."""

        def is_finite(repaired: Sequence[int]) -> bool:
            chosen = {i for number in repaired for i in groups[number]}
            count = sum(map(len, groups))
            modes = tuple(Mode.REPAIRED if i in chosen else Mode.FLOAT32 for i in range(count))
            return not self._severity({site: modes})

        found = smallest_set(range(len(groups)), is_finite) or []
        return sorted(found) if len(found) <= min(MOST_NAMED, len(groups) - 1) else []

    def origin(self) -> Site | None:
        """Returns the first operation whose infinities or NaN reach the outputs; None if it was not entered."""
        _, records = self._program.run(1.0, {}, Mode.FLOAT32)
        for column in range(REPAIR.columns):
            made = [site for site, is_made in records.items() if is_made[column]]
            if found := self._first_origin(made):
                return found
        return None

    def _first_origin(self, made: list[Site]) -> Site | None:
        """Returns the first operation such that the outputs are finite, or free of NaN, if its line is repaired."""
        # Unscaling comes last, and has the line of scaling, which comes first.
        paths = sorted(dict.fromkeys(site.part.path for site in made), key=lambda path: path[-1] == SCALING)

        @functools.cache
        def severity(repaired: tuple[Path, ...]) -> float:
            return self._severity({x: Mode.REPAIRED for x in self._program.sites if x.part.path in repaired})

        smallest = smallest_set(paths, lambda repaired: not severity(tuple(repaired)))
        if smallest is None:
            return None
        # If no line is enough, an infinity and a NaN may have different lines. The NaN hides the infinity.
        alone = [severity((path,)) for path in paths]
        first = paths[alone.index(min(alone))] if min(alone) < 2 else smallest[0]
        return next(site for site in made if site.part.path == first)
