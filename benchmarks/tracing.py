"""Measures how long it takes to trace a gradient with and without autocast: `python -m benchmarks.tracing`.

The program has many equal transformer blocks, in a Python loop or in a scan. A figure is the median process time of
several traces, without compilation.
"""

import functools
import statistics
import time

import jax

import jmpscale
from benchmarks import record, steps, targets

RESULTS = record.RESULTS / "tracing.json"
BLOCKS, REPEATS = 96, 5


def seconds(scan, autocast):
    """Returns the median process time of tracing the gradient of the loss."""
    make = functools.partial(steps.transformer, BLOCKS, 64, 4, 64, 32, 2, scan=scan)
    loss_fn, params, batch = targets.abstract(make)
    taken = []
    for _ in range(REPEATS):
        jax.clear_caches()
        fn = jax.grad(jmpscale.autocast(loss_fn) if autocast else loss_fn)
        start = time.process_time()
        jax.jit(fn).trace(params, batch)
        taken.append(time.process_time() - start)
    return round(statistics.median(taken), 2)


def main():
    """Prints and writes the times."""
    figures = {}
    for name, scan in (("unrolled", False), ("scan", True)):
        figures[name] = {"float32": seconds(scan, autocast=False), "autocast": seconds(scan, autocast=True)}
        print(f"{BLOCKS} blocks, {name}: {figures[name]}", flush=True)
    record.add(RESULTS, {"about": record.about("benchmarks.tracing", "cpu"), "figures": figures})


if __name__ == "__main__":
    main()
