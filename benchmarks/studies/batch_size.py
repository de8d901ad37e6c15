"""From which batch on float16 needs loss scaling: the demonstration's training. `python -m benchmarks.studies.batch_size`.

The loss of a step is the sum over its 1,024 tokens, divided by the tokens of the whole batch, as where the gradients of
all shares of a batch are added up: the larger the batch, the smaller are they. The demonstration's own batch is trained
from four seeds.
"""

import argparse
import pathlib

import jax
import numpy as np

from benchmarks import record
from jmpscale import __main__ as demo

STEPS = 800
BATCHES = (2**10, 2**15, 2**19, 2**21)
SEEDS = {2**19: (0, 1, 2, 3)}  # of the others only the first
VARIANTS = ("float32", "float16", "float16, jmpscale")
RESULTS = pathlib.Path(__file__).with_suffix(".json")


def measure(steps, batches, seeds):
    """Trains every variant with every batch and its seeds: the means of the table that the demonstration prints."""
    text, runs = demo.read_text(), []
    for whole in batches:
        for seed in seeds.get(whole, (0,)):
            for name in VARIANTS:
                run = demo.train(name, text, steps, whole, seed)
                scale, skipped = (float(run.history[key][-1]) for key in ("loss_scale", "total_skips"))
                figures = {"loss": round(run.mean("loss"), 4), "zero gradients": round(run.mean("zero"), 4)}
                figures |= {"final scale": f"2^{np.log2(scale):.0f}", "skipped": int(skipped)}
                runs.append({"batch tokens": whole, "seed": seed, "run": name} | figures)
                print(runs[-1], flush=True)
    return runs


def main():
    """Trains, prints, and writes the figures."""
    argparse.ArgumentParser(prog="python -m benchmarks.studies.batch_size", description=__doc__).parse_args()
    about = record.about("benchmarks.studies.batch_size", jax.devices()[0].device_kind) | {"steps": STEPS}
    runs = measure(STEPS, BATCHES, SEEDS)
    record.add(RESULTS, {"about": about, "runs": runs})


if __name__ == "__main__":
    main()
