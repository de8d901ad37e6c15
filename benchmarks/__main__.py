"""Measures the cost of loss scaling on this machine, compared with other libraries: `python -m benchmarks`.

Whole training steps, jitted and with donated states, are timed in turns in one process. Each ratio is to the same step
with `optax.clip_by_global_norm` in the same round: clipping, like skipping, needs all gradients before the first
parameter can be updated.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import check, steps, timing, versions

RESULTS = pathlib.Path(__file__).parent / "results" / "cpu.json"
LIBRARIES = ("jmpscale", "jax", "jaxlib", "optax", "flax", "jmp", "mixed-precision-for-jax", "equinox")

SHAPES = {
    "16 layers of 512, batch 256": (16, 512, 256),
    "100 of 256, batch 32": (100, 256, 32),
    "16 of 1024, batch 32": (16, 1024, 32),
}
BASE = SHAPES["16 of 1024, batch 32"]  # the optimizer takes a large part of the time, and 32 leaves compile quickly
OURS = ("functional", "optax wrapper", "functional, norm as check", "optax wrapper, max_norm")
# Each case differs from the base in one setting. Peers that select leaf by leaf are omitted where XLA on CPU compiles
# them for minutes.
CASES = {
    "sgd": (lambda: steps.mlp(*BASE), {"optimizer": "sgd"}, OURS + steps.PEERS),
    "momentum": (lambda: steps.mlp(*BASE), {"optimizer": "momentum"}, OURS + steps.PEERS),
    "adafactor": (lambda: steps.mlp(*BASE), {"optimizer": "adafactor"}, OURS + steps.PEERS),
    "float16": (lambda: steps.mlp(*BASE), {"compute": jnp.float16, "grads": jnp.float16}, OURS),
    "bfloat16": (lambda: steps.mlp(*BASE), {"compute": jnp.bfloat16, "grads": jnp.bfloat16}, OURS),
    "few large leaves": (lambda: steps.mlp(4, 2048, 64), {}, OURS + steps.PEERS),
    "transformer, 148 leaves": (lambda: steps.transformer(12, 128, 4, 512, 64, 4), {}, OURS),
}

GUARDED = ("bare", *OURS)


def _language_model():
    return steps.transformer(12, 768, 12, 32_768, 512, 16)


# Steps that are long enough for a GPU. In the first, the optimizer takes the largest part of the time; the language
# model has the size of GPT-2.
LARGE_CASES = {
    "8 of 2048, batch 32, float16": (lambda: steps.mlp(8, 2048, 32), {"compute": jnp.float16}, GUARDED + steps.PEERS),
    "language model, float32": (_language_model, {}, ("bare",)),
    "language model, bfloat16": (_language_model, {"compute": jnp.bfloat16}, ("bare",)),
    "language model, float16": (_language_model, {"compute": jnp.float16}, GUARDED),
}


def measure_steps(methods):
    """Measures all methods on the three shapes of the documentation's table."""
    return {name: _measure_case(name, steps.mlp(*shape), {}, methods, 40) for name, shape in SHAPES.items()}


def measure_varied(methods):
    """Measures steps that differ from one of the three shapes in one setting."""
    return _measure_cases(CASES, methods, 10)


def measure_large(methods):
    """Measures large steps, for a GPU or TPU."""
    return _measure_cases(LARGE_CASES, methods, 20)


def _measure_cases(cases, methods, seconds):
    return {
        name: _measure_case(name, task(), settings, [method for method in case_methods if method in methods], seconds)
        for name, (task, settings, case_methods) in cases.items()
    }


def _measure_case(name, task, settings, methods, seconds):
    print(f"  {name}", flush=True)
    figures = timing.measure(steps.make_job(task, **settings), dict.fromkeys((steps.BASELINE, *methods)), seconds)
    for method, numbers in figures.items():
        low, high = numbers["ratio_quartiles"]
        memory = f"{numbers['temp_bytes'] / 1e6:.0f} MB temporary, compiled in {numbers['compile_cpu_s']:.3g} s"
        print(f"    {method:<28} {numbers['ms']:8.4g} ms  {numbers['ratio']:.3f} [{low:.3f}, {high:.3f}]  {memory}")
    return figures


def measure_check(methods):
    """Measures `all_finite` alone."""
    return check.measure(seconds=2)


PARTS = {"steps": measure_steps, "varied": measure_varied, "check": measure_check, "large": measure_large}
DEFAULT_PARTS = ["steps", "varied", "check"]


def describe_machine():
    """Returns the machine, the software and the command that produced the figures."""
    cpu_info = pathlib.Path("/proc/cpuinfo")
    models = [line for line in cpu_info.read_text().splitlines() if "model name" in line] if cpu_info.exists() else []
    return {
        "date": str(datetime.date.today()),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": versions(LIBRARIES),
    }


def main():
    """Measures the requested parts, and adds the figures to the figures of earlier runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=DEFAULT_PARTS, help="default: all but large")
    parser.add_argument("--methods", nargs="+", choices=steps.METHODS, default=list(steps.METHODS))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="default: benchmarks/results/cpu.json")
    options = parser.parse_args()
    written = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        print(name, flush=True)
        start = time.monotonic()
        figures = PARTS[name](options.methods)
        about = describe_machine() | {"seconds": round(time.monotonic() - start)}
        old = written.get(name, {"about": None, "figures": {}})
        if set(options.methods) != set(steps.METHODS) and old["figures"]:
            about["other methods"] = old["about"]
            figures = {case: old["figures"].get(case, {}) | new for case, new in figures.items()}
        written[name] = {"about": about, "figures": figures}
        options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
