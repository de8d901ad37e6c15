"""Times training steps in each precision on the device that JAX finds: `python -m benchmarks.accelerator`.

First the tests of `tests/benchmarks/test_accelerator.py` run. Then each row is a model, and each column a way to
compute its step: precisions, casts by hand, autocast, and loss scaling by several libraries. The steps of a row take
turns, and a ratio compares two steps of one round. The record has every repetition, and beside each time the bytes that
the compiled step moves, its memory, and the error of its gradients relative to float32 with highest precision. It is
written again after each round, so a run that is cut off keeps its figures. On a CPU, the command is a rehearsal with
the smallest sizes.
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import cards, columns, programs, record, timing, traffic

MEMORY_FRACTION = 0.8  # the fraction of the memory limit that a step may need; fragmentation makes the rest unusable
COMPILE_FRACTION = 0.6  # the fraction of a row's time after which no further column is compiled
ATTEMPTS = 20  # steps, after which the initial backoff of a dynamic scale must have ended
MINUTES, QUICK_MINUTES = 15, 2
SECONDS, QUICK_SECONDS = 15, 6  # the time limit for the rounds of a row
ROUNDS = 3, 41
TEST_SECONDS = 180
TRAINING = {"steps": 200, "length": 128, "batch": 32}
SMALLEST_TRAINING = {"steps": 5, "length": 16, "batch": 2}
NO_TIME = "no time was left"
TESTS, TEXT = "tests", "training"
PARTS = (TESTS, *columns.ROWS, TEXT)


class Clock:
    """The time until a run must end."""

    def __init__(self, seconds):
        self._started, self._end = time.monotonic(), time.monotonic() + seconds

    def left(self):
        """Returns the seconds that are left."""
        return self._end - time.monotonic()

    def taken(self):
        """Returns the seconds since the start."""
        return round(time.monotonic() - self._started)

    def part(self, fraction):
        """Returns a clock that ends after a fraction of the seconds that are left."""
        return Clock(fraction * self.left())


# --- correctness


def run_tests(seconds):
    """Runs the tests for accelerators in a process of its own; returns how many passed, and the names of failures.

    They must end before this process uses the device: most TPUs admit one process, and JAX reserves memory of a GPU.
    """
    seconds = max(seconds, 1)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--full", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "tests/benchmarks/test_accelerator.py"],
                cwd=record.ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return {"omitted": f"the tests did not end within {seconds:.0f} seconds"}
        if not report.exists():
            return {"omitted": f"pytest did not run: {(done.stdout + done.stderr)[-500:]}"}
        return read_report(report) | {"seconds": round(time.monotonic() - started)}


def read_report(path):
    """Returns how many tests of a JUnit report passed, and the reasons for skips and failures by name."""
    cases = list(ET.parse(path).getroot().iter("testcase"))
    failures = {
        case.get("name"): found.get("message", "")[:300]
        for case in cases
        if (found := case.find("failure")) is not None or (found := case.find("error")) is not None
    }
    skipped = {case.get("name"): found.get("message") for case in cases if (found := case.find("skipped")) is not None}
    return {"passed": len(cases) - len(failures) - len(skipped), "skipped": skipped, "failures": failures}


# --- a row


def needed_bytes(compiled, params):
    """Returns the memory for one training run at a time: its step, and the parameters and gradients that are kept."""
    memory = compiled.memory_analysis()
    step = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    step += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return step + 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def fit_batch(make_task, batch, limit, options=None):
    """Returns the task with the largest batch whose reference step fits into the memory, and the run of this step.

    The batch is halved as often as needed.

    Raises:
      MemoryError: A batch of 1 does not fit.
    """
    while batch:
        task = make_task(batch)
        run = columns.COLUMNS[columns.REFERENCE].run(task, options)
        try:
            run.compile()
            if limit is None or needed_bytes(run.compiled, task[1]) <= MEMORY_FRACTION * limit:
                return task, batch, run
        except jax.errors.JaxRuntimeError as error:  # compilers for TPU refuse a program that is too large
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        batch //= 2
    raise MemoryError(f"a batch of 1 needs more than {MEMORY_FRACTION:.0%} of the {limit / 1e9:.1f} GB of the device")


def compile_runs(runs, clock, found):
    """Compiles the runs, several at a time; adds the figures of each program, or why a column is omitted.

    The first column of each precision is compiled before the others, which then find its tuned kernels.
    """
    leaders = {str(columns.COLUMNS[name].settings): name for name in reversed(runs)}
    waves = [name for name in runs if name in leaders.values()], [x for x in runs if x not in leaders.values()]
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for wave in waves:
            started = {}
            for name in wave:
                with recording_failure(name, found):
                    if clock.left() < 0:
                        raise TimeoutError(NO_TIME)
                    runs[name].lower()
                    started[name] = pool.submit(runs[name].compile)
            for name, future in started.items():
                with recording_failure(name, found):
                    future.result()
                    found[name] = figures(runs[name].compiled)
    return {name: run for name, run in runs.items() if "omitted" not in found[name]}


@contextlib.contextmanager
def recording_failure(name, found):
    """Records an error, such as too little memory or an unknown precision, as the reason why a column is omitted."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found[name] = {"omitted": f"{type(error).__name__}: {lines[0].strip()}"[:300]}


def figures(compiled):
    """Returns the bytes that a compiled step moves, and its memory as the compiler plans it."""
    program, memory = programs.parse(compiled.as_text()), compiled.memory_analysis()
    return {
        "moved_bytes": traffic.known(traffic.moved_bytes, program),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "matmuls": programs.matmuls(program),
    }


def first_gradient(run):
    """Trains until the first step is applied; returns its gradients, the skips before it, and the loss.

    Adam's average after its first step is a tenth of the gradients that the optimizer received.
    """
    run.start()
    for skips in range(ATTEMPTS):
        (_, opt_state, _), loss = run()
        average = optax.tree.get(opt_state, "mu")
        if float(_squares(average)) != 0:
            return average, skips, float(loss)
    return average, ATTEMPTS, float(loss)


@jax.jit
def _squares(tree):
    return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(tree))


@jax.jit
def _relative_error(tree, reference):
    return jnp.sqrt(_squares(jax.tree.map(jnp.subtract, tree, reference)) / _squares(reference))


def measure_gradients(runs, found):
    """Adds the error of the gradients of each column; returns the runs whose first steps ran."""
    reference = None
    for name, run in runs.items():
        with recording_failure(name, found):
            gradient, skips, loss = first_gradient(run)
            reference = gradient if name == columns.REFERENCE else reference
            error = float(_relative_error(gradient, reference)) if reference is not None else None
            found[name] |= {"gradient_error": number(error), "first_skips": skips, "first_loss": number(loss)}
        run.stop()
    return {name: run for name, run in runs.items() if "omitted" not in found[name]}


def number(x):
    """Returns a number with four digits, `"not finite"`, or None."""
    if x is None:
        return None
    return timing.rounded(x) if np.isfinite(x) else "not finite"


def measure_row(row, make_task, batch, names, clock, seconds, save, options=None):
    """Adds the figures of the columns of a model to a row, and calls `save` whenever there are more."""
    device, found = jax.devices()[0], row["columns"]
    task, row["batch"], reference = fit_batch(make_task, batch, _memory(device, "bytes_limit"), options)
    runs = build_runs(names, task, found, options) | {columns.REFERENCE: reference}
    started = time.monotonic()
    runs = compile_runs(runs, clock.part(COMPILE_FRACTION), found)
    row["compile_seconds"] = round(time.monotonic() - started, 1)
    save()
    runs = measure_gradients(runs, found)
    save()
    for taken, repeats in timing.take_turns(runs, min(seconds, max(clock.left(), 0)), ROUNDS):
        for name in runs:
            found[name].setdefault("seconds", []).append(float(f"{taken[name]:.6g}"))
            found[name]["steps"] = repeats[name]
        row["peak_bytes_in_use"] = _memory(
            device, "peak_bytes_in_use"
        )  # of the process, so the maximum over all columns so far
        save()


def build_runs(names, task, found, options):
    """Returns the run of each column; the column of a library that cannot be imported is omitted."""
    runs = {}
    for name in names:
        with recording_failure(name, found):
            runs[name] = columns.COLUMNS[name].run(task, options)
    return runs


def _memory(device, key):
    return (device.memory_stats() or {}).get(key)


# --- a training run


def text(steps, length, batch):
    """Returns batches of bytes of this repository's pages and modules, with shape (steps, batch, length + 1)."""
    files = sorted([*record.ROOT.glob("docs/**/*.md"), *record.ROOT.glob("jmpscale/**/*.py")])
    data = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    places = np.random.default_rng(0).integers(0, len(data) - length, (steps, batch))
    return jnp.asarray(data[places[..., None] + np.arange(length + 1)], jnp.int32)


def measure_training(row, names, clock, save, *, steps, length, batch, smallest=False):
    """Trains a small language model in each column on the same batches, and adds the losses to a row."""
    data, found = text(steps, length, batch), row["columns"]
    loss_fn, params, _ = columns.text_model(length, batch, smallest=smallest)
    row |= {"steps": steps, "batch": batch}
    runs = build_runs(names, (loss_fn, params, data[0]), found, compiler_options(smallest))
    for name, run in compile_runs(runs, clock.part(COMPILE_FRACTION), found).items():
        with recording_failure(name, found):
            if clock.left() < 0:
                raise TimeoutError(NO_TIME)
            losses = train(run, data)
            last = losses[-max(steps // 10, 1) :]
            found[name] |= {"losses": list(map(number, losses)), "last_loss": number(np.mean(last))}
        save()


def train(run, data):
    """Returns the losses of a training run with one step for each batch."""
    run.start()
    for batch in data:
        run.batch = batch
        run()
    losses = [float(loss) for loss in run.losses]
    run.stop()
    return losses


# --- the command


def parse(arguments):
    """Returns the options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two models in few columns, without tests, in 2 minutes")
    parser.add_argument("--minutes", type=float, help="the time limit of the run (default: 15, or 2 with --quick)")
    parser.add_argument("--rehearse", action="store_true", help="the smallest sizes, as on a CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts: the tests, models, and the training run")
    parser.add_argument("--columns", nargs="+", choices=columns.COLUMNS, help="default: all, or few with --quick")
    parser.add_argument("--out", type=pathlib.Path, help="default: benchmarks/results/accelerators/DEVICE.json")
    return parser.parse_args(arguments)


def selected(options):
    """Returns the parts and the columns that the options select."""
    parts = options.only or (columns.QUICK_ROWS if options.quick else PARTS)
    names = options.columns or (columns.QUICK_COLUMNS if options.quick else columns.COLUMNS)
    return list(parts), [name for name in columns.COLUMNS if name in names]


def main(arguments=None):
    """Measures, prints the tables and writes the record; exits with 1 if a test failed."""
    options = parse(arguments)
    clock = Clock(60 * (options.minutes or (QUICK_MINUTES if options.quick else MINUTES)))
    parts, names = selected(options)
    tests = run_tests(min(TEST_SECONDS, clock.left() / 2)) if TESTS in parts else {"omitted": "not requested"}
    device = jax.devices()[0]
    smallest = options.rehearse or device.platform == "cpu"
    about = record.about("benchmarks.accelerator", device.device_kind) | record.accelerator(device)
    results = {"about": about | {"quick": options.quick, "rehearsal": smallest}, "tests": tests, "rows": {}}
    path = options.out or default_path(device, smallest, options.quick)
    print(f"{device.device_kind}: {cards.tests(tests)}\nthe record is {path}", flush=True)

    def save():
        results["about"]["seconds"] = clock.taken()
        record.write(path, results)

    save()
    for i, name in enumerate(rows := [part for part in parts if part != TESTS]):
        share = clock.part(1 / (len(rows) - i))
        row = results["rows"][name] = {"columns": {}}
        measure_part(name, row, names, share, save, smallest=smallest, quick=options.quick)
        save()
        print(f"\n{name}, after {clock.taken()} s\n{cards.one(results, name)}", flush=True)
    results["about"]["clocks_at_end"] = record.clocks()
    save()
    return int(bool(tests.get("failures")))


def measure_part(name, row, names, clock, save, *, smallest, quick):
    """Measures one model or the training run; records why it is omitted if it fails as a whole."""
    with recording_failure("row", failed := {}):
        if clock.left() <= 0:
            raise TimeoutError(NO_TIME)
        if name == TEXT:
            sizes = SMALLEST_TRAINING if smallest else TRAINING
            measure_training(row, names, clock, save, **sizes, smallest=smallest)
        else:
            model = columns.ROWS[name]
            make_task, batch = (lambda _: model.smallest(), 1) if smallest else (model.task, model.batch)
            options = compiler_options(smallest)
            seconds = 0 if smallest else QUICK_SECONDS if quick else SECONDS
            measure_row(row, make_task, batch, names, clock, seconds, save, options)
    row |= failed.get("row", {})


def compiler_options(smallest):
    """Returns options that halve the time of a rehearsal on a CPU, whose times mean nothing."""
    return {"xla_backend_optimization_level": 0} if smallest and jax.default_backend() == "cpu" else None


def default_path(device, smallest, quick):
    """Returns the file of a record, such as `nvidia-h100-80gb-hbm3.json`. A rehearsal is in no folder of results."""
    name = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    folder = record.ROOT / "build" if smallest else cards.FOLDER
    return folder / f"{name}{'-quick' * quick}.json"


if __name__ == "__main__":
    sys.exit(main())
