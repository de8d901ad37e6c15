"""Looking at a scaler, never deciding: what to log, and when to give up."""

import jax
import jax.core
import numpy as np

from jmpscale._scaling import require_one_scaler, require_scaler
from jmpscale._state import ScalerState, count

_CAUSES = {
    0: "No skip has been recorded",
    1: "In the newest skip the gradients were not finite while the loss, if given, was",
    2: "In the newest skip the loss itself was not finite, before any scaling",
}


def metrics(state: ScalerState) -> dict[str, jax.Array]:
    """Returns what there is to log about a scaler, under stable names.

    Args:
      state: a scaler, or a batch of scalers.

    Returns:
      `loss_scale` f32[], and i32[] `good_steps`, `hysteresis_left`, `skipped`, `skipped_in_a_row`, `last_skip`; see
      `ScalerState`. They stay on the device: nothing is transferred until they are read.

    Raises:
      TypeError: `state` is not a `ScalerState`.

    >>> from jmpscale import dynamic
    >>> {name: float(value) for name, value in metrics(dynamic(8.0)).items() if "scale" in name}
    {'loss_scale': 8.0}
    """
    require_scaler(state)
    return {name: value for name, value in state._asdict().items() if name != "config"}


def raise_if_stuck(state: ScalerState, *, max_skips_in_a_row: int) -> None:
    """Raises if too many steps in a row have been skipped; to be called outside jit, as often as you like.

    Reads one scalar from the device, and waits for it; calling it every hundred steps costs next to nothing.

    Args:
      state: the scaler.
      max_skips_in_a_row: how many skips in a row are still fine, at least 1. Finding the scale at the start can take
        some: from 2^16 down to 1 it takes 16.

    Raises:
      FloatingPointError: more steps in a row have been skipped; says which scale, why, and what to do.
      TypeError: `state` is not a `ScalerState` or is traced, or `max_skips_in_a_row` is not an integer.
      ValueError: `state` is a batch of scalers, or `max_skips_in_a_row` is below 1.

    >>> from jmpscale import dynamic
    >>> raise_if_stuck(dynamic(), max_skips_in_a_row=20)
    """
    require_one_scaler(state)
    allowed = count("max_skips_in_a_row", max_skips_in_a_row)
    if isinstance(state.skipped_in_a_row, jax.core.Tracer):
        raise TypeError("raise_if_stuck reads the state and so cannot run inside jax.jit. Call it between two steps.")
    if int(state.skipped_in_a_row) > allowed:
        raise FloatingPointError(_diagnosis(state))


def _diagnosis(state: ScalerState) -> str:
    scale, run, total, cause = (
        x.item() for x in jax.device_get((state.loss_scale, state.skipped_in_a_row, state.skipped, state.last_skip))
    )
    config = state.config
    at_floor = config.mode == "static" or scale <= float(np.float32(config.min_scale))
    if cause == 2:
        action = "No loss scale cures that: look for bad data, or for an overflow in the forward pass."
    elif at_floor:
        action = (
            "The scale cannot fall any further: either the gradients overflow on the way back whatever the scale, "
            "or they are NaN. Run the same batch in float32; if it is finite there, allow a smaller scale or keep "
            "the overflowing layers in float32."
        )
    elif run == total:
        action = (
            "These are the first skips of this run: the scale is still being sought, as is expected at the start. "
            "Allow more skips, or start lower."
        )
    else:
        action = "The scale is still falling; allow more skips, or look for what changed in the data or the model."
    return (
        f"{run} steps in a row were skipped ({total} in all); the loss scale is {scale:g}. "
        f"{_CAUSES.get(cause, 'The cause is unknown')}. {action}"
    )
