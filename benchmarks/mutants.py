"""Mutation testing: plants one fault at a time in the package, and runs the tests that execute the changed line.

A fault is caught if a test fails. First all tests run once with coverage, which records the lines that each test
executes. In this run each test traces its own programs; otherwise a test would seem not to execute code that an earlier
test has traced. Then, for each fault, a forked process runs the tests of the README's command that execute the line,
and, if none of them fails, the tests that only `--full` runs: first the tests that caught a fault in the same function,
then the others, the fastest first. Faults that an earlier run caught are not planted again while the module is
unchanged.

The package has two parts with their own tests: the diagnosis, and all other modules. The faults of a part are a sample
with a fixed seed, in a random order, so that those judged within a limit of time are a random sample, too. `python -m
benchmarks.mutants diagnosis --count 200 --minutes 60` writes the results of the part to results/mutants.json.
"""

import argparse
import collections
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import coverage
import jax
import pytest

from benchmarks import faults, record

ROOT = record.ROOT
RESULTS = record.RESULTS / "mutants.json"
WORK = ROOT / "build" / "mutants"
PACKAGE = ROOT / "jmpscale"
FILES = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
MODULES = sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in FILES)
STAGES = {"default": [], "full": ["--full", "-m", "full"]}  # the options of pytest
OF_DIAGNOSIS = ("_diagnosis/", "_programs/", "_run/", "_step/")
DIAGNOSIS = [name for name in MODULES if name.startswith(OF_DIAGNOSIS)]
PARTS = {"diagnosis": DIAGNOSIS, "training": [name for name in MODULES if name not in DIAGNOSIS]}
DIAGNOSIS_TESTS = [f"tests/{room}" for room in ("diagnosis", "programs", "run", "step")]
DIAGNOSIS_TESTS += ["tests/autocast/test_autocast_warnings.py", "jmpscale/_diagnosis"]
TESTS = {"diagnosis": DIAGNOSIS_TESTS, "training": []}  # the paths of the tests; an empty list selects all tests
TIMEOUT = 300  # seconds in which no test ends, after which a fault counts as caught: a test does not end
# A forked process that finds these imported starts its tests sooner. None of them starts a device.
IMPORTED_ONCE = ("chex", "equinox", "flax.linen", "flax.nnx", "flax.training.train_state", "haiku", "matplotlib.pyplot")
IMPORTED_ONCE += ("hypothesis.strategies", "optax", "orbax.checkpoint")


# A plugin of pytest, which the run with coverage loads by the name of this module.

_durations = collections.Counter()


def pytest_runtest_setup(item):
    """Makes each test trace its own programs."""
    jax.clear_caches()


def pytest_runtest_logreport(report):
    """Adds up how long each test takes."""
    _durations[report.nodeid] += report.duration


def pytest_sessionfinish(session):
    """Writes the durations, once for all processes of the run."""
    if not hasattr(session.config, "workerinput"):
        (session.config.rootpath / "durations.json").write_text(json.dumps(_durations))


class FirstFailure:
    """A plugin of pytest that remembers which test failed first."""

    name = None

    def pytest_runtest_logreport(self, report):
        """Remembers a failed test."""
        if report.failed and self.name is None:
            self.name = report.nodeid


class TestMap:
    """Maps each line to the tests of a stage that execute it, with their durations."""

    def __init__(self, folder, options, paths, processes):
        copy_repository(folder)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutants", *options, *paths]
        command += ["-n", str(processes), "-p", "no:cacheprovider"]
        command += ["--cov=jmpscale", "--cov-context=test", "--cov-report="]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        print(f"pytest {' '.join(options)} without a fault: {run.stdout.strip().splitlines()[-1]}", flush=True)
        if run.returncode:
            raise SystemExit(f"tests fail without a fault:\n{run.stdout[-3000:]}")
        self._durations = json.loads((folder / "durations.json").read_text())
        data = coverage.CoverageData(str(folder / ".coverage"))
        data.read()
        self._tests_by_line = {
            module: {
                line: {context.rpartition("|")[0] for context in contexts if context}
                for line, contexts in data.contexts_by_lineno(str(folder / "jmpscale" / f"{module}.py")).items()
            }
            for module in MODULES
        }

    def tests(self, fault):
        """Returns the tests that execute a line of the fault, the fastest first."""
        by_line = self._tests_by_line[fault.module]
        first, last = fault.lines
        tests = set().union(*(by_line.get(line, ()) for line in range(first, last + 1)))
        if not tests:  # the line is executed when the package is imported
            tests = set().union(*by_line.values())
        return sorted(tests, key=lambda name: self._durations.get(name, 0.0))


def copy_repository(folder):
    """Creates a copy of the repository without the files that no test reads."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))


def run_tests(folder, tests, options):
    """Runs tests in a forked process up to the first that fails, and returns its name, or None if all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _run_in_child(folder, tests, options, writer)
        finally:
            os._exit(0)
    os.close(writer)
    log = folder / "log.txt"  # grows with each test that ends
    size, end = 0, time.monotonic() + TIMEOUT
    while not os.waitpid(child, os.WNOHANG)[0]:
        if log.exists() and log.stat().st_size != size:
            size, end = log.stat().st_size, time.monotonic() + TIMEOUT
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            return "timeout"
        time.sleep(0.02)
    with os.fdopen(reader) as pipe:
        verdict = pipe.read()
    return json.loads(verdict) if verdict else "crash"


def _run_in_child(folder, tests, options, writer):
    os.setsid()
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # bytecode of one fault would hide the next
    failure = FirstFailure()
    quiet = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]
    code = pytest.main([*quiet, *options, *tests], plugins=[failure])
    os.write(writer, json.dumps(failure.name or (None if code == 0 else f"exit status {int(code)}")).encode())


class Judge:
    """Plants faults in a copy of the repository, in a process of its own."""

    def __init__(self, maps):
        self._maps = maps
        self._catchers = collections.defaultdict(list)
        self._folder = WORK / f"copy-{os.getpid()}"
        copy_repository(self._folder)

    def judge(self, fault):
        """Returns the stage and the test that caught a fault, or None and None."""
        path = self._folder / "jmpscale" / f"{fault.module}.py"
        source = path.read_bytes()
        path.write_bytes(fault.plant(source))
        try:
            for stage, test_map in self._maps.items():
                tests = test_map.tests(fault)
                known = [test for test in self._catchers[fault.module, fault.function] if test in tests]
                tests = list(dict.fromkeys([*known, *tests]))
                if tests and (caught_by := run_tests(self._folder, tests, STAGES[stage])):
                    self._catchers[fault.module, fault.function].insert(0, caught_by)
                    return stage, caught_by
        finally:
            path.write_bytes(source)
        return None, None


def _start_worker(maps, end):
    global _judge, _end
    _judge, _end = Judge(maps), end


def _judge_one(fault):
    start = time.monotonic()
    if start > _end:
        return fault, None, 0.0
    verdict = _judge.judge(fault)
    return fault, verdict, time.monotonic() - start


def judge_all(chosen, sources, part, stages, processes, minutes):
    """Returns the stage and the test that caught each fault; records caught faults for later runs.

    The faults that are not judged within some minutes after the map of the tests are missing.
    """
    record = WORK / "caught.jsonl"
    caught = dict(map(json.loads, record.read_text().splitlines())) if record.exists() else {}
    verdicts = {fault: tuple(caught[key]) for fault in chosen if (key := _key(fault, sources)) in caught}
    left = [fault for fault in chosen if fault not in verdicts]
    if not left:
        return verdicts
    maps = {stage: TestMap(WORK / f"map-{stage}", STAGES[stage], TESTS[part], processes) for stage in stages}
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    # A program that a fault does not change is compiled once for all faults.
    jax.config.update("jax_compilation_cache_dir", str(WORK / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    end = time.monotonic() + 60 * minutes
    pool = multiprocessing.get_context("fork").Pool(processes, _start_worker, [maps, end])
    with pool, record.open("a") as file:
        for done, (fault, verdict, seconds) in enumerate(pool.imap_unordered(_judge_one, left), 1):
            if verdict is None:
                continue
            verdicts[fault] = stage, test = verdict
            print(
                f"{done}/{len(left)} {seconds:.1f} s {fault}: {f'caught by {test}' if stage else 'SURVIVED'}",
                flush=True,
            )
            if stage:
                file.write(json.dumps([_key(fault, sources), [stage, test]]) + "\n")
                file.flush()
    return verdicts


def _key(fault, sources):
    digest = hashlib.sha256(sources[fault.module]).hexdigest()[:12]
    return f"{fault.module} {digest} {fault.span} {fault.after}"


def summarize(verdicts, settings, old):
    """Returns the counts of each module, and the survivors with the reasons that the old results gave for them."""
    known = old.get("survivors", [])
    reasons = {(s["module"], s["function"], s["before"], s["after"]): s["reason"] for s in known}
    modules, survivors = {}, []
    for fault, (stage, _) in verdicts.items():
        counts = modules.setdefault(fault.module, {"faults": 0, "default": 0, "caught": 0})
        counts["faults"] += 1
        counts["default"] += stage == "default"
        counts["caught"] += stage is not None
        if stage is None:
            about = {key: getattr(fault, key) for key in ("module", "function", "before", "after")}
            survivors.append(about | {"line": fault.lines[1], "reason": reasons.get(tuple(about.values()), "")})
    total = {key: sum(counts[key] for counts in modules.values()) for key in ("faults", "default", "caught")}
    about = record.about("benchmarks.mutants", jax.devices()[0].device_kind) | settings
    return {"about": about, "total": total, "modules": modules, "survivors": survivors}


def main():
    """Plants the faults and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=PARTS, help="the part of the package")
    parser.add_argument("--count", type=int, default=300, help="the number of faults (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="selects the faults (default: 0)")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="default: all stages")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit after the map of the tests")
    options = parser.parse_args()
    sources = {module: (PACKAGE / f"{module}.py").read_bytes() for module in PARTS[options.part]}
    everything = [fault for module, source in sources.items() for fault in faults.find(module, source)]
    chosen = faults.sample(everything, options.count, options.seed)
    WORK.mkdir(parents=True, exist_ok=True)
    verdicts = judge_all(chosen, sources, options.part, options.stages, options.processes, options.minutes)
    settings = {"seed": options.seed, "stages": options.stages, "possible faults": len(everything)}
    result = summarize(verdicts, settings, record.read(RESULTS).get(options.part, {}))
    print(json.dumps(result, indent=1))
    record.add(RESULTS, {options.part: result})


if __name__ == "__main__":
    main()
