"""Finds what makes a step infinite or NaN, in float32 too, by running the step without it."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from jmpscale._base.source import SCALING
from jmpscale._base.tree import PyTree, is_inexact, named_leaves
from jmpscale._diagnosis.errors import measure
from jmpscale._diagnosis.lines import smallest_set
from jmpscale._diagnosis.modal_step import ModalStep
from jmpscale._diagnosis.modes import REPAIR, Mode, Site
from jmpscale._diagnosis.step import Step


class RepairedStep:
    """A step in float32 without some of its infinities and NaN."""

    def __init__(self, step: Step) -> None:
        self._step = ModalStep(step, REPAIR)

    def _severity(self, modes: dict[Site, Mode], consts: list[Any] | None = None) -> float:
        """Returns the `severity` of the loss and the gradients."""
        outputs, _ = self._step.run(1.0, modes, Mode.FLOAT32, consts)
        return measure(outputs, outputs).severity.max()

    def is_finite_with_finite_arguments(self) -> bool:
        """Tests whether a step is finite with zeros in place of the infinities and NaN of its arguments."""
        consts = self._step.consts
        return not self._severity({}, [jnp.nan_to_num(x, posinf=0, neginf=0) if is_inexact(x) else x for x in consts])

    def origin(self) -> Site | None:
        """Returns the first operation whose infinities or NaN reach the outputs; None if it was not entered."""
        _, records = self._step.run(1.0, {}, Mode.FLOAT32)
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
        def severity(chosen: tuple[int, ...]) -> float:
            repaired = [paths[i] for i in chosen]
            return self._severity({x: Mode.REPAIRED for x in self._step.sites if x.part.path in repaired})

        def fits(chosen: Iterable[int]) -> bool:
            return not severity(tuple(chosen))

        if not fits(range(len(paths))):
            return None
        # If no line is enough, an infinity and a NaN may have different lines. The NaN hides the infinity.
        alone = [severity((i,)) for i in range(len(paths))]
        first = alone.index(min(alone)) if min(alone) < 2 else smallest_set(len(paths), fits)[0]
        return next(site for site in made if site.part.path == paths[first])


def named_arguments(
    fun: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[tuple[str, Any]]:
    """Returns the leaves of the arguments of a call with their names, such as `batch['image']`."""
    try:
        named = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # fun has no signature, or the call does not match it
        named = {f"args[{i}]": arg for i, arg in enumerate(args)} | kwargs
    return [(name + path, leaf) for name, tree in named.items() for path, leaf in named_leaves(tree)]


def non_finite(arguments: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns the names of the arguments with infinities or NaN."""
    return [name for name, leaf in arguments if is_inexact(leaf) and not bool(jnp.isfinite(leaf).all())]
