"""The forms of a program that trials run: as it is written, and with modes."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._diagnosis.run.modal_program import ModalProgram
from jmpscale._diagnosis.run.modes import CONSTANTS, PRECISION, RECORD, REPAIR, Modal, counting, factors, sampling
from jmpscale._diagnosis.run.scaler_group import LossScales
from jmpscale._diagnosis.trace.operations import Operation, operations_of_loss, program_operations
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs.compile import compiled_jaxpr
from jmpscale._programs.jaxpr import Key


class Forms:
    """The forms of a program, each compiled once if it is used."""

    def __init__(self, program: Program, measured: int = 0) -> None:
        """`measured` is the number of the first outputs that are the loss and the gradients."""
        self.program = program
        self.measured = measured

    def run_as_written(self, scale: LossScales) -> list[Any]:
        """Returns the outputs at a loss scale; this form has no modes, and compiles and runs fastest."""
        return list(map(on_device, self._as_written(self.program.consts, np.asarray(scale, np.float32))))

    @functools.cached_property
    def _as_written(self) -> Any:
        return compiled_jaxpr(self.program.jaxpr)

    @functools.cached_property
    def precision(self) -> ModalProgram:
        return self._form(PRECISION)

    @functools.cached_property
    def factors(self) -> ModalProgram:
        """A program whose cotangents can be rounded as if the loss were multiplied by a power of two."""
        return self._form(factors(operations_of_loss(self.program.jaxpr)))

    @functools.cached_property
    def recording(self) -> ModalProgram:
        """A separate program, because the other runs need no statistics, which can take most of the time of a run."""
        return self._form(RECORD)

    @functools.cached_property
    def constants(self) -> ModalProgram:
        """A program whose constants near 1 in half precision can have other last digits."""
        return self._form(CONSTANTS)

    @functools.cached_property
    def repair(self) -> ModalProgram:
        """A program whose infinities and NaN can be replaced by zeros."""
        return self._form(REPAIR)

    def counting(self, dtypes: Mapping[tuple[str, str], np.dtype]) -> ModalProgram:
        """Returns a program that records how rare the results of some comparisons are."""
        return self._form(counting(dtypes))

    def sampling(self, conversions: Collection[Key]) -> ModalProgram:
        """Returns a program like `precision` that records a sample of the integers of some conversions."""
        return self._form(sampling(conversions))

    @functools.cached_property
    def _operations(self) -> list[Operation]:
        return program_operations(self.program.jaxpr, self.measured)

    def _form(self, modal: Modal) -> ModalProgram:
        return ModalProgram(self.program, self.measured, self._operations, modal)
