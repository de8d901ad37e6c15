"""Dynamic loss scaling, as in PyTorch's GradScaler, autocast, and a diagnosis of half precision."""

from importlib.metadata import version as _version

from jmpscale._algorithm.finite import all_finite
from jmpscale._algorithm.gate import apply_if, select_tree
from jmpscale._algorithm.grad import value_and_grad
from jmpscale._algorithm.master_params import with_master_params
from jmpscale._algorithm.optax import LossScalingTransformation, with_loss_scaling
from jmpscale._algorithm.optax_step import optax_step
from jmpscale._algorithm.scaled_backward import scaled_backward
from jmpscale._algorithm.scaling import scale, unscale, unscale_and_check
from jmpscale._algorithm.update import update
from jmpscale._autocast.api import autocast
from jmpscale._cast import cast
from jmpscale._diagnosis.diagnose import diagnose
from jmpscale._diagnosis.diagnose_step import diagnose_step
from jmpscale._diagnosis.tell.report import Diagnosis, DiagnosisChange, DiagnosisFinding, DiagnosisRow, FindingKind
from jmpscale._get_scaler import get_scaler, replace_scaler
from jmpscale._monitoring.grad_report import GradReport, grad_report
from jmpscale._monitoring.metrics import metrics
from jmpscale._monitoring.run_monitor import RunMonitor
from jmpscale._programs.in_float32 import in_float32
from jmpscale._run.diagnose_run import diagnose_run
from jmpscale._run.report import RunChange, RunDiagnosis
from jmpscale._state import ScalerConfig, ScalerState, SkipReason, WithLossScalingState, disabled, dynamic, static
from jmpscale._torch_state_dict import from_torch_state_dict, to_torch_state_dict

__all__ = [
    "Diagnosis",
    "DiagnosisChange",
    "DiagnosisFinding",
    "DiagnosisRow",
    "FindingKind",
    "GradReport",
    "LossScalingTransformation",
    "RunChange",
    "RunDiagnosis",
    "RunMonitor",
    "ScalerConfig",
    "ScalerState",
    "SkipReason",
    "WithLossScalingState",
    "all_finite",
    "apply_if",
    "autocast",
    "cast",
    "diagnose",
    "diagnose_run",
    "diagnose_step",
    "disabled",
    "dynamic",
    "from_torch_state_dict",
    "get_scaler",
    "grad_report",
    "in_float32",
    "metrics",
    "optax_step",
    "replace_scaler",
    "scale",
    "scaled_backward",
    "select_tree",
    "static",
    "to_torch_state_dict",
    "unscale",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
    "with_master_params",
]

__version__ = _version("jmpscale")
