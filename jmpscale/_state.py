"""The scaler's state and settings, and the three functions that create one.

This is the only module that validates settings. It does so in Python, before anything is traced.
"""

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.export
import numpy as np

Mode = Literal["dynamic", "static", "disabled"]
HysteresisReset = Literal["growth", "finite"]

# The reciprocal of a scale below 2^-126 may overflow. The reciprocal of a scale above 2^126 is subnormal, and CPUs,
# GPUs and TPUs flush subnormal numbers to zero, so every unscaled gradient would be zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

COUNTER_LIMIT = int(np.iinfo(np.int32).max)


def describe(value: Any) -> str:
    """Describes a value in an error message: the dtype and shape of an array, a short text, or the type."""
    if isinstance(shape := getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype}{list(shape)}"
    if isinstance(value, (str, int, float, complex, type(None))):
        return truncate(repr(value))
    return type(value).__name__


def truncate(value: object, length: int = 60) -> str:
    """Returns the text of a value, cut to `length` characters."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _to_python_scalar(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _check_number(name: str, value: object) -> float:
    """Returns `value` as a Python float, or raises."""
    value = _to_python_scalar(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a Python number, got {describe(value)} of type {type(value).__name__}. Settings are "
            "compiled into the program: convert a concrete array with float(); a traced value cannot be a setting."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan. Pass a finite value.")
    return number


def check_count(name: str, value: object, low: int = 1) -> int:
    """Returns `value` as a Python int of at least `low` that fits a 32-bit counter, or raises."""
    value = _to_python_scalar(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer, got {describe(value)} of type {type(value).__name__}. Use int({name})."
        )
    if not low <= value <= COUNTER_LIMIT:
        raise ValueError(
            f"{name} must be between {low} and {COUNTER_LIMIT}, got {describe(value)}. Choose one in that range."
        )
    return value


def check_in_range(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """Returns `value` as a Python float in `[low, high]`, or raises with the remedy."""
    number = _check_number(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {number:g}. {remedy}")
    return number


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {describe(value)}. Choose one of them."
        )


_SCALE_REMEDY = "Outside [2^-126, 2^126] the scale or its reciprocal is subnormal or infinite in float32."


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """The settings of a scaler: Python numbers that are compiled into the program and never saved in a checkpoint.

    Attributes:
      mode: `"dynamic"` adjusts the scale, `"static"` keeps it, `"disabled"` does nothing. The other settings apply only
        to `"dynamic"`.
      growth_factor: the factor by which the scale grows after `growth_interval` consecutive finite steps; above 1.
      backoff_factor: the factor by which the scale backs off after an overflow; between 0 and 1.
      growth_interval: the scale grows after this number of finite steps without an overflow; at least 1.
      hysteresis: the scale backs off on overflow number `hysteresis` and on every later one; at least 1.
      hysteresis_reset: what restarts the count of overflows: `"growth"`, a growth of the scale, as in Megatron-LM and
        DeepSpeed; or `"finite"`, each finite step, as in apex and NeMo.
      min_scale: the lower limit of the scale, in [2^-126, 2^126].
      max_scale: the upper limit of the scale, in [2^-126, 2^126].

    Raises:
      TypeError: a setting has the wrong type (an array, a bool, a float where an integer is expected).
      ValueError: a setting is out of range.

    >>> ScalerConfig(growth_interval=1000).backoff_factor
    0.5
    """

    mode: Mode = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_reset: HysteresisReset = "growth"
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("hysteresis_reset", self.hysteresis_reset, get_args(HysteresisReset))
        numbers = {
            "growth_factor": _check_number("growth_factor", self.growth_factor),
            "backoff_factor": _check_number("backoff_factor", self.backoff_factor),
            "growth_interval": check_count("growth_interval", self.growth_interval),
            "hysteresis": check_count("hysteresis", self.hysteresis),
            "min_scale": check_in_range("min_scale", self.min_scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY),
            "max_scale": check_in_range("max_scale", self.max_scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY),
        }
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        # The scale is a float32 number, so a factor must differ from 1 in float32.
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


class SkipReason(enum.IntEnum):
    """The reason for a skip: the values of `ScalerState.last_skip`."""

    NONE = 0
    """No step has been skipped."""
    GRADIENTS = 1
    """The gradients were not finite."""
    LOSS = 2
    """The loss was not finite, because the data were invalid or the forward pass overflowed."""


class ScalerState(NamedTuple):
    """The state of a loss scaler: an immutable pytree of six scalar arrays, and its settings.

    `dynamic`, `static` and `disabled` create it. In a batch of scalers all arrays have a leading axis; use it under
    `jax.vmap`.

    Attributes:
      loss_scale: f32[], the factor by which the loss is multiplied. A dynamic scale is in `[config.min_scale,
        config.max_scale]`.
      finite_steps: i32[], the number of finite steps since the scale last grew or gradients last overflowed.
      hysteresis_left: i32[], the number of overflows until the scale backs off. At 0, as at 1, it backs off
        at the next overflow.
      skipped: i32[], the total number of skipped steps.
      consecutive_skips: i32[], the number of skipped steps since the last applied step.
      last_skip: i32[], the `SkipReason` of the most recent skip.
      config: the settings; part of the tree's structure, not a leaf.

    Counters stop at 2147483647 instead of wrapping around.
    """

    loss_scale: jax.Array
    finite_steps: jax.Array
    hysteresis_left: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    last_skip: jax.Array
    config: ScalerConfig

    @property
    def step_applied(self) -> jax.Array:
        """bool[], whether the most recent step was applied; true before the first step."""
        return self.consecutive_skips == 0


ARRAY_FIELDS = ScalerState._fields[:-1]


def _flatten(state: ScalerState) -> tuple[tuple[Any, ...], ScalerConfig]:
    return state[:-1], state.config


def _flatten_with_keys(state: ScalerState) -> tuple[tuple[tuple[Any, Any], ...], ScalerConfig]:
    keys = map(jax.tree_util.GetAttrKey, ARRAY_FIELDS)
    return tuple(zip(keys, state[:-1], strict=True)), state.config


def _unflatten(aux_data: Any, children: Iterable[Any]) -> ScalerState:
    return ScalerState._make([*children, aux_data])


# The state is registered explicitly, so that the settings are auxiliary data: trainers and checkpointers that enumerate
# a state's children would count a child without leaves. The state is still a named tuple, because optax.tree.get and
# flax.serialization look into named tuples.
jax.tree_util.register_pytree_with_keys(ScalerState, _flatten_with_keys, _unflatten, _flatten)


class LossScalingState(NamedTuple):
    """The optimizer state of `with_loss_scaling`.

    Attributes:
      scaler: the state of the loss scaler.
      inner_state: the state of the wrapped optimizer.
      grad_norm: f32[], the global norm of the latest gradients before clipping; None without `max_norm`.
    """

    scaler: ScalerState
    inner_state: Any
    grad_norm: jax.Array | None


def dynamic(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    hysteresis_reset: HysteresisReset = "growth",
    min_scale: float = 1.0,
    max_scale: float = 2.0**32,
) -> ScalerState:
    """Creates a scaler whose scale backs off after an overflow and grows after consecutive finite steps.

    `update` defines the rule. The defaults are the defaults of `torch.amp.GradScaler`, with a lower limit of 1 as in
    Megatron-LM and an upper limit of 2^32 as in ColossalAI.

    Args:
      init_scale: the first loss scale, in `[min_scale, max_scale]`. Scaling by a power of two is exact.
      growth_factor: the factor by which the scale grows after `growth_interval` consecutive finite steps; above 1.
      backoff_factor: the factor by which the scale backs off after an overflow; between 0 and 1.
      growth_interval: the scale grows after this number of finite steps without an overflow; at least 1.
      hysteresis: the scale backs off on overflow number `hysteresis` and on every later one; at least 1.
      hysteresis_reset: what restarts the count of overflows: `"growth"`, a growth of the scale, as in Megatron-LM and
        DeepSpeed; or `"finite"`, each finite step, as in apex and NeMo.
      min_scale: the lower limit of the scale, in [2^-126, 2^126].
      max_scale: the upper limit of the scale, in [2^-126, 2^126].

    Returns:
      A `ScalerState` of NumPy arrays, f32[] and i32[]. JAX's backend is not started, so a scaler may be created at
      module level, before `jax.distributed.initialize`. On a mesh of several devices replicate the scaler with
      `jax.device_put(scaler, NamedSharding(mesh, PartitionSpec()))`; otherwise the second call compiles the step again.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.

    >>> state = dynamic(2.0**15, growth_interval=1000)
    >>> float(state.loss_scale), int(state.skipped)
    (32768.0, 0)

    Reference: Micikevicius et al., "Mixed Precision Training", 2017 (arXiv:1710.03740), section 3.2.
    """
    config = ScalerConfig(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        hysteresis_reset=hysteresis_reset,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    remedy = "Change init_scale, or the limits min_scale and max_scale."
    return init_state(check_in_range("init_scale", init_scale, config.min_scale, config.max_scale, remedy), config)


def static(scale: float) -> ScalerState:
    """Creates a scaler whose scale never changes; steps are still checked, skipped and counted.

    Args:
      scale: the loss scale, in [2^-126, 2^126]. `static(1.0)` is for training in bfloat16 or float32: it does not
        change the gradients, and steps whose gradients are not finite are skipped.

    Returns:
      A `ScalerState`, as from `dynamic`.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is out of range.

    >>> float(static(128).loss_scale)
    128.0
    """
    config = ScalerConfig(mode="static")
    return init_state(check_in_range("scale", scale, SMALLEST_SCALE, LARGEST_SCALE, _SCALE_REMEDY), config)


def disabled() -> ScalerState:
    """Creates a scaler that turns loss scaling off and adds nothing to the compiled program.

    Returns:
      A `ScalerState` that no step changes. With this scaler float16 gradients stay float16; with other scalers they
      become float32. `all_finite` and `apply_if` do not receive the scaler, so a step that calls them still checks and
      skips. To prevent that, pass True in place of the flag.

    >>> disabled().config.mode
    'disabled'
    """
    return init_state(1.0, ScalerConfig(mode="disabled"))


def init_state(loss_scale: float, config: ScalerConfig, finite_steps: int = 0) -> ScalerState:
    """Creates a state from validated settings."""
    register_with_flax()
    # The fields are NumPy arrays, because a JAX array would start the backend, and zero-dimensional arrays instead of
    # NumPy scalars, because Orbax does not save NumPy scalars.
    counters = [np.array(n, np.int32) for n in (finite_steps, config.hysteresis, 0, 0, SkipReason.NONE)]
    return _unflatten(config, [np.array(loss_scale, np.float32), *counters])


def register_with_flax() -> None:
    """Registers the settings with `flax.serialization` if the program has imported it.

    It is called whenever a state is created or used, because the program may import Flax later than this package. Only
    the arrays are serialized. A restored state keeps the settings of the state that it is restored into.
    """
    serialization = sys.modules.get("flax.serialization")
    # While another thread is still importing Flax, the module exists without its functions.
    register = getattr(serialization, "register_serialization_state", None)
    if register is not None:
        register(ScalerConfig, lambda config: {}, lambda config, state_dict: config, override=True)


def _serialize_config(config: ScalerConfig) -> bytes:
    return json.dumps(dataclasses.asdict(config)).encode()


def _deserialize_config(data: bytes | bytearray) -> ScalerConfig:
    return ScalerConfig(**json.loads(data))


jax.export.register_pytree_node_serialization(
    ScalerState,
    serialized_name="jmpscale.ScalerState",
    serialize_auxdata=_serialize_config,
    deserialize_auxdata=_deserialize_config,
    from_children=_unflatten,
)
jax.export.register_namedtuple_serialization(LossScalingState, serialized_name="jmpscale.LossScalingState")
register_with_flax()
