"""Loss scaling for JAX: exact, jitted, the same on every device."""

from importlib.metadata import version as _version

from jmpscale._exchange import from_torch_state_dict as from_torch_state_dict
from jmpscale._exchange import to_torch_state_dict as to_torch_state_dict
from jmpscale._finite import all_finite as all_finite
from jmpscale._gate import apply_if as apply_if
from jmpscale._optax import optax_step as optax_step
from jmpscale._optax import with_loss_scaling as with_loss_scaling
from jmpscale._report import GradReport as GradReport
from jmpscale._report import grad_report as grad_report
from jmpscale._report import metrics as metrics
from jmpscale._report import raise_if_stuck as raise_if_stuck
from jmpscale._scaling import scale as scale
from jmpscale._scaling import unscale as unscale
from jmpscale._scaling import unscale_and_check as unscale_and_check
from jmpscale._scaling import update as update
from jmpscale._state import ScalerConfig as ScalerConfig
from jmpscale._state import ScalerState as ScalerState
from jmpscale._state import disabled as disabled
from jmpscale._state import dynamic as dynamic
from jmpscale._state import static as static
from jmpscale._step import scaled_value_and_grad as scaled_value_and_grad
from jmpscale._step import value_and_grad as value_and_grad
from jmpscale._tree import cast as cast
from jmpscale._tree import get_scaler as get_scaler
from jmpscale._tree import replace_scaler as replace_scaler

__version__ = _version("jmpscale")
