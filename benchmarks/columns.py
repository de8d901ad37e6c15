"""The rows and the columns that `benchmarks.accelerator` measures: models, and ways to compute a step of each model."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from benchmarks import steps, timing


class Row(NamedTuple):
    """A model: its task for a batch size, the largest batch size, and the smallest size of the model itself."""

    task: Callable[[int], Any]
    batch: int
    smallest: Callable[[], Any]  # for rehearsals


class Column(NamedTuple):
    """A way to compute a step: the settings of `steps.make_job`, and the method of `steps.METHODS`."""

    settings: dict[str, Any]
    method: str

    def job(self, task):
        """Returns the job for a task."""
        return steps.make_job(task, **self.settings)

    def run(self, task, options=None):
        """Returns the training run for a task, which is not compiled yet, with options of the compiler."""
        return timing.Run(self.job(task), steps.METHODS[self.method], options)


ROWS = {
    "8 layers of width 2048": Row(
        functools.partial(steps.mlp, 8, 2048), 32, smallest=functools.partial(steps.mlp, 2, 16, 4)
    ),
    "GPT-2 small": Row(  # a scan over layers, because 12 unrolled layers need minutes to compile in each column
        lambda batch: steps.gpt2(12, batch=batch, scan=True),
        8,
        smallest=functools.partial(steps.transformer, 2, 16, 2, 32, 8, 2, scan=True),
    ),
    "LSTM": Row(
        functools.partial(steps.lstm, 1024, 8192, 128), 128, smallest=functools.partial(steps.lstm, 16, 32, 8, 4)
    ),
    "ResNet-34": Row(
        functools.partial(steps.resnet, (3, 4, 6, 3), 64, 224),
        64,
        smallest=functools.partial(steps.resnet, (1, 1), 8, 32, 4),
    ),
    "U-Net": Row(functools.partial(steps.unet, 64, 128), 16, smallest=functools.partial(steps.unet, 8, 16, 2)),
}
QUICK_ROWS = ("8 layers of width 2048", "GPT-2 small")

_HALF, _BFLOAT16 = {"compute": jnp.float16}, {"compute": jnp.bfloat16}
_AUTOCAST, _FLOAT32_RESULTS = {"autocast": True}, {"autocast": True, "result_dtype": jnp.float32}
REFERENCE, FLOAT32 = "float32, highest precision", "float32"
UNSCALED = "float16 by hand, no scale"
CONSTANT, CLIPPED = "float16 by hand, constant scale", "float16 by hand, constant scale, clipped"
WRAPPER, BFLOAT16 = "float16 by hand, optax wrapper", "bfloat16 by hand"
IN_HALF = "autocast to float16, optax wrapper"
COLUMNS = {
    REFERENCE: Column({"precision": "highest"}, "bare"),
    FLOAT32: Column({}, "bare"),  # JAX's default precision: TF32 on NVIDIA GPUs since Ampere, bfloat16 on TPU
    "F16_F16_F32, optax wrapper": Column({"precision": "F16_F16_F32"}, "optax wrapper"),
    "BF16_BF16_F32": Column({"precision": "BF16_BF16_F32"}, "bare"),
    BFLOAT16: Column(_BFLOAT16, "bare"),
    UNSCALED: Column(_HALF, "bare"),
    CONSTANT: Column(_HALF, "constant scale"),
    CLIPPED: Column(_HALF, "clipped, constant scale"),
    "float16 by hand, functional API": Column(_HALF, "functional"),
    WRAPPER: Column(_HALF, "optax wrapper"),
    "float16 by hand, optax wrapper, max_norm": Column(_HALF, "optax wrapper, max_norm"),
    "float16 by hand, jmp": Column(_HALF, "jmp"),
    "float16 by hand, Flax DynamicScale": Column(_HALF, "Flax DynamicScale"),
    "float16 by hand, mpx": Column(_HALF, "mpx"),
    "float16 by hand, optax apply_if_finite": Column(_HALF, "optax apply_if_finite"),
    IN_HALF: Column(_HALF | _AUTOCAST, "optax wrapper"),
    "autocast to float16, float32 results, optax wrapper": Column(_HALF | _FLOAT32_RESULTS, "optax wrapper"),
    "autocast to bfloat16": Column(_BFLOAT16 | _AUTOCAST, "bare"),
    "autocast to bfloat16, float32 results": Column(_BFLOAT16 | _FLOAT32_RESULTS, "bare"),
}
QUICK_COLUMNS = (
    *(REFERENCE, FLOAT32, "F16_F16_F32, optax wrapper", "BF16_BF16_F32", BFLOAT16, CONSTANT, CLIPPED, WRAPPER),
    *(name for name in COLUMNS if name.startswith("autocast")),
)
# The step to which a step is compared: the same computation without loss scaling, or without autocast.
YARDSTICKS = {name: CONSTANT for name in COLUMNS if name.startswith("float16 by hand")}
YARDSTICKS |= {"float16 by hand, optax wrapper, max_norm": CLIPPED}
YARDSTICKS |= {"float16 by hand, optax apply_if_finite": UNSCALED}  # which does not scale the loss
YARDSTICKS |= {name: WRAPPER for name in COLUMNS if name.startswith(("autocast to float16", "F16"))}
YARDSTICKS |= {name: BFLOAT16 for name in COLUMNS if name.startswith(("autocast to bfloat16", "BF16"))}

TEXT_VOCABULARY = 256


def text_model(length, batch, *, smallest=False):
    """Returns a small language model of bytes, for training runs."""
    size = (1, 16, 2) if smallest else (4, 256, 4)
    return steps.transformer(*size, TEXT_VOCABULARY, length, batch, scan=True)
