"""Compiles a step with autocast for a GPU or TPU, without the hardware: `python -m benchmarks.autocast --backend h100`.

Each ratio is to the same step of the same model that is cast by hand: parameters and inputs at the top of the loss
function, and the statistics of normalizations, the softmax and the loss in float32. With autocast, the model is the
unchanged float32 program, or one whose blocks convert their results to half precision. The results of the matmuls are
in half precision, or in float32.
"""

import argparse
import contextlib
import functools
import pathlib
import sys
import weakref

from benchmarks import compilers, record, targets  # before anything that starts JAX

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

from benchmarks import steps  # isort: skip
from jmpscale._autocast import kept, rules  # isort: skip

RESULTS = record.RESULTS / "autocast.json"
METHOD = "optax wrapper"
BY_HAND, AUTOCAST, STORED, FLOAT32 = "cast by hand", "autocast", "autocast, blocks return half", "float32"
BFLOAT16, EMBEDDED = "cast by hand to bfloat16", "autocast, embedding converted"
SMALL = "autocast, small contractions converted"
RESULTS_IN_FLOAT32 = "autocast, float32 results"
VARIANTS = (BY_HAND, AUTOCAST, RESULTS_IN_FLOAT32, STORED, FLOAT32, BFLOAT16)
CONVERTED = {STORED: "stored", EMBEDDED: "embedded"}  # the argument of the task that receives the dtype
WEIGHTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable  # the results of matmuls with parameters
DOTS = jax.checkpoint_policies.dots_saveable
LORA = "GPT-2 small, 2 layers, LoRA of rank 4"
MODELS = {  # the task, and the number of devices, over which parameters and batch are sharded
    "GPT-2 small": (functools.partial(steps.gpt2, 12), 1),
    "GPT-2 small, FSDP": (functools.partial(steps.gpt2, 12, vocabulary=50304), 8),
    "GPT-2 small, scan": (functools.partial(steps.gpt2, 12, scan=True), 1),
    "GPT-2 small, scan with remat": (functools.partial(steps.gpt2, 12, scan=True, remat=WEIGHTS), 1),
    "GPT-2 small, scan, dots saved": (functools.partial(steps.gpt2, 12, scan=True, remat=DOTS), 1),
    "U-Net": (functools.partial(steps.unet, 64, 128, 16), 1),
    "ResNet-34": (functools.partial(steps.resnet, (3, 4, 6, 3), 64, 224, 64), 1),
    # Fewer layers, which compile faster.
    "GPT-2 small, 2 layers": (functools.partial(steps.gpt2, 2), 1),
    "GPT-2 small, 2 layers, FSDP": (functools.partial(steps.gpt2, 2, vocabulary=50304), 8),
    LORA: (functools.partial(steps.gpt2, 2, rank=4), 1),
    "ResNet-10": (functools.partial(steps.resnet, (1, 1, 1, 1), 64, 224, 64), 1),
}
RATIOS = ("moved_bytes", "temp_bytes", "kernels", "communicated_bytes", "compile_cpu_s")


def measure(backend, model, variant):
    """Compiles one step of a model; returns its figures, as `compilers.measure`."""
    (task, devices), half = MODELS[model], compilers.HALF[backend]
    if variant in CONVERTED:
        task = functools.partial(task, **{CONVERTED[variant]: half})
    compute = {FLOAT32: jnp.float32, BFLOAT16: jnp.bfloat16}.get(variant, half)
    result_dtype = jnp.float32 if variant == RESULTS_IN_FLOAT32 else None
    with_autocast = variant in (AUTOCAST, RESULTS_IN_FLOAT32, SMALL, *CONVERTED)
    job = steps.make_job(targets.abstract(task), compute=compute, autocast=with_autocast, result_dtype=result_dtype)
    with _small_contractions_converted() if variant == SMALL else contextlib.nullcontext():
        return compilers.measure(job, METHOD, targets.mesh(backend, devices, (devices, 1)))


@contextlib.contextmanager
def _small_contractions_converted():
    """Lets autocast convert contractions of 2 to 4 elements, too, to measure the rule that keeps them in float32."""
    memos, largest = rules._MEMOS, kept._SMALL_CONTRACTION
    try:
        rules._MEMOS, kept._SMALL_CONTRACTION = {key: weakref.WeakKeyDictionary() for key in memos}, 1
        yield
    finally:
        rules._MEMOS, kept._SMALL_CONTRACTION = memos, largest


def main():
    """Compiles the models, prints their figures, and adds them to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autocast", description=__doc__)
    parser.add_argument("--backend", choices=compilers.HALF, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--variants", nargs="+", choices=(*VARIANTS, EMBEDDED, SMALL), help="keep the figures of all others"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="the JSON file to add the figures to")
    options = parser.parse_args()
    if not targets.installed(options.backend):
        sys.exit(f"the compiler for {options.backend} is not installed here: see docs/costs.md")
    targets.warm_up(options.backend)
    for model in options.models:
        name = f"{options.backend}, {model}"
        figures = record.read(options.out).get(name, {}).get("figures", {}) if options.variants else {}
        more = [EMBEDDED] * ("FSDP" in model) + [SMALL] * (model == LORA)
        for variant in options.variants or [*VARIANTS, *more]:
            figures[variant] = measure(options.backend, model, variant)
            ratios = compilers.ratios(figures[variant], figures[BY_HAND], RATIOS)
            shown = "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            print(f"{name}: {variant:<28}  {shown}  {figures[variant]['matmuls']}", flush=True)
        about = record.about("benchmarks.autocast", f"{options.backend}, compiled without the device")
        record.add(options.out, {name: {"about": about, "figures": figures}})


if __name__ == "__main__":
    main()
