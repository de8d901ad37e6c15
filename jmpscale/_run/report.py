"""The result of a diagnosis of a run: the losses, the changes of the state, and what is wrong."""

import dataclasses

import numpy as np

from jmpscale._diagnosis.tell.report import Diagnosis, DiagnosisFinding


@dataclasses.dataclass(frozen=True)
class RunChange:
    """The net change of a leaf of the state in a run; created by `diagnose_run`.

    Attributes:
      name: the leaf, such as `params['w']`.
      dtype: the name of its dtype.
      error: the L2 norm of the difference between its change and its change in float32, relative to the norm of the
        change in float32. It includes the rounding of the final value.
      progress: how far it gets along its change in float32: 1 if as far, 0 if it does not move.
      spread: `error` of the float32 run from a state that is rounded otherwise.
    """

    name: str
    dtype: str
    error: float
    progress: float
    spread: float


@dataclasses.dataclass(frozen=True, eq=False)
class RunDiagnosis:
    """What half precision does to a training run; created by `diagnose_run`.

    Attributes:
      loss: the loss of each step as written, `f64[steps]`; None if the step returns none. It is the result that
        `diagnose_step` takes for the loss.
      loss_float32: the loss of the same steps in float32.
      loss_spread: the loss of the same steps in float32 from a state that is rounded otherwise. How far it is from
        `loss_float32` shows which differences are chance.
      loss_name: the result that is the loss, such as `result[2]`; None if the step returns none.
      progress: the decrease of the loss, relative to the decrease in float32; None if float32 makes no clear progress.
      changes: a `RunChange` for each leaf of the state that holds real numbers, scalers excepted.
      skips: the number of steps that the scalers of the state skip.
      skips_float32: their number in float32.
      state: the arguments, or parts of them, that the step returns as its state.
      findings: a `DiagnosisFinding` for each thing that is wrong; `()` if the run does what float32 does.
      worst_step: the index of the step whose changes differ most from the changes that the step makes in float32 from
        the same state; None if all steps were skipped.
      diagnosis: the `Diagnosis` of `diagnose_step` for this step; None if there are no findings.
      as_written: the operations in half precision that run as written in float32, too, such as kernels.
      summary: the result in a few sentences.
    """

    loss: np.ndarray | None
    loss_float32: np.ndarray | None
    loss_spread: np.ndarray | None
    loss_name: str | None
    progress: float | None
    changes: tuple[RunChange, ...]
    skips: int
    skips_float32: int
    state: tuple[str, ...]
    findings: tuple[DiagnosisFinding, ...]
    worst_step: int | None
    diagnosis: Diagnosis | None
    as_written: tuple[str, ...]
    summary: str
