"""The state dict of `torch.amp.GradScaler`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jmpscale._base.arguments import check_count, check_in_range
from jmpscale._base.options import requires_names
from jmpscale._base.text import type_name
from jmpscale._base.tree import PyTree, check_has_values
from jmpscale._get_scaler import find_scaler
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, ScalerConfig, ScalerState, init_state, scale_on_host

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = {"scale", "_growth_tracker", *_SETTINGS}


def to_torch_state_dict(scaler: PyTree) -> dict[str, float | int]:
    """Converts a scaler to the state dict that `torch.amp.GradScaler.load_state_dict` takes.

    Args:
      scaler: a dynamic or disabled scaler, or any pytree that contains exactly one, outside `jax.jit`. Its values are
        read from the device.

    Returns:
      Python numbers under torch's keys, or an empty dict for a disabled scaler, as torch returns. The limits, the
      hysteresis and the counts of skips are lost, because torch has none. `_growth_tracker` is below `growth_interval`,
      because torch never grows a scale whose tracker has passed it.

    Raises:
      TypeError: the arrays of `scaler` are abstract or traced.
      ValueError: `scaler` does not contain exactly one scaler, or the scaler is static or has an invalid scale.

    >>> import jmpscale
    >>> jmpscale.to_torch_state_dict(jmpscale.dynamic(1024.0))["scale"]
    1024.0
    """
    state = find_scaler(scaler)
    check_has_values(state, "scaler", "to_torch_state_dict")
    config = state.config
    if config.mode == "disabled":
        return {}
    if config.mode == "static":
        raise ValueError(
            "scaler must be dynamic or disabled to become a torch state dict, got mode 'static'. torch has no static "
            "scale: multiply the loss and divide the gradients in torch yourself."
        )
    return {
        "scale": scale_on_host(state),
        **{name: getattr(config, name) for name in _SETTINGS},
        "_growth_tracker": min(int(state.finite_steps), config.growth_interval - 1),
    }


@requires_names
def from_torch_state_dict(
    mapping: Mapping[str, Any], *, min_scale: float = SMALLEST_SCALE, max_scale: float = LARGEST_SCALE
) -> ScalerState:
    """Creates a scaler that continues where a `torch.amp.GradScaler` stopped.

    Args:
      mapping: `scaler.state_dict()`, which contains torch's settings.
      min_scale: the lower limit of the scale, which torch does not have; 2^-126 by default.
      max_scale: the upper limit of the scale, which torch does not have; 2^126 by default.

    Returns:
      A dynamic `ScalerState` whose scale equals torch's at each later step within the limits. torch multiplies in
      float64, so the scales are equal bit for bit if the factors are exact in float32, such as 2 and 0.5. If
      `_growth_tracker` has reached `growth_interval`, the scale grows at the next finite step; torch's grows only
      after an overflow has reset the tracker.

    Raises:
      TypeError: `mapping` is not a mapping, or a value in it has the wrong type.
      ValueError: `mapping` lacks a key or has an unexpected one, or a value is out of range.

    >>> import jmpscale
    >>> saved = jmpscale.to_torch_state_dict(jmpscale.dynamic(1024.0, growth_interval=100))
    >>> scaler = jmpscale.from_torch_state_dict(saved)
    >>> float(scaler.loss_scale), scaler.config.growth_interval
    (1024.0, 100)
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping must be the result of GradScaler.state_dict(), got {type_name(mapping)}.")
    if set(mapping) != _KEYS:
        raise ValueError(
            f"mapping must have the keys of torch.amp.GradScaler.state_dict(): missing {sorted(_KEYS - set(mapping))}, "
            f"unexpected {sorted(map(str, set(mapping) - _KEYS))}. Pass the scaler's own state dict. If it is empty, "
            "the GradScaler was disabled: create a new scaler with dynamic()."
        )
    # Schedules that grow one step later start at -1.
    tracker = check_count("mapping['_growth_tracker']", mapping["_growth_tracker"], low=-1)
    config = ScalerConfig(min_scale=min_scale, max_scale=max_scale, **{name: mapping[name] for name in _SETTINGS})
    # A scale at its limit was saved as the nearest float32 number, which may be just outside the limit.
    low = min(config.min_scale, float(np.float32(config.min_scale)))
    high = max(config.max_scale, float(np.float32(config.max_scale)))
    remedy = "The limits are min_scale and max_scale."
    scale = check_in_range("mapping['scale']", mapping["scale"], low, high, remedy)
    return init_state(scale, config, finite_steps=tracker)
