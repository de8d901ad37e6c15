"""The scaler's state and settings, and the three functions that create one."""

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, NoReturn, ParamSpec, get_args

import jax
import jax.export
import numpy as np

from jmpscale._base.arguments import check_choice, check_count, check_in_range
from jmpscale._base.frameworks import AnyAuxData, aux_data_of_paths, imported
from jmpscale._base.marks import Mark, mark, mark_scale, remember
from jmpscale._base.options import requires_names
from jmpscale._base.text import describe, format_number

P = ParamSpec("P")
Mode = Literal["dynamic", "static", "disabled"]
HysteresisReset = Literal["growth", "finite"]

# The reciprocal of a smaller scale may overflow. The reciprocal of a larger scale is subnormal, and processors flush
# subnormal numbers to zero, so every unscaled gradient would be zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_SCALE_LIMITS = SMALLEST_SCALE, LARGEST_SCALE, "Outside, it or its reciprocal is subnormal or infinite in float32."
_LIMITS = {  # the scale is a float32 number, so a factor must differ from 1 in float32
    "growth_factor": (1.0 + 2.0**-23, LARGEST_SCALE, "It must be above 1 in float32; the default is 2."),
    "backoff_factor": (SMALLEST_SCALE, 1.0 - 2.0**-24, "It must be below 1 in float32; the default is 0.5."),
    "min_scale": _SCALE_LIMITS,
    "max_scale": _SCALE_LIMITS,
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """The settings of a scaler: Python values that are compiled into the program and never saved in a checkpoint.

    Attributes:
      mode: `"dynamic"`, `"static"` or `"disabled"`. The other settings are the arguments of `dynamic`.

    Raises:
      TypeError: a setting has the wrong type.
      ValueError: a setting is out of range, or the mode ignores it.

    >>> import jmpscale
    >>> jmpscale.dynamic(growth_interval=1000).config.growth_interval
    1000
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
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("hysteresis_reset", self.hysteresis_reset, get_args(HysteresisReset))
        for field in dataclasses.fields(self) if self.mode != "dynamic" else ():
            if field.name != "mode" and (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name} must be omitted with mode {self.mode!r}, got {describe(value)}.")
        numbers = {name: check_in_range(name, getattr(self, name), *limits) for name, limits in _LIMITS.items()}
        numbers |= {name: check_count(name, getattr(self, name)) for name in ("growth_interval", "hysteresis")}
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if self.min_scale > self.max_scale:
            low, high = map(format_number, (self.min_scale, self.max_scale))
            raise ValueError(f"min_scale must not exceed max_scale, got {low} and {high}.")


class SkipReason(enum.IntEnum):
    """The reason for a skip: the values of `ScalerState.last_skip_reason`.

    Attributes:
      NONE: 0, no step has been skipped.
      GRADIENTS: 1, the gradients were not finite.
      LOSS: 2, the loss was not finite, because the data were invalid or the forward pass overflowed.
      MIN_SCALE: 3, the gradients were not finite, and a dynamic scale was already `min_scale`.
    """

    NONE = 0
    GRADIENTS = 1
    LOSS = 2
    MIN_SCALE = 3


class ScalerState(NamedTuple):
    """The state of a loss scaler: an immutable pytree of scalar arrays, and its settings.

    In a batch of scalers all arrays have a leading axis; use it under `jax.vmap`. Counters stop at 2147483647, and
    `total_skips` stops together with `total_steps`, so `total_skips / total_steps` is the fraction of skipped steps.

    Attributes:
      loss_scale: f32[], the factor by which the loss is multiplied; if dynamic, in `[min_scale, max_scale]`.
      total_steps: i32[], the number of steps, applied or skipped: the calls of `update`.
      finite_steps: i32[], the number of finite steps since the scale last grew or gradients last overflowed; a skip
        because of a non-finite loss does not reset it.
      hysteresis_left: i32[], the number of overflows until the scale backs off; at 0, as at 1, at the next overflow.
      total_skips: i32[], the number of skipped steps.
      consecutive_skips: i32[], the number of skipped steps since the last applied step.
      last_skip_reason: i32[], the `SkipReason` of the most recent skip.
      config: the settings; part of the tree's structure, not a leaf.
    """

    loss_scale: jax.Array
    total_steps: jax.Array
    finite_steps: jax.Array
    hysteresis_left: jax.Array
    total_skips: jax.Array
    consecutive_skips: jax.Array
    last_skip_reason: jax.Array
    config: ScalerConfig

    @property
    def step_applied(self) -> jax.Array:
        """bool[], whether the most recent step was applied; true before the first step."""
        applied = self.consecutive_skips == 0
        mark(Mark.FINITE, applied, scale_of(self))
        return applied


def scale_of(scaler: ScalerState) -> jax.Array:
    """Returns the loss scale without the mark that it was read, for code that does not unscale by it."""
    return scaler[0]


# Without a docstring, because the property that calls it is a field, which the docstring of the class describes.
def _read_scale(scaler: ScalerState) -> jax.Array:
    mark_scale(Mark.READ_SCALE, scaler[0])
    return scaler[0]


def _raise_missing(state: ScalerState, name: str) -> NoReturn:
    remedy = "It has no methods: pass it to functions such as jmpscale.update."
    if name == "init":  # which optax.chain reads first
        remedy = "It is not an optimizer: call jmpscale.with_loss_scaling(optax.chain(...), jmpscale.dynamic(...))."
    text = f"ScalerState has no attribute {name!r}. {remedy}"
    raise AttributeError(text, name=name, obj=state)


# Type checkers would accept every attribute of a class with `__getattr__`, and no property in place of a field.
for _name, _attribute in {"loss_scale": property(_read_scale), "__getattr__": _raise_missing}.items():
    setattr(ScalerState, _name, _attribute)

ARRAY_FIELDS = ScalerState._fields[:-1]


def _flatten_with_keys(scaler: ScalerState) -> tuple[tuple[tuple[Any, Any], ...], object]:
    mark_scale(Mark.READ_SCALE, scaler[0])  # perhaps for a compiled function that unscales
    keys = map(jax.tree_util.GetAttrKey, ARRAY_FIELDS)
    settings = aux_data_of_paths(scaler[:-1]) if scaler.config is None else scaler.config
    return tuple(zip(keys, scaler[:-1], strict=True)), settings


def _unflatten(aux_data: Any, children: Iterable[Any]) -> ScalerState:
    return ScalerState._make([*children, None if isinstance(aux_data, AnyAuxData) else aux_data])


# As auxiliary data, the settings are not among the children that trainers and checkpointers enumerate. The state is a
# named tuple, because optax.tree.get and flax.serialization look into named tuples.
jax.tree_util.register_pytree_with_keys(ScalerState, _flatten_with_keys, _unflatten)


class WithLossScalingState(NamedTuple):
    """The optimizer state of `with_loss_scaling`.

    Attributes:
      scaler: the state of the loss scaler.
      inner_state: the state of the wrapped optimizer.
      grad_norm: f32[], the global norm of the latest gradients before clipping; None without `max_norm`.
    """

    scaler: ScalerState
    inner_state: Any
    grad_norm: jax.Array | None


class WithMasterParamsState(NamedTuple):
    """The optimizer state of `with_master_params`.

    Attributes:
      master_params: the float32 copies, in the structure of the parameters; None for each other parameter.
      inner_state: the state of the wrapped optimizer.
    """

    master_params: Any
    inner_state: Any


def _explains_arguments_of_torch(fun: Callable[P, ScalerState]) -> Callable[P, ScalerState]:
    """Makes a function raise an error with the remedy for arguments that only `torch.amp.GradScaler` has."""

    @functools.wraps(fun)
    def create(*args: P.args, **kwargs: P.kwargs) -> ScalerState:
        if "enabled" in kwargs:
            raise TypeError(
                f"{fun.__name__} has no argument enabled, got {describe(kwargs['enabled'])}. Omit it; to turn loss "
                "scaling off, create jmpscale.disabled() in place of the dynamic scaler."
            )
        first = args[0] if args else None
        if "device" in kwargs or isinstance(first, jax.Device) or (isinstance(first, str) and first[:1].isalpha()):
            raise TypeError(
                f"{fun.__name__} has no argument for a device, got {describe(kwargs.get('device', first))}. Omit it: "
                "JAX needs none, because the scaler is used where the step runs. The first argument is init_scale."
            )
        return fun(*args, **kwargs)

    return create


@_explains_arguments_of_torch
@requires_names
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
    """Creates a scaler whose scale backs off after an overflow and grows after many finite steps without one.

    `update` defines the rule. The defaults are the defaults of `torch.amp.GradScaler`, with a lower limit of 1 as in
    Megatron-LM and an upper limit of 2^32 as in ColossalAI.

    Args:
      init_scale: the first loss scale, not its exponent, in `[min_scale, max_scale]`; a power of two scales exactly.
      growth_factor: the factor by which the scale grows; above 1.
      backoff_factor: the factor by which the scale backs off after an overflow; between 0 and 1.
      growth_interval: the scale grows after this number of finite steps without an overflow; at least 1.
      hysteresis: the scale backs off on overflow number `hysteresis` and on every later one; at least 1.
      hysteresis_reset: what restarts the count of overflows: `"growth"`, a growth of the scale, as in Megatron-LM and
        DeepSpeed; or `"finite"`, each finite step, as in apex and NeMo.
      min_scale: the lower limit of the scale, in [2^-126, 2^126].
      max_scale: the upper limit of the scale, in [2^-126, 2^126].

    Returns:
      A `ScalerState` of NumPy arrays; it does not start JAX's backend. On a mesh replicate it with
      `jax.device_put(scaler, NamedSharding(mesh, PartitionSpec()))`, or the second call compiles the step again.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.

    >>> import jmpscale
    >>> scaler = jmpscale.dynamic(2.0**15, growth_interval=1000)
    >>> float(scaler.loss_scale), int(scaler.total_skips)
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
        change finite gradients, and steps whose loss or gradients are not finite are skipped.

    Returns:
      A `ScalerState`, as from `dynamic`.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is out of range.

    >>> import jmpscale
    >>> float(jmpscale.static(128).loss_scale)
    128.0
    """
    config = ScalerConfig(mode="static")
    return init_state(check_in_range("scale", scale, *_SCALE_LIMITS), config)


def disabled() -> ScalerState:
    """Creates a scaler that turns loss scaling off and adds no computation to the compiled program.

    Returns:
      A `ScalerState` that no step changes, and with which none is skipped. A compiled step that takes
      and returns it still copies its seven scalars. Float16 gradients stay float16; with other
      scalers they become float32. With the functional API, call `all_finite((loss, grads), scaler=scaler)`.

    >>> import jmpscale
    >>> jmpscale.disabled().config.mode
    'disabled'
    """
    return init_state(1.0, ScalerConfig(mode="disabled"))


def init_state(loss_scale: float, config: ScalerConfig, finite_steps: int = 0) -> ScalerState:
    """Creates a state from validated settings."""
    register_with_flax()
    # A JAX array would start the backend, and Orbax does not save NumPy scalars.
    counts = [np.array(n, np.int32) for n in (0, finite_steps, config.hysteresis, 0, 0, SkipReason.NONE)]
    return ScalerState._make([np.array(loss_scale, np.float32), *counts, config])


def is_scaler(x: object) -> bool:
    """Tests whether a node of a tree is a scaler, or a batch of scalers."""
    return isinstance(x, ScalerState)


def scale_on_host(scaler: ScalerState, name: str = "scaler") -> float:
    """Returns the loss scale as a Python number, or raises if it is invalid."""
    remedy = "The state was corrupted; restore an older checkpoint."
    return check_in_range(f"{name}.loss_scale", float(scaler.loss_scale), SMALLEST_SCALE, LARGEST_SCALE, remedy)


def register_with_flax() -> None:
    """Registers the settings with `flax.serialization` if the program has imported it, perhaps after this package.

    A restored state keeps the settings of the state that it is restored into.
    """
    if register := imported("flax.serialization", "register_serialization_state"):
        register(ScalerConfig, lambda config: {}, lambda config, state_dict: config, override=True)


def _deserialize_settings(data: bytes | bytearray) -> ScalerConfig:
    # An exported function of a scaler may scale a loss; this process has not traced it.
    remember(Mark.SCALED)
    return ScalerConfig(**json.loads(data))


jax.export.register_pytree_node_serialization(
    ScalerState,
    serialized_name="jmpscale.ScalerState",
    serialize_auxdata=lambda config: json.dumps(dataclasses.asdict(config)).encode(),
    deserialize_auxdata=_deserialize_settings,
    from_children=_unflatten,
)
for _state in (WithLossScalingState, WithMasterParamsState):
    jax.export.register_namedtuple_serialization(_state, serialized_name=f"jmpscale.{_state.__name__}")
register_with_flax()
