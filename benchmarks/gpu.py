"""The same on a GPU, in one run of a few minutes: `python -m benchmarks --gpu`.

float16 compute; GPT-2 small (124M parameters) and a tree of 1,000 leaves; a branch against a select for the gate; the
check's bytes against the card's measured copy bandwidth. Ratios are to the bare step. Needs about 40 GB on the card.
`--tiny` rehearses the program on any device with small sizes, and writes nothing; `--compile` compiles the steps for an
H100 in their real sizes, where its compiler is installed (`pip install ".[compile-h100]"`).
"""

import json
import pathlib
import sys
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import check, steps, timing

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu.json"
OURS = ("functional", "functional, branch", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm")
# layers, width, heads, vocabulary, length, batch; leaves, their size; elements of the array that is copied
SIZES = {"gpt2": (12, 768, 12, 50257, 1024, 8), "leaves": (1000, 65536), "copied": 2**28}
TINY = {"gpt2": (1, 16, 2, 32, 8, 2), "leaves": (10, 64), "copied": 2**12}


def copy_bandwidth(elements, seconds):
    """Returns the bytes that a plain copy reads and writes in a second, in GB/s."""
    x, add_one = jnp.ones(elements, jnp.float32), jax.jit(lambda x: x + 1)
    taken = timing.interleave({"copy": lambda: add_one(x).block_until_ready()}, seconds)["copy"]
    return float(f"{2 * x.nbytes / min(taken) / 1e9:.4g}")


def checks(sizes, bandwidth, seconds):
    """The check alone, on gradients shaped like GPT-2's and on many leaves; also as a share of the bandwidth."""
    trees = {
        "GPT-2": steps.transformer(*sizes["gpt2"])[1],
        f"{sizes['leaves'][0]} leaves": steps.tiny_leaves(*sizes["leaves"])[1],
    }
    figures = {}
    for name, tree in trees.items():
        for dtype in check.DTYPES:
            ways = check.compare(steps.to_dtype(dtype, tree), seconds)
            shares = {way: {"of_bandwidth": float(f"{n['GB/s'] / bandwidth:.3g}")} for way, n in ways.items()}
            figures[f"{name}, {dtype}"] = {way: numbers | shares[way] for way, numbers in ways.items()}
    return figures


def jobs(sizes):
    """The task, settings and methods: GPT-2 with gradients in float32, as Flax takes them, or float16; many leaves."""
    gpt2, many = partial(steps.transformer, *sizes["gpt2"]), partial(steps.tiny_leaves, *sizes["leaves"])
    half = {"compute": jnp.float16}
    return {
        "GPT-2, float16, gradients in float32": (gpt2, half, ("bare", "clipped", *OURS, *steps.PEERS)),
        "GPT-2, float16, gradients in float16": (gpt2, half | {"grads": jnp.float16}, ("bare", "clipped", *OURS)),
        f"{sizes['leaves'][0]} leaves, float32": (many, {}, ("bare", "clipped", *OURS)),
    }


def whole_steps(sizes, seconds):
    """All jobs, each step in turns with the others."""
    figures = {}
    for name, (task, settings, methods) in jobs(sizes).items():
        print(f"  {name}", flush=True)
        figures[name] = timing.measure(steps.make_job(task(), **settings), methods, seconds, floor="bare")
        figures[name]["device_memory"] = jax.devices()[0].memory_stats()  # since the process began
    return figures


def compile_all(tiny):
    """Compiles all steps for an H100 that need not be there, and shows what they are made of; writes nothing."""
    from benchmarks import compilers, targets

    if not targets.installed("h100"):
        print('the compiler for H100 is not installed: pip install ".[compile-h100]"', file=sys.stderr)
        return 2
    failed = 0
    for name, (task, settings, methods) in jobs(TINY if tiny else SIZES).items():
        job = steps.make_job(targets.abstract(task), **settings)
        figures = compilers.compare(name, job, methods, targets.mesh("h100", 1))
        failed += sum("failed" in x for x in figures.values())
    return int(failed > 0)


def main(out, tiny, about):
    """Measures and writes; returns 2 where there is no GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu" and not tiny:
        print(f"no GPU here: JAX found {device.device_kind}. Nothing was measured.", file=sys.stderr)
        return 2
    sizes, seconds = (TINY, 0.1) if tiny else (SIZES, 10)
    bandwidth = copy_bandwidth(sizes["copied"], seconds)
    print(f"copy: {bandwidth} GB/s", flush=True)
    figures = {"copy GB/s": bandwidth, "check": checks(sizes, bandwidth, seconds / 5)}
    figures["steps"] = whole_steps(sizes, seconds)
    text = json.dumps({"about": about(), "figures": figures}, indent=1)
    print(text)
    if not tiny:
        (out or RESULTS).write_text(text + "\n")
    return 0
