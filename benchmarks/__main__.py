"""Times training steps with loss scaling on a CPU, by jmpscale and by other libraries: `python -m benchmarks`.

Whole training steps, jitted and with donated states, are timed in turns in one process. Each step has two ratios: to
the same step with `optax.clip_by_global_norm`, and to the step that neither clips nor scales the loss, in the same
round. A part is measured in one run, so that all its figures are of one machine, and the run should be alone on it.
"""

import argparse
import functools
import importlib.util
import pathlib
import sys
import time

import jax

from benchmarks import record, steps, timing

RESULTS = record.RESULTS / "cpu.json"
OURS = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm", "scaled_backward")
ALL = ("bare", "clipped", *OURS, *steps.PEERS)
FEW = ("bare", "clipped", "functional", "optax wrapper", *steps.PEERS)

# Each part has cases: a task, settings of the job, the methods, and the seconds to measure them.
SHAPES = {
    "16 layers of 512, batch 256": (16, 512, 256),
    "50 of 256, batch 32": (50, 256, 32),  # jmp's step of 100 layers takes minutes to compile
    "16 of 1024, batch 32": (16, 1024, 32),
}
STEPS = {name: (functools.partial(steps.mlp, *shape), {}, ALL, 25) for name, shape in SHAPES.items()}
BASE = functools.partial(steps.mlp, *SHAPES["16 of 1024, batch 32"])  # the optimizer takes a large part of the time
OTHERS = {name: (BASE, {"optimizer": name}, FEW, 12) for name in ("sgd", "momentum", "adafactor")}

PARTS = {"steps": STEPS, "optimizers": OTHERS}


def measure(cases):
    """Measures the cases of a part; returns their figures."""
    figures = {}
    for name, (task, settings, methods, seconds) in cases.items():
        print(f"  {name}", flush=True)
        job = steps.make_job(task(), **settings)
        figures[name] = timing.measure(job, dict.fromkeys((steps.BASELINE, *methods)), seconds)
        for method, numbers in figures[name].items():
            low, high = numbers["ratio_quartiles"]
            memory = f"{numbers['temp_bytes'] / 1e6:.0f} MB temporary, compiled in {numbers['compile_cpu_s']:.3g} s"
            print(f"    {method:<28} {numbers['ms']:8.4g} ms  {numbers['ratio']:.3f} [{low:.3f}, {high:.3f}]  {memory}")
    return figures


def main():
    """Measures the requested parts, and writes their figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="default: benchmarks/results/cpu.json")
    options = parser.parse_args()
    if missing := [name for name in steps.PEER_MODULES if importlib.util.find_spec(name) is None]:
        sys.exit(f"a part compares with all libraries, and {', '.join(missing)} cannot be imported: see docs/costs.md")
    for name in options.only:
        print(name, flush=True)
        about, start = record.about("benchmarks", jax.devices()[0].device_kind), time.monotonic()
        figures = measure(PARTS[name])
        about["seconds"] = round(time.monotonic() - start)
        record.add(options.out, {name: {"about": about, "figures": figures}})


if __name__ == "__main__":
    main()
