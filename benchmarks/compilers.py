"""Compiles each step for H100 or TPU, without the hardware: `python -m benchmarks.compilers`.

A compiled program shows everything but the run time: the bytes that it moves, the memory that it needs, its kernels,
copies and collectives. Each ratio is to the same step with `optax.clip_by_global_norm`, compiled for the same devices.
"""

import argparse
import functools
import itertools
import math
import os
import pathlib
import sys

from benchmarks import programs, record, targets, traffic  # before anything that starts JAX

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

from benchmarks import steps  # isort: skip

RESULTS = record.RESULTS / "compilers.json"
# Batches are small, so that the optimizer causes a large part of the traffic, and any excess is most visible.
SHAPES = {
    "16 layers of 512, batch 256": lambda devices: steps.mlp(16, 512, 256),
    "100 of 256, batch 32": lambda devices: steps.mlp(100, 256, 32),
    "16 of 1024, batch 32": lambda devices: steps.mlp(16, 1024, 32),
    "8 of 2048, batch 32": lambda devices: steps.mlp(8, 2048, 32),
    "6 of 1024, batch 32": lambda devices: steps.mlp(6, 1024, 32),
    "6 of 2048, batch 256": lambda devices: steps.mlp(6, 2048, 256),
    "4 of 8192, batch 256": lambda devices: steps.mlp(4, 8192, 256),
    "2 of 8192, batch 32": lambda devices: steps.mlp(2, 8192, 32),
    "embedding of 32,000 x 1,024": lambda devices: steps.embedding(32_000, 1024, 256, 8),
    "language model": lambda devices: steps.language_model(),
    "decoder of 6.6 billion": lambda devices: steps.transformer(32, 4096, 32, 32000, 2048, devices),
}
HALF = {"h100": jnp.float16, "v100": jnp.float16, "t4": jnp.float16, "tpu-v5e": jnp.bfloat16, "tpu-v5p": jnp.bfloat16}
# Matrices that are too large for a cache and for on-chip memory; on several devices, matrices that the mesh divides.
LARGE = {
    **dict.fromkeys(targets.GPUS, "8 of 2048, batch 32"),
    "tpu-v5e": "2 of 8192, batch 32",
    "tpu-v5p": "2 of 8192, batch 32",
}
SHARDED = {
    **dict.fromkeys(targets.GPUS, "6 of 2048, batch 256"),
    "tpu-v5e": "4 of 8192, batch 256",
    "tpu-v5p": "4 of 8192, batch 256",
}
EMBEDDING = "embedding of 32,000 x 1,024"
LANGUAGE_MODEL = "language model"
OURS = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm", "scaled_backward")
ENSEMBLE = "6 of 1024, batch 32"
# The runs of `--all`: the network, and the number of members of an ensemble under jax.vmap.
ALL = {
    "h100": [(LARGE["h100"], None), (EMBEDDING, None), (LANGUAGE_MODEL, None), (ENSEMBLE, 4)],
    "tpu-v5e": [(LARGE["tpu-v5e"], None)],
}
RATIOS = ("moved_bytes", "temp_bytes", "kernels", "compile_cpu_s")
ALL_METHODS = ("bare", *OURS, *steps.PEERS)


def measure(job, method, mesh, members=None):
    """Compiles one step, or the step of an ensemble, for the devices of the mesh; returns its figures."""
    init, step = steps.METHODS[method](job)
    params = job.params
    if members:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((members, *x.shape), x.dtype), params)
        init, step = jax.vmap(init), jax.vmap(step, in_axes=(0, None))
    state = jax.eval_shape(init, params)
    given = targets.spread(state, mesh)
    jax.clear_caches()
    start = cpu_seconds()
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(given, targets.batches(job.batch, mesh)))
    compiled = jitted.lower(state, job.batch).compile()
    took = cpu_seconds() - start
    program, memory, cost = programs.parse(compiled.as_text()), compiled.memory_analysis(), compiled.cost_analysis()
    copied = programs.copies(program)
    sharded, lost = targets.lost(given, compiled.output_shardings[0], state)
    return {
        "moved_bytes": traffic.known(traffic.moved_bytes, program),
        # XLA's own count, of one iteration of each loop, includes the on-chip memory of a TPU. It is missing on CUDA.
        "xla_bytes": round(cost["bytes accessed"]) if cost else None,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "kernels": programs.kernels(program),
        "scalar_operations": programs.scalar_operations(program),  # among the kernels
        "matmuls": programs.matmuls(program),
        "copies": len(copied),
        "copied_bytes": sum(map(programs.bytes_of, copied)),
        "copies_of_state": sum(kind.split("{")[0] in targets.shards(state, given) for kind in copied),
        "branches": programs.count(program, "conditional"),
        "loops": programs.count(program, "while"),
        "collectives": programs.collectives(program),
        "communicated_bytes": traffic.known(traffic.communicated_bytes, program),
        "small_all_reduces": programs.small_all_reduces(program),
        "sharded": sharded,
        "lost": lost,
        "compile_cpu_s": round(took, 2),
    }


def cpu_seconds():
    """Returns the CPU time of this process and its children, such as the assembler for GPUs."""
    return sum(os.times()[:4])


def compare(name, job, methods, mesh, members=None):
    """Compiles the methods for one job, the baseline first, and prints the figures of each at once."""
    print(f"  {name}", flush=True)
    figures = {}
    for method in dict.fromkeys((steps.BASELINE, *methods)):
        try:
            figures[method] = measure(job, method, mesh, members)
        except ImportError as error:
            print(f"    {method:<26} skipped ({error})", flush=True)
            continue
        except Exception as error:  # an error of the compiler, such as a program too large for the device
            figures[method] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"    {method:<26} failed: {figures[method]['failed']}", flush=True)
            continue
        found = ratios(figures[method], figures[steps.BASELINE], RATIOS)
        figures[method] |= {f"{key}_ratio": ratio for key, ratio in found.items()}
        show(method, figures[method])
    return figures


def ratios(figures, baseline, names):
    """Returns figures relative to the figures of another step, without unknown ones and ratios to zero."""
    known = [name for name in names if figures[name] is not None and baseline[name]]
    return {name: float(f"{figures[name] / baseline[name]:.4g}") for name in known}


def show(method, x):
    """Prints the figures of a method in one line."""
    counts = [f"{n} {name}" for name, n in sorted(x["collectives"].items())]
    parts = [
        f"moved {x.get('moved_bytes_ratio', math.nan):.4f}",
        f"temporary {x['temp_bytes'] / 1e6:8.1f} MB ({x['temp_bytes_ratio']:.3f})",
        f"kernels {x['kernels']:4d} ({x['kernels_ratio']:.3f})",
        f"copies {x['copies']} ({x['copied_bytes'] / 1e6:.0f} MB)",
        f"branches {x['branches']}",
        f"loops {x['loops']}",
        f"lost {x['lost']} of {x['sharded']}",
        f"compiled {x['compile_cpu_s']:.1f} s ({x['compile_cpu_s_ratio']:.2f})",
        *([", ".join([*counts, f"{x['small_all_reduces']} of them small all-reduces"])] if counts else []),
    ]
    print(f"    {method:<26} {'  '.join(parts)}", flush=True)


def main():
    """Compiles the requested steps, prints their figures, and adds them to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers", description=__doc__)
    parser.add_argument("--backend", choices=targets.TOPOLOGIES, required=True)
    parser.add_argument(
        "--all", action="store_true", help="compile the tables of docs/costs.md, into benchmarks/results/"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="numbers of devices, such as 1, 8, 1024")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="the networks (default: one of large matrices)")
    parser.add_argument("--methods", nargs="+", choices=steps.METHODS, default=list(steps.METHODS))
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=steps.OPTIMIZERS)
    parser.add_argument("--members", type=int, help="compile an ensemble with this number of members, under jax.vmap")
    parser.add_argument("--half", choices=("float16", "bfloat16"), help="the dtype of the model (default: the chip's)")
    parser.add_argument("--half-grads", action="store_true", help="compute gradients in that dtype, not in float32")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file, to which the figures are added")
    options = parser.parse_args()
    if not targets.installed(options.backend):
        sys.exit(f"the compiler for {options.backend} is not installed here: see docs/costs.md")
    targets.warm_up(options.backend)
    for devices, shape, optimizer, members in requested(options):
        name, job = make_job(options, devices, shape, optimizer, members)
        methods = ALL_METHODS if options.all else options.methods
        figures = compare(name, job, methods, targets.mesh(options.backend, devices), members)
        if out := options.out or (RESULTS if options.all else None):
            about = record.about("benchmarks.compilers", f"{options.backend}, compiled without the device")
            record.add(out, {name: {"about": about, "figures": figures}})


def requested(options):
    """Returns the programs to compile: the devices, the network, the optimizer and the members of an ensemble."""
    if options.all:
        return [(1, shape, "adamw", members) for shape, members in ALL[options.backend]]
    found = []
    for devices, optimizer in itertools.product(options.devices, options.optimizers):
        usual = (SHARDED if devices > 1 else LARGE)[options.backend]
        found += [(devices, shape, optimizer, options.members) for shape in options.shapes or [usual]]
    return found


def make_job(options, devices, shape, optimizer, members):
    """Returns a name that describes a job, and the job."""
    # Gradients of a 16-bit table would have 16 bits, so XLA could not merge their zeros with the zeros of the check.
    half = jnp.dtype("float32" if shape == EMBEDDING else options.half or HALF[options.backend])
    grads = half if options.half_grads else jnp.dtype("float32")
    task = targets.abstract(functools.partial(SHAPES[shape], devices))
    name = f"{options.backend}, {devices} devices, {shape}, {optimizer}, {half}, gradients in {grads}"
    name += f", {members} members" if members else ""
    return name, steps.make_job(task, optimizer, half, grads)


if __name__ == "__main__":
    main()
