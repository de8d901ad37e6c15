"""The forms of a training step that trials run: as it is written, and with modes."""

import functools
from collections.abc import Callable
from typing import Any

from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import CONSTANTS, PRECISION, RECORD, REPAIR, Modal
from jmpscale._diagnosis.trace.operations import Operation, program_operations
from jmpscale._diagnosis.trace.program import Program, compile_as_written


class Forms:
    """The forms of a program that trials run, each compiled once if it is used."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @functools.cached_property
    def as_written(self) -> Callable[[float], list[Any]]:
        """A function that returns the loss and the gradients; it has no modes, and compiles and runs fastest."""
        return compile_as_written(self.program.of_gradients())

    @functools.cached_property
    def precision(self) -> ModalProgram:
        return self._form(PRECISION)

    @functools.cached_property
    def precision_of_gradients(self) -> ModalProgram:
        return self.precision.of_gradients()

    @functools.cached_property
    def recording(self) -> ModalProgram:
        """A separate program, because the other runs need no statistics, which can take most of the time of a run."""
        return self._form(RECORD)

    @functools.cached_property
    def constants(self) -> ModalProgram:
        """A program whose constants in half precision can have other last digits."""
        return self._form(CONSTANTS)

    @functools.cached_property
    def repair(self) -> ModalProgram:
        """A program whose infinities and NaN can be replaced by zeros."""
        return self._form(REPAIR)

    @functools.cached_property
    def _operations(self) -> list[Operation]:
        return program_operations(self.program.jaxpr, self.program.measured_outputs)

    def _form(self, modal: Modal) -> ModalProgram:
        return ModalProgram(self.program, self._operations, modal)
