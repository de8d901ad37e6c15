"""The command that times an accelerator is rehearsed on a CPU: it measures every column, and keeps what it has."""

import functools
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jmpscale
from benchmarks import accelerator, cards, columns, record, steps, timing

import meshes

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion_and_ranks")]
NETWORK, SCAN = "8 layers of width 2048", "LSTM"
FEW = [columns.REFERENCE, columns.IN_HALF]
OTHERS = [name for name in columns.ROWS if name != NETWORK]
AS_FLOAT32 = (columns.REFERENCE, columns.FLOAT32, "BF16_BF16_F32")  # on a CPU
UNSUPPORTED = {"F16_F16_F32, optax wrapper": "The precision 'F16_F16_F32' is not supported by dot_general on CPU"}


def _run(path, *arguments):
    assert accelerator.main([*arguments, "--rehearse", "--out", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    meshes.require_cpu()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _run(tmp_path_factory.mktemp("rehearsal") / "record.json", "--only", NETWORK)


@pytest.mark.parametrize("name", columns.COLUMNS)
def test_rehearsal_measures_every_column(rehearsal, name):
    found = rehearsal["rows"][NETWORK]["columns"][name]
    if name in UNSUPPORTED:
        assert found == {"omitted": f"ValueError: {UNSUPPORTED[name]}"}
        return
    if "No module named" in found.get("omitted", ""):
        pytest.skip(found["omitted"])
    assert len(found["seconds"]) == accelerator.ROUNDS[0]
    assert min(found["seconds"]) > 0
    assert min(found["steps"], found["moved_bytes"], found["argument_bytes"]) > 0
    assert (found["first_skips"], found["gradient_error"] < 0.02) == (0, True)
    assert (found["gradient_error"] > 1e-5) == (name not in AS_FLOAT32)


def test_rehearsal_has_a_record_of_the_device(rehearsal):
    about = rehearsal["about"]
    assert (about["platform"], about["rehearsal"], about["quick"]) == ("cpu", True, False)
    assert {"date", "command", "device", "commit", "versions", "backend", "clocks", "clocks_at_end"} <= set(about)
    assert about["seconds"] > 0
    assert rehearsal["tests"] == {"omitted": "not requested"}


def test_gradients_of_float16_are_less_accurate_than_of_float32(rehearsal):
    found = rehearsal["rows"][NETWORK]["columns"]
    errors = {name: found[name]["gradient_error"] for name in (columns.FLOAT32, columns.WRAPPER, columns.BFLOAT16)}
    assert errors[columns.FLOAT32] < 1e-6 < errors[columns.WRAPPER] < errors[columns.BFLOAT16]


def test_rehearsal_measures_every_model_and_a_training_run(tmp_path):
    meshes.require_cpu()
    rows = _run(tmp_path / "record.json", "--only", *OTHERS, "training", "--columns", *FEW)["rows"]
    assert list(rows) == [*OTHERS, "training"]
    for name, row in rows.items():
        assert list(row["columns"]) == FEW, name
        assert not [x for x in row["columns"].values() if "omitted" in x], name
    errors = [rows[name]["columns"][columns.IN_HALF]["gradient_error"] for name in OTHERS]
    assert 1e-5 < min(errors) < max(errors) < 0.05
    training = rows["training"]["columns"]
    assert [len(training[name]["losses"]) for name in FEW] == [accelerator.SMALLEST_TRAINING["steps"]] * 2
    assert training[columns.IN_HALF]["last_loss"] == pytest.approx(training[columns.REFERENCE]["last_loss"], rel=1e-3)


def test_a_run_that_is_killed_keeps_its_rows(tmp_path):
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "--rehearse", "--out", str(path)]
    command += ["--only", NETWORK, SCAN, "--columns", *FEW]
    process = subprocess.Popen(command, cwd=record.ROOT, stdout=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            if SCAN in record.read(path).get("rows", {}):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
    results = record.read(path)
    kept = results["rows"][NETWORK]["columns"]
    assert [len(kept[name]["seconds"]) for name in FEW] == [accelerator.ROUNDS[0]] * 2
    assert "clocks_at_end" not in results["about"]
    assert "ms" in cards.one(results, NETWORK)
    assert cards.side_by_side({"cut off": results})


def test_rows_without_time_are_omitted(tmp_path):
    rows = _run(tmp_path / "record.json", "--only", NETWORK, "training", "--minutes", "1e-9")["rows"]
    assert {row["omitted"] for row in rows.values()} == {f"TimeoutError: {accelerator.NO_TIME}"}


def test_a_column_that_fails_leaves_the_others(monkeypatch, tmp_path):
    def too_large(params, batch):
        raise MemoryError("no memory\nof this size")

    broken = columns.Column({}, "broken")
    monkeypatch.setitem(steps.METHODS, "broken", lambda job: (lambda params: (params, (), ()), too_large))
    monkeypatch.setitem(columns.COLUMNS, columns.IN_HALF, broken)
    found = _run(tmp_path / "record.json", "--only", NETWORK, "--columns", *FEW)["rows"][NETWORK]["columns"]
    assert found[columns.IN_HALF] == {"omitted": "MemoryError: no memory"}
    assert len(found[columns.REFERENCE]["seconds"]) == accelerator.ROUNDS[0]


def test_steps_that_apply_nothing_are_counted():
    """A run whose first steps overflow: the scale is backed off until a step is applied."""
    job = steps.make_job(steps.mlp(1, 8, 4), compute=jnp.float16)
    run, _ = timing.build(job, functools.partial(steps.functional, scaler=jmpscale.dynamic(2.0**24)))
    expected, _ = timing.build(job, steps.METHODS["constant scale"])
    gradient, skips, _ = accelerator.first_gradient(run)
    reference, none, _ = accelerator.first_gradient(expected)
    assert (skips > 0, none) == (True, 0)
    assert jmpscale.get_scaler(run.state[2]).total_skips == skips
    assert accelerator._relative_error(gradient, reference) < 2e-3


def test_batch_fits_the_memory():
    def needed(batch):
        task = steps.mlp(2, 16, batch)
        run = columns.COLUMNS[columns.REFERENCE].run(task)
        run.compile()
        return accelerator.needed_bytes(run.compiled, task[1])

    def make_task(batch):
        return steps.mlp(2, 16, batch)

    limit = needed(64) / accelerator.MEMORY_FRACTION
    assert accelerator.fit_batch(make_task, 512, None)[1] == 512
    assert accelerator.fit_batch(make_task, 512, limit)[1] == 64
    assert accelerator.fit_batch(make_task, 32, limit)[1] == 32
    with pytest.raises(MemoryError, match="a batch of 1 needs more than 80% of"):
        accelerator.fit_batch(make_task, 4, needed(1) / 2)


def test_turns_start_again_and_free_their_state():
    class Counted(timing.Run):
        started = 0

        def start(self):
            assert not [run for run in runs.values() if run.state is not None], "only one state is in memory"
            self.started += 1
            super().start()

    runs = {}
    for name in ("bare", "functional"):
        runs[name] = Counted(steps.make_job(steps.mlp(1, 8, 4)), steps.METHODS[name])
        runs[name].compile()
    rounds = list(itertools.islice(timing.take_turns(runs, 0, (4, 9)), 99))
    assert len(rounds) == 4
    assert all(set(taken) == set(runs) for taken, _ in rounds)
    assert [run.started for run in runs.values()] == [5, 5]  # one turn for the number of steps
    assert all(run.state is None for run in runs.values())


REPORT = """<testsuites><testsuite tests="3">
<testcase name="test_right"/><testcase name="test_wrong"><failure message="assert 1 == 2">...</failure></testcase>
<testcase name="test_of_two"><skipped message="needs 2 devices"/></testcase></testsuite></testsuites>"""


def test_report_of_the_tests_names_failures(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = accelerator.read_report(path)
    assert (found["passed"], found["failures"]) == (1, {"test_wrong": "assert 1 == 2"})
    assert found["skipped"] == {"test_of_two": "needs 2 devices"}
    assert cards.tests(found) == "1 tests passed, 1 failed: test_wrong, 1 skipped"


def test_tests_that_do_not_end_are_omitted():
    assert accelerator.run_tests(0.1) == {"omitted": "the tests did not end within 1 seconds"}


def test_command_fails_if_a_test_fails(monkeypatch, tmp_path):
    found = {"passed": 1, "failures": {"test_wrong": "assert 1 == 2"}, "skipped": {}, "seconds": 1}
    monkeypatch.setattr(accelerator, "run_tests", lambda seconds: found)
    arguments = ["--only", "tests", "--out", str(tmp_path / "record.json")]
    assert accelerator.main(arguments) == 1
    assert record.read(tmp_path / "record.json")["tests"] == found


def _record(device, seconds):
    times = {columns.FLOAT32: [2 * x for x in seconds], columns.CONSTANT: seconds, columns.WRAPPER: seconds[::-1]}
    moved = {columns.FLOAT32: 4000, columns.CONSTANT: 3000, columns.WRAPPER: 3000}
    found = {
        name: {"seconds": times[name], "steps": 5, "moved_bytes": moved[name], "temp_bytes": 10**9}
        | {"argument_bytes": 0, "gradient_error": 0.001}
        for name in times
    }
    about = {"device": device, "date": "2026-01-02", "command": "python -m benchmarks.accelerator", "seconds": 9}
    about |= {"commit": "abc", "versions": {"jax": "0.10", "optax": None}}
    return {"about": about, "tests": {"omitted": "no"}, "rows": {NETWORK: {"batch": 32, "columns": found}}}


def test_tables_compare_steps_of_one_round():
    results = _record("H100", [0.001, 0.002, 0.004])
    row = results["rows"][NETWORK]
    row["columns"][columns.WRAPPER]["seconds"] = [0.003, 0.001, 0.002]
    assert (
        cards.ratio(row, columns.WRAPPER, columns.CONSTANT) == 0.5
    )  # of 3, 0.5 and 0.5; of the medians, it would be 1
    assert cards.ratio(row, columns.WRAPPER, columns.FLOAT32, "moved_bytes") == 0.75
    line = next(line for line in cards.one(results, NETWORK).splitlines() if columns.CONSTANT in line)
    cells = "2.00 ms [1.50, 3.00] | 0.500 | 0.750 | 1.000 | 1.000 | 1.00 GB | 0.10%"
    assert line == f"| {columns.CONSTANT} | {cells} |"


def test_records_of_two_devices_stand_side_by_side():
    one, other = _record("H100", [0.001] * 3), _record("T4", [0.01] * 3)
    del other["rows"][NETWORK]["columns"][columns.WRAPPER]
    other["rows"]["U-Net"] = {"columns": {}, "omitted": "MemoryError: too small"}
    text = cards.side_by_side({"h100": one, "t4": other})
    assert "| H100: time |" in text
    assert "T4: error of gradients |" in text
    wrapper = next(line for line in text.splitlines() if line.startswith(f"| {columns.WRAPPER} |"))
    assert wrapper.count("|") == 2 + 2 * len(cards.HEAD)
    assert wrapper.endswith("| - " * len(cards.HEAD) + "|")
    assert "U-Net (T4): omitted: MemoryError: too small" in text
    assert text.count("measured on 2026-01-02") == 2
    assert text in cards.section({"h100": one, "t4": other})
    assert not cards.section({})


def test_quick_record_is_shown_only_without_another_one(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "FOLDER", tmp_path)
    for name, quick, device in [("h100", False, "H100"), ("h100-quick", True, "H100"), ("t4-quick", True, "T4")]:
        record.write(tmp_path / f"{name}.json", {"about": {"device": device, "quick": quick}})
    assert {name: x["about"]["quick"] for name, x in cards.read().items()} == {"H100": False, "T4": True}


def test_every_yardstick_is_a_column_and_differs():
    for name, yardstick in columns.YARDSTICKS.items():
        assert {name, yardstick} <= set(columns.COLUMNS)
        assert name != yardstick or name == columns.CONSTANT
        halves = {np.dtype(columns.COLUMNS[x].settings["compute"]) for x in (name, yardstick) if "_F32" not in name}
        assert len(halves) <= 1
