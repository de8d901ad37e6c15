"""Measures several functions in turns in one process, so that the machine's drift cancels in their ratios."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import steps
from benchmarks.programs import COLLECTIVES

BURST = 0.02  # seconds: shorter calls are repeated until a turn takes this long
SHORT = 10.0  # seconds: what has compiled for less time than this is compiled again, up to three times in all


def interleave(turns, seconds, rounds=(7, 41)):
    """Calls each of the named functions once in every round, in a new random order; returns seconds[name][round].

    The number of rounds is what fits into `seconds`, within the two limits.
    """
    names, rng = list(turns), np.random.default_rng(0)
    warm = {}
    for name in 3 * names:  # the first turns compile and touch memory, the last is an estimate
        start = time.perf_counter()
        turns[name]()
        warm[name] = time.perf_counter() - start
    repeats = {name: int(np.clip(BURST / warm[name], 1, 10_000)) for name in names}
    expected = sum(repeats[name] * warm[name] for name in names)
    taken = {name: [] for name in names}
    for _ in range(int(np.clip(seconds / expected, *rounds))):
        for name in rng.permutation(names):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                turns[name]()
            taken[name].append((time.perf_counter() - start) / repeats[name])
    return {name: np.array(times) for name, times in taken.items()}


def summarize(taken, floor):
    """Returns for each name the median time in ms, and the quartiles of its ratio to the floor of the same round."""
    figures = {}
    for name, times in taken.items():
        low, middle, high = np.percentile(times / taken[floor], (25, 50, 75))
        figures[name] = {
            "ms": _round(1e3 * np.median(times)),
            "ratio": _round(middle),
            "ratio_quartiles": [_round(low), _round(high)],
            "rounds": len(times),
        }
    return figures


def _round(number):
    return float(f"{number:.4g}")


def measure(job, names, seconds, floor=steps.FLOOR, sittings=1, **options):
    """Compiles the named methods for one job and times them; returns their figures.

    In each sitting the states lie in other places in memory: equal programs differ by several per cent between them.
    """
    built, figures = {}, {}
    for name in names:
        try:
            built[name], figures[name] = build(job, steps.METHODS[name], **options)
        except ImportError as error:
            print(f"  {name}: left out ({error})", flush=True)
    taken = {name: [] for name in built}
    for _ in range(sittings):
        for run in built.values():
            run.start()
        for name, times in interleave(built, seconds / sittings).items():
            taken[name] = np.append(taken[name], times)
    for keras in (False, True):  # whose AdamW places epsilon otherwise, and so goes a way of its own
        if group := {name: run.losses for name, run in built.items() if name.startswith("Keras") is keras}:
            require_same_work(group)
    return {
        name: numbers | figures[name] | {"traces": built[name].traces}
        for name, numbers in summarize(taken, floor).items()
    }


def require_same_work(losses):
    """Raises unless all methods have come down the same path: one that skipped steps would be measured as fast."""
    first = {name: [float(loss) for loss in seen[:5]] for name, seen in losses.items()}
    for name, seen in first.items():
        if len(set(seen)) < len(seen):  # a step that changes nothing leaves the loss as it was
            raise RuntimeError(f"{name} skipped one of its first steps: their losses are {seen}")
    at_last = {name: seen[-1] for name, seen in first.items()}
    if not np.allclose(list(at_last.values()), np.median(list(at_last.values())), rtol=0.05):
        raise RuntimeError(f"after some steps the losses differ, so the methods did different work: {at_last}")


class Run:
    """A compiled step that feeds itself: each call is one training step, done when the call returns."""

    def __init__(self, job, method, placed=None):
        init, step = method(job)
        self.batch, self.traces, self.losses = job.batch, 0, []

        def start():  # on copies, since a step donates its state
            state = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, init(job.params))
            self.state = jax.device_put(state, placed)

        self.start = start
        start()

        def counted(state, batch):
            self.traces += 1
            return step(state, batch)

        self.jitted = jax.jit(counted, donate_argnums=0)

    def __call__(self):
        self.state, loss = jax.block_until_ready(self.jitted(self.state, self.batch))
        self.losses.append(loss)


def build(job, method, placed=None, compilations=3):
    """Returns a Run, and the figures of its program: all but the compilation's time are the same in every run."""
    run, taken = Run(job, method, placed), []
    while not taken or (len(taken) < compilations and sum(taken) < SHORT):
        jax.clear_caches()
        start = time.process_time()
        compiled = run.jitted.lower(run.state, run.batch).compile()
        taken.append(time.process_time() - start)
    jax.clear_caches()
    run.traces = 0
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return run, {
        "compile_cpu_s": _round(np.median(taken)),
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", peak + memory.temp_size_in_bytes),
        **instructions(compiled.as_text()),
    }


def instructions(program):
    """Counts the instructions of an optimized program, and those among them that are collectives."""
    found = re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([\w-]+)\(", program, flags=re.MULTILINE)
    return {
        "instructions": sum(name not in ("parameter", "tuple", "get-tuple-element") for name in found),
        "collectives": sum(bool(re.fullmatch(f"(?:{COLLECTIVES})(?:-start)?", name)) for name in found),
    }
