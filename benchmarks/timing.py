"""Times several functions in turns in one process, so that changes of the machine's speed cancel in their ratios.

Calls within a turn do not wait for each other's results, like the steps of a training run.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import steps

BURST = 0.02  # seconds: a shorter call is repeated until a turn takes this long
TURN = 0.1  # seconds of the steps of one turn, of a run that each turn starts again


def interleave(turns, seconds, rounds=(7, 41)):
    """Calls each of the named functions once in every round, in a new random order; returns seconds[name][round].

    It runs as many rounds as fit into `seconds`, within the two limits.
    """
    names, rng = list(turns), np.random.default_rng(0)
    warm = {}
    for name in 3 * names:  # the first turns compile and touch memory, the last is an estimate
        start = time.perf_counter()
        jax.block_until_ready(turns[name]())
        warm[name] = time.perf_counter() - start
    repeats = {name: int(np.clip(BURST / warm[name], 1, 10_000)) for name in names}
    expected = sum(repeats[name] * warm[name] for name in names)
    taken = {name: [] for name in names}
    for _ in range(int(np.clip(seconds / expected, *rounds))):
        for name in rng.permutation(names):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                result = turns[name]()
            jax.block_until_ready(result)
            taken[name].append((time.perf_counter() - start) / repeats[name])
    return {name: np.array(times) for name, times in taken.items()}


def summarize(taken, baseline):
    """Returns for each name the median time in ms, and the quartiles of its ratio to the baseline in the same round.

    If `bare` is among the names, also its median ratio to `bare` in the same round.
    """
    figures = {}
    for name, times in taken.items():
        low, middle, high = np.percentile(times / taken[baseline], (25, 50, 75))
        figures[name] = {
            "ms": rounded(1e3 * np.median(times)),
            "ratio": rounded(middle),
            "ratio_quartiles": [rounded(low), rounded(high)],
            "rounds": len(times),
        }
        if "bare" in taken:
            figures[name]["bare_ratio"] = rounded(np.median(times / taken["bare"]))
    return figures


def rounded(number):
    return float(f"{number:.4g}")


def measure(job, names, seconds, sittings=4):
    """Compiles the named methods for one job and times them; returns their figures.

    In each sitting the states are at other addresses: the times of equal programs differ by several per cent between
    sittings.
    """
    runs, figures = {}, {}
    for name in names:
        runs[name], figures[name] = build(job, steps.METHODS[name])
    times = {name: [] for name in runs}
    for _ in range(sittings):
        for run in runs.values():
            run.start()
        for name, new in interleave(runs, seconds / sittings).items():
            times[name] = np.append(times[name], new)
    require_same_work({name: run.losses for name, run in runs.items()})
    summary = summarize(times, steps.BASELINE)
    return {name: summary[name] | figures[name] for name in runs}


def require_same_work(losses):
    """Raises unless the losses of all methods agree: a method that skips steps would seem fast."""
    first = {name: [float(loss) for loss in seen[:5]] for name, seen in losses.items()}
    for name, seen in first.items():
        if len(set(seen)) < len(seen):  # a step that changes nothing does not change the loss
            raise RuntimeError(f"{name} skipped one of its first steps: their losses are {seen}")
    at_last = {name: seen[-1] for name, seen in first.items()}
    if not np.allclose(list(at_last.values()), np.median(list(at_last.values())), rtol=0.05):
        raise RuntimeError(f"after some steps the losses differ, so the methods did different work: {at_last}")


def take_turns(runs, seconds, rounds):
    """Yields for each round the seconds of a step by name, and the number of steps that were timed.

    A turn starts its training run again and ends it, so that only one training state is in memory, each time at other
    addresses. Its first step is not timed. A round has one turn of each run, in a new random order; the rounds end
    after `seconds`, within the two limits.
    """
    rng, started = np.random.default_rng(0), time.perf_counter()
    repeats = {name: int(np.clip(TURN / _turn(run, 1), 1, 1000)) for name, run in runs.items()}
    done, (fewest, most) = 0, rounds
    while done < fewest or (done < most and time.perf_counter() - started < seconds):
        yield {name: _turn(runs[name], repeats[name]) for name in map(str, rng.permutation(list(runs)))}, repeats
        done += 1


def _turn(run, steps):
    run.start()
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(steps):
        result = run()
    jax.block_until_ready(result)
    taken = (time.perf_counter() - start) / steps
    run.stop()
    return taken


class Run:
    """A training run: each call starts one step, and returns the step's result, after `compile` and `start`."""

    def __init__(self, job, method, options=None):
        self._init, self._step = method(job)
        self._params, self.batch, self.losses, self.state = job.params, job.batch, [], None
        self._options, self._lowered, self.compiled = options, None, None

    def lower(self):
        """Traces the step, unless it is traced already."""
        if self._lowered is None:
            state = jax.eval_shape(self._init, self._params)
            self._lowered = jax.jit(self._step, donate_argnums=0).lower(state, self.batch)

    def compile(self):
        """Compiles the step, unless it is compiled already. Several threads may compile different runs."""
        self.lower()
        if self.compiled is None:
            self.compiled = self._lowered.compile(self._options)

    def start(self):
        """Starts again from copies of the parameters, because a step donates its state."""
        state = self._init(self._params)
        self.state = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)

    def stop(self):
        """Forgets the state and the losses, and so frees their memory."""
        self.state, self.losses = None, []

    def __call__(self):
        self.state, loss = self.compiled(self.state, self.batch)
        self.losses.append(loss)
        return self.state, loss


def build(job, method):
    """Returns a `Run`, and the figures of its compilation."""
    jax.clear_caches()
    start = time.process_time()
    run = Run(job, method)
    run.compile()
    seconds = time.process_time() - start
    temporary = run.compiled.memory_analysis().temp_size_in_bytes
    return run, {"compile_cpu_s": rounded(seconds), "temp_bytes": temporary}
