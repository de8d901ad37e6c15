"""What is stored: the scaler's state and its configuration, and the three ways to make one.

Everything a user can configure is validated here, once, in Python. No other module looks at a value, because no
other module may: inside a compiled program there are only tracers.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

Mode = Literal["dynamic", "static", "disabled"]
Refill = Literal["growth", "finite"]

# Below the smallest scale its reciprocal overflows on the way to 2^128; above the largest the reciprocal is subnormal,
# which CPUs, GPUs and TPUs flush to zero: every gradient would become zero without a sign of it.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

COUNTER_LIMIT = int(np.iinfo(np.int32).max)


def shown(value: Any) -> str:
    """Names a value in an error message: in full if that is short, else by its dtype and shape, or by its type."""
    if isinstance(shape := getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype}{list(cast(tuple[Any, ...], shape))}"
    return shortened(repr(value)) if isinstance(value, (str, int, float, complex, type(None))) else type(value).__name__


def shortened(value: object, length: int = 60) -> str:
    """Returns the text of a value, cut where a message would be lost in it."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _unboxed(value: Any) -> object:
    return cast(object, value.item()) if isinstance(value, np.generic) else value


def _number(name: str, value: object) -> float:
    """Returns `value` as a Python float, or says why it is none."""
    value = _unboxed(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a Python number, got {shown(value)} of type {type(value).__name__}. Settings are compiled "
            "into the program; convert a concrete array with float(), and keep traced values out of them."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan. Pass a finite value.")
    return number


def count(name: str, value: object, low: int = 1) -> int:
    """Returns `value` as a Python int of at least `low` that fits a 32-bit counter, or says why it does not."""
    value = _unboxed(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer, got {shown(value)} of type {type(value).__name__}. Use int({name})."
        )
    if not low <= value <= COUNTER_LIMIT:
        raise ValueError(
            f"{name} must be between {low} and {COUNTER_LIMIT}, got {shown(value)}. Choose one in that range."
        )
    return value


def within(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """Returns `value` as a Python float in `[low, high]`, or says how to get it there."""
    number = _number(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {number:g}. {remedy}")
    return number


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}.")


_SCALE_REMEDY = "Outside 2^-126 and 2^126 the scale or its reciprocal is no longer an exact float32 number."


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """The settings of a scaler: Python numbers, fixed while a program is compiled, never part of a checkpoint.

    Attributes:
      mode: `"dynamic"` adapts the scale, `"static"` keeps it, `"disabled"` does nothing. The other settings are
        read only when `mode` is `"dynamic"`.
      growth_factor: the scale is multiplied by this after `growth_interval` finite steps in a row; above 1.
      backoff_factor: the scale is multiplied by this after an overflow; between 0 and 1.
      growth_interval: steps, at least 1.
      hysteresis: the scale backs off on the `hysteresis`-th overflow; 1 is at once.
      refill: when the hysteresis is refilled, `"growth"` (when the scale grows: Megatron-LM, DeepSpeed) or `"finite"`
        (after every finite step: apex, NeMo).
      min_scale: the scale never falls below; in [2^-126, 2^126].
      max_scale: the scale never grows above; in [2^-126, 2^126].

    Raises:
      TypeError: a setting is of the wrong type (an array, a bool, a fraction where a count belongs).
      ValueError: a setting breaks its rule.

    >>> ScalerConfig(growth_interval=1000).backoff_factor
    0.5
    """

    mode: Mode = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    refill: Refill = "growth"
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        _choice("mode", self.mode, get_args(Mode))
        _choice("refill", self.refill, get_args(Refill))
        numbers = {
            "growth_factor": _number("growth_factor", self.growth_factor),
            "backoff_factor": _number("backoff_factor", self.backoff_factor),
            "growth_interval": count("growth_interval", self.growth_interval),
            "hysteresis": count("hysteresis", self.hysteresis),
            "min_scale": within("min_scale", self.min_scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY),
            "max_scale": within("max_scale", self.max_scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY),
        }
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        # The rule is applied in float32, so that is where a factor has to differ from 1.
        if not 1.0 + 2.0**-23 <= self.growth_factor <= LARGEST_SCALE:
            raise ValueError(
                f"growth_factor must be above 1 in float32 and at most 2^126, got {self.growth_factor!r}. "
                "The default is 2."
            )
        if not SMALLEST_SCALE <= self.backoff_factor <= 1.0 - 2.0**-24:
            raise ValueError(
                f"backoff_factor must be below 1 in float32 and at least 2^-126, got {self.backoff_factor!r}. "
                "The default is 0.5."
            )
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"min_scale must not exceed max_scale, got {self.min_scale:g} and {self.max_scale:g}. Swap them."
            )


class ScalerState(NamedTuple):
    """A loss scale, what it has seen so far, and its configuration: an immutable pytree with six scalar leaves.

    Make one with `dynamic`, `static` or `disabled`. A batch of scalers is a state whose arrays share a leading axis;
    use it under `jax.vmap`.

    Attributes:
      loss_scale: f32[], what the loss is multiplied with; within `[config.min_scale, config.max_scale]`.
      good_steps: i32[], finite steps since the scale last changed.
      hysteresis_left: i32[], overflows until the scale backs off.
      skipped: i32[], skipped steps in total.
      skipped_in_a_row: i32[], skipped steps since the last finite one.
      last_skip: i32[], why the newest skip happened: 0 none yet, 1 gradients not finite, 2 loss not finite.
      config: the settings; static, no leaf.

    The counters stop at 2147483647 rather than wrap.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    hysteresis_left: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    last_skip: jax.Array
    config: ScalerConfig

    @property
    def step_taken(self) -> jax.Array:
        """Whether the newest step was taken, bool[]; true before the first."""
        return self.skipped_in_a_row == 0


def dynamic(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    refill: Refill = "growth",
    min_scale: float = 1.0,
    max_scale: float = 2.0**32,
) -> ScalerState:
    """Makes a scaler that shrinks its scale after an overflow and grows it after a run of finite steps.

    Args:
      init_scale: the first loss scale, within `[min_scale, max_scale]`. Powers of two make scaling exact.
      growth_factor: see `ScalerConfig`, as are all that follow.
      backoff_factor: see `ScalerConfig`.
      growth_interval: see `ScalerConfig`.
      hysteresis: see `ScalerConfig`.
      refill: see `ScalerConfig`.
      min_scale: see `ScalerConfig`.
      max_scale: see `ScalerConfig`.

    Returns:
      A `ScalerState` of strongly typed scalar arrays. Under a mesh of several devices make it under
      `jax.set_mesh(mesh)`, or `jax.device_put` it replicated: else the second step is compiled once more.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: an argument breaks its rule.

    >>> state = dynamic(2.0**15, growth_interval=1000)
    >>> float(state.loss_scale), int(state.skipped)
    (32768.0, 0)

    The scheme is that of Micikevicius et al. 2017 (arXiv:1710.03740), section 3.2; the defaults are those of
    `torch.amp.GradScaler` (PyTorch 2.13), which has no limits; here the floor of 1 is Megatron-LM's and the ceiling
    ColossalAI's.
    """
    config = ScalerConfig(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        refill=refill,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    remedy = "Move the start, or the limits min_scale and max_scale."
    return fresh(within("init_scale", init_scale, config.min_scale, config.max_scale, remedy), config)


def static(scale: float) -> ScalerState:
    """Makes a scaler whose scale never changes, but which still checks, skips and counts.

    Args:
      scale: the loss scale, in [2^-126, 2^126]. `static(1.0)` is the guard for bfloat16 and float32 training: it
        changes no number and skips the steps whose gradients are not finite.

    Returns:
      A `ScalerState`.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is out of range.

    >>> float(static(128).loss_scale)
    128.0
    """
    return fresh(within("scale", scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY), ScalerConfig(mode="static"))


def disabled() -> ScalerState:
    """Makes a scaler that compiles to nothing: no scale, no check, no skip; for switching scaling off by a setting.

    Returns:
      A `ScalerState` that every function hands back unchanged. Gradients come back unchanged too, in float16 where
      they are float16, which other scalers turn into float32.

    >>> disabled().config.mode
    'disabled'
    """
    return fresh(1.0, ScalerConfig(mode="disabled"))


def fresh(loss_scale: float, config: ScalerConfig) -> ScalerState:
    """Builds a state in which no two fields share a buffer: donating one must not destroy another."""
    _register_with_flax()
    counters = [jnp.array(n, jnp.int32) for n in (0, config.hysteresis, 0, 0, 0)]
    return ScalerState(jnp.array(loss_scale, jnp.float32), *counters, config=config)


def _register_with_flax() -> None:
    """Lets `flax.serialization` store states, if the program uses Flax; never imports it.

    Only the arrays are stored. A state is restored into one that the program has made, and keeps that one's settings.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:

        def to_nothing(_: ScalerConfig) -> dict[str, Any]:
            return {}

        def keep_the_targets(config: ScalerConfig, _: dict[str, Any]) -> ScalerConfig:
            return config

        serialization.register_serialization_state(ScalerConfig, to_nothing, keep_the_targets, override=True)


def _register_with_export() -> None:
    """Lets `jax.export` store a program that takes or returns states; settings travel as JSON, never as a pickle."""

    def to_bytes(config: ScalerConfig) -> bytes:
        return json.dumps(dataclasses.asdict(config)).encode()

    def from_bytes(data: bytes) -> ScalerConfig:
        return ScalerConfig(**json.loads(data))

    def only_the_config(aux_data: Any, children: Sequence[Any]) -> ScalerConfig:
        del children
        return cast(ScalerConfig, aux_data)

    jax.export.register_namedtuple_serialization(ScalerState, serialized_name="jmpscale.ScalerState")
    jax.export.register_pytree_node_serialization(
        ScalerConfig,
        serialized_name="jmpscale.ScalerConfig",
        serialize_auxdata=to_bytes,
        deserialize_auxdata=from_bytes,
        from_children=only_the_config,
    )


_register_with_flax()
_register_with_export()
