"""The scaler that a diagnosis advises, as a state and as the call that creates it."""

import math
from typing import NamedTuple

from jmpscale._diagnosis.search.fit import Fit, Present
from jmpscale._diagnosis.search.lines import Lines
from jmpscale._diagnosis.thresholds import DEFAULT, MARGIN, ROOM
from jmpscale._state import ScalerConfig, ScalerState, dynamic, static


class Advice(NamedTuple):
    """A scaler, and the call that creates it, such as `dynamic(init_scale=2.0**7)`.

    The call has the arguments that change; the scaler has the other settings of the present one.
    """

    scaler: ScalerState
    call: str


def advise(config: ScalerConfig, low: int, high: int, *, may_grow: bool = True, is_first: bool = False) -> Advice:
    """Returns a scaler whose scale is between two exponents, and below the largest one unless `max_scale` is smaller.

    If it may not grow, `max_scale` is the largest scale that fits. The `is_first` scale has room for the first steps.
    """
    if config.mode == "static":
        exponent = max(low, high - ROOM)
        return Advice(static(2.0**exponent), f"static(2.0**{exponent})")
    largest, smallest = math.floor(math.log2(config.max_scale)), math.ceil(math.log2(config.min_scale))
    if not is_first and may_grow and max(low, smallest) <= DEFAULT <= min(high - MARGIN, largest):
        return _dynamic(config, {})
    exponent = max(low, high - (ROOM if is_first else MARGIN))
    if is_first and smallest <= high:
        exponent = max(exponent, smallest)
    if largest >= low + 4:  # otherwise the scale could hardly back off
        exponent = min(exponent, largest)
    arguments = {"init_scale": exponent}
    if exponent > largest or not may_grow:
        arguments["max_scale"] = high
    if exponent < smallest:
        arguments["min_scale"] = low
    return _dynamic(config, arguments)


def _dynamic(config: ScalerConfig, exponents: dict[str, int]) -> Advice:
    """Returns a dynamic scaler with other scales, which are given by their exponents."""
    new = {name: 2.0**k for name, k in exponents.items()}
    scaler = dynamic(
        new.get("init_scale", 2.0**DEFAULT),
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval,
        hysteresis=config.hysteresis,
        hysteresis_reset=config.hysteresis_reset,
        min_scale=new.get("min_scale", config.min_scale),
        max_scale=new.get("max_scale", config.max_scale),
    )
    return Advice(scaler, f"dynamic({', '.join(f'{name}=2.0**{k}' for name, k in exponents.items())})")


def find_advice(fit: Fit, *, is_compared: bool, is_repaired: bool) -> Advice | None:
    """Finds a scaler that helps the program as it is: one that fits, or has room for larger gradients.

    Returns None if the present one is right, or none helps. A program that `is_repaired` needs room only afterwards.
    """
    present, fitting = fit.present, fit.scales.fitting
    if not present.has_scaler or fitting is None or not (fit.is_right and is_compared):
        return None
    if fit.scale_fits:
        return None if is_repaired else _with_room(present, fitting)
    # A dynamic scale does not back off from finite gradients.
    may_grow = fit.is_small or not math.isfinite(fit.error)
    is_first = present.is_new and not fit.is_small  # in which gradients grow
    return advise(present.config, *fitting, may_grow=may_grow, is_first=is_first)


def find_advice_then(present: Present, lines: Lines | None) -> Advice | None:
    """Finds a scaler that fits once lines compute in float32; None if the present one does, and has room."""
    fitting = lines.scales.fitting if lines and lines.paths else None
    if not present.has_scaler or fitting is None:
        return None
    if not present.is_between(fitting):
        is_first = present.is_new and present.scale > 2.0 ** fitting[1]
        return advise(present.config, *fitting, is_first=is_first)
    if found := _with_room(present, fitting):
        return found
    # A dynamic scale that has grown is near the largest one, and backs off. A new run may begin above it.
    has_grown = present.config.mode == "dynamic" and not present.is_new
    return advise(present.config, *fitting, is_first=True) if has_grown and fitting[1] - MARGIN < DEFAULT else None


def _with_room(present: Present, fitting: tuple[int, int]) -> Advice | None:
    """Returns a scaler with room for larger gradients if the present scale fits, but has none."""
    if present.config.mode == "dynamic" and not present.is_new:
        return None  # it has grown, and backs off
    advice = advise(present.config, *fitting, is_first=True)
    is_near = present.scale > max(2.0 ** (fitting[1] - MARGIN), float(advice.scaler.loss_scale))
    return advice if is_near else None
