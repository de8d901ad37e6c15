"""What loss scaling costs, against everyone, on this machine: `python -m benchmarks`.

Whole training steps, jitted and donated, timed in turns in one process. A ratio is to the same step with
`optax.clip_by_global_norm`, in the same round: to clip, as to skip, all gradients must be known first.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import check, growth, steps, timing, versions

RESULTS = pathlib.Path(__file__).parent / "results" / "cpu.json"
LIBRARIES = ("jmpscale", "jax", "jaxlib", "optax", "flax", "jmp", "mixed-precision-for-jax", "equinox", "keras")

SHAPES = {
    "16 layers of 512, batch 256": (16, 512, 256),
    "100 of 256, batch 32": (100, 256, 32),
    "16 of 1024, batch 32": (16, 1024, 32),
}
BASE = SHAPES["16 of 1024, batch 32"]  # the optimizer's share is large, and 32 leaves compile fast
# One thing at a time differs from the base: the optimizer, the dtype of compute and gradients, the network. Peers that
# select leaf by leaf are left out where XLA on CPU would compile them for minutes: see `leaves --full`.
FEW, SOME = (*steps.ROUTES, "functional, norm as check", "optax wrapper, max_norm"), ("jmp", "Flax DynamicScale")
VARIED = {
    "sgd": (lambda: steps.mlp(*BASE), {"optimizer": "sgd"}, FEW + steps.PEERS),
    "momentum": (lambda: steps.mlp(*BASE), {"optimizer": "momentum"}, FEW + steps.PEERS),
    "adafactor": (lambda: steps.mlp(*BASE), {"optimizer": "adafactor"}, FEW + steps.PEERS),
    "float16": (lambda: steps.mlp(*BASE), {"compute": jnp.float16, "grads": jnp.float16}, FEW + SOME),
    "bfloat16": (lambda: steps.mlp(*BASE), {"compute": jnp.bfloat16, "grads": jnp.bfloat16}, FEW + SOME),
    "few large leaves": (lambda: steps.mlp(4, 2048, 64), {}, FEW + steps.PEERS),
    "transformer, 148 leaves": (
        lambda: steps.transformer(12, 128, 4, 512, 64, 4),
        {},
        (*FEW, "optax apply_if_finite"),
    ),
}


def whole_steps(seconds, options):
    """All methods on the three shapes; other gates than `apply_if` are for GPUs."""
    names = _chosen([name for name in steps.METHODS if name not in steps.GATES], options)
    return {name: _case(name, lambda s=s: steps.mlp(*s), {}, names, seconds) for name, s in SHAPES.items()}


def varied(seconds, options):
    """The routes and the peers, one thing at a time different from the base."""
    return {
        case: _case(case, task, settings, _chosen(names, options), seconds / 2)
        for case, (task, settings, names) in VARIED.items()
    }


def _chosen(names, options):
    return [name for name in names if options.methods is None or name in (*options.methods, steps.FLOOR)]


def dispatch(seconds, options):
    """A step of one parameter: what is left is the call."""
    return {"one parameter": _case("one parameter", lambda: steps.tiny_leaves(1, 1), {}, steps.METHODS, seconds / 4)}


def quick(seconds, options):
    """The smallest form: the three shapes, four layers each."""
    shapes = {f"4 of {width}, batch {batch}": (4, width, batch) for _, width, batch in SHAPES.values()}
    return {
        name: _case(name, lambda s=shape: steps.mlp(*s), {}, FEW + steps.PEERS, seconds)
        for name, shape in shapes.items()
    }


def in_torch(seconds, options):
    """torch's GradScaler, in a process of its own."""
    if options.torch_python is None:
        return {"left out": "no --torch-python given"}
    command = [options.torch_python, "-m", "benchmarks.torch_steps", str(seconds / 2)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def _case(name, task, settings, methods, seconds):
    print(f"  {name}", flush=True)
    figures = timing.measure(steps.make_job(task(), **settings), methods, seconds, sittings=4)
    show(figures)
    return figures


PARTS = {
    "steps": (whole_steps, 40),
    "varied": (varied, 20),
    "dispatch": (dispatch, 20),
    "check": (check.measure, 2),
    "leaves": (growth.leaves, 3),
    "parameters": (growth.parameters, 8),
    "devices": (growth.devices, 5),
    "micro-batches": (growth.micro_batches, 4),
    "torch": (in_torch, 20),
}


def show(figures):
    """Prints what was measured of each method, in one line."""
    for name, numbers in figures.items():
        if "ms" in numbers or "compile_cpu_s" in numbers:
            keys = "temp_bytes", "compile_cpu_s", "instructions", "collectives", "traces", "GB/s"
            more = "".join(f"  {k} {numbers[k]:.4g}" for k in keys if k in numbers)
            print(f"    {name:<26}{_times(numbers)}{more}")
        else:
            print(f"    {name}: {numbers}" if "failed" in numbers else f"   {name}")
            show({} if "failed" in numbers else numbers)


def _times(numbers):
    if "ms" not in numbers:
        return "  only compiled"
    low, high = numbers.get("ratio_quartiles", (math.nan, math.nan))
    return f"{numbers['ms']:>10.4g} ms {numbers.get('ratio', math.nan):>7.3f} [{low:.3f}, {high:.3f}]"


def about():
    """Returns what the figures depend on."""
    models = [x.split(":")[1].strip() for x in _read("/proc/cpuinfo").splitlines() if x.startswith("model name")]
    return {
        "date": str(datetime.date.today()),
        "command": " ".join(["python -m benchmarks", *("PATH" if "/" in x else x for x in sys.argv[1:])]),
        "device": jax.devices()[0].device_kind,
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": versions(LIBRARIES),
    }


def _read(path):
    return pathlib.Path(path).read_text() if pathlib.Path(path).exists() else ""


def main():
    """Measures the parts that were asked for, prints their figures, and writes them where others are kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of thirty; writes nothing without --out")
    parser.add_argument("--full", action="store_true", help="3,000 leaves too, and peers with 100: an hour or so more")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to measure")
    parser.add_argument(
        "--methods", nargs="+", choices=steps.METHODS, help="of steps and varied these, beside the others' old figures"
    )
    parser.add_argument("--torch-python", help="a Python that has torch, for its own table")
    parser.add_argument("--gpu", action="store_true", help="measure a GPU instead (benchmarks.gpu)")
    parser.add_argument("--tiny", action="store_true", help="with --gpu: a rehearsal on any device; writes nothing")
    parser.add_argument("--compile", action="store_true", help="with --gpu: only compile its steps, without a GPU")
    parser.add_argument("--out", type=pathlib.Path, help="where to write (default: benchmarks/results/)")
    options = parser.parse_args()
    if options.gpu:
        from benchmarks import gpu

        sys.exit(gpu.compile_all(options.tiny) if options.compile else gpu.main(options.out, options.tiny, about))
    parts = {"quick": (quick, 5), "check": (check.measure, 0.3)} if options.quick else PARTS
    out = options.out or (None if options.quick else RESULTS)
    written = json.loads(out.read_text()) if out and out.exists() else {}
    for name in parts if options.quick else options.only:
        fn, seconds = parts[name]
        print(name, flush=True)
        start = time.monotonic()
        figures = fn(seconds, options)
        took = round(time.monotonic() - start)
        told = about() | {"seconds": took}
        if options.methods is not None and name in written:
            before = written[name]
            told["other methods"] = before["about"]
            merged = {case: before["figures"].get(case, {}) | new for case, new in figures.items()}
            figures = before["figures"] | merged
        written[name] = {"about": told, "figures": figures}
        if name not in ("steps", "varied", "dispatch", "quick", "torch"):
            show(figures)
        print(f"  {took} s", flush=True)
        if out:
            out.parent.mkdir(exist_ok=True)
            out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
