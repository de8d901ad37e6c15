"""Other people's formats: the state dict of `torch.amp.GradScaler`. All is checked before anything is made."""

from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp

from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, ScalerConfig, ScalerState, count, fresh, within
from jmpscale._tree import require_one_scaler

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = {"scale", "_growth_tracker", *_SETTINGS}


def to_torch_state_dict(state: ScalerState) -> dict[str, float | int]:
    """Turns a scaler into what `torch.amp.GradScaler.load_state_dict` takes.

    Args:
      state: a dynamic scaler, outside jit: the values are read from the device.

    Returns:
      Python numbers under torch's keys `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and
      `_growth_tracker`. Limits, hysteresis and the counts of skips have no place in torch and stay behind.

    Raises:
      TypeError: `state` is not a `ScalerState`.
      ValueError: `state` is static or disabled, for which torch has no equal, or is a batch of scalers.

    >>> from jmpscale import dynamic
    >>> to_torch_state_dict(dynamic(1024.0))["scale"]
    1024.0
    """
    require_one_scaler(state)
    if state.config.mode != "dynamic":
        raise ValueError(
            f"state must be dynamic to become a torch state dict, got mode {state.config.mode!r}. torch's GradScaler "
            "has no such mode; construct it with enabled=False instead of a disabled scaler."
        )
    settings = {name: getattr(state.config, name) for name in _SETTINGS}
    return {"scale": float(state.loss_scale), **settings, "_growth_tracker": int(state.good_steps)}


def from_torch_state_dict(
    mapping: Mapping[str, Any], *, min_scale: float = SMALLEST_SCALE, max_scale: float = LARGEST_SCALE
) -> ScalerState:
    """Makes a scaler that goes on where a `torch.amp.GradScaler` stopped.

    Args:
      mapping: `scaler.state_dict()`; torch stores its settings in it, and they are taken over.
      min_scale: the lower limit, which torch does not have.
      max_scale: the upper limit, which torch does not have.

    Returns:
      A dynamic `ScalerState` with the same scale at each step to come, between the limits. Bit for bit if the factors
      are exact in float32, such as 2 and 0.5; torch multiplies with others in float64. If `growth_interval` was lowered
      to the tracker or below, the scale grows with the next finite step, where torch waits for an overflow first.

    Raises:
      TypeError: `mapping` is not a mapping, or a value in it is of the wrong type.
      ValueError: `mapping` is empty, lacks a key, has a foreign one, or a value in it breaks its rule.

    >>> from jmpscale import dynamic
    >>> state = from_torch_state_dict(to_torch_state_dict(dynamic(1024.0, growth_interval=100)))
    >>> float(state.loss_scale), state.config.growth_interval
    (1024.0, 100)
    """
    if not isinstance(cast(object, mapping), Mapping):
        raise TypeError(f"mapping must be the result of GradScaler.state_dict(), got {type(mapping).__name__}.")
    if not mapping:
        raise ValueError("mapping is empty: it was saved by a disabled scaler. Start afresh with dynamic().")
    if set(mapping) != _KEYS:
        raise ValueError(
            f"mapping must have the keys of torch.amp.GradScaler.state_dict(): missing {sorted(_KEYS - set(mapping))}, "
            f"foreign {sorted(map(str, set(mapping) - _KEYS))}. Pass the scaler's own state dict, nothing around it."
        )
    tracker = count("mapping['_growth_tracker']", mapping["_growth_tracker"], low=0)
    config = ScalerConfig(min_scale=min_scale, max_scale=max_scale, **{name: mapping[name] for name in _SETTINGS})
    # A scale at its limit was saved as the float32 number next to the limit, and that may lie outside.
    low, high = config.min_scale * (1 - 2.0**-24), config.max_scale * (1 + 2.0**-24)
    scale = within("mapping['scale']", mapping["scale"], low, high, "The limits are min_scale and max_scale.")
    return fresh(scale, config)._replace(good_steps=jnp.array(tracker, jnp.int32))
