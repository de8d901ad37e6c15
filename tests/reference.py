"""The rule of `update` in plain Python, with which tests compare the jitted rule bit for bit.

A state is a dict of the fields of `ScalerState` without the settings. The settings, and the scale after each operation,
are rounded to float32; counters stop at the largest 32-bit integer.
"""

import numpy as np

COUNTER_LIMIT = 2147483647
INITIAL = {  # the state of `jmpscale.dynamic()`
    "loss_scale": 65536.0,
    "total_steps": 0,
    "finite_steps": 0,
    "hysteresis_left": 1,
    "total_skips": 0,
    "consecutive_skips": 0,
    "last_skip_reason": 0,
}
FIELDS = tuple(INITIAL)


def step(config, state, finite, loss_finite=True):
    """Returns the state after one step of a dynamic or static scaler."""
    new = dict(state)
    new["total_steps"] = _count_up(state["total_steps"])
    dynamic = config.mode == "dynamic"
    counts_overflows = dynamic and config.hysteresis > 1
    if finite:
        new["consecutive_skips"] = 0
        new["finite_steps"] = _count_up(state["finite_steps"])
        if counts_overflows and config.hysteresis_reset == "finite":
            new["hysteresis_left"] = config.hysteresis
        if dynamic and new["finite_steps"] >= config.growth_interval:
            new["finite_steps"] = 0
            if counts_overflows:
                new["hysteresis_left"] = config.hysteresis
            new["loss_scale"] = min(_multiply(state["loss_scale"], config.growth_factor), np.float32(config.max_scale))
        return new
    if new["total_steps"] < COUNTER_LIMIT:
        new["total_skips"] = _count_up(state["total_skips"])
    new["consecutive_skips"] = _count_up(state["consecutive_skips"])
    if not loss_finite:
        new["last_skip_reason"] = 2
        return new
    new["last_skip_reason"] = 1
    new["finite_steps"] = 0
    if dynamic:
        if state["loss_scale"] <= np.float32(config.min_scale):
            new["last_skip_reason"] = 3
        if counts_overflows:
            new["hysteresis_left"] = max(state["hysteresis_left"] - 1, 0)
        if not counts_overflows or new["hysteresis_left"] == 0:
            new["loss_scale"] = max(_multiply(state["loss_scale"], config.backoff_factor), np.float32(config.min_scale))
    return new


def _count_up(counter):
    return min(counter + 1, COUNTER_LIMIT)


def _multiply(loss_scale, factor):
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.float32(loss_scale) * np.float32(factor))
