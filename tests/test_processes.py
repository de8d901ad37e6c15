"""Two and four real processes: an overflow on the last one, a process that dies, a checkpoint written by all."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).parent / "worker.py"
SCALES = [2.0**n for n in (10, 9, 8, 8, 9, 9, 8, 8)]
LIMIT = 120
FULL = pytest.mark.full  # each process takes seconds to start


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(scenario, processes, folder):
    """Starts the processes, waits for all, and leaves none behind; returns exit code, output and errors of each."""
    address = f"127.0.0.1:{_free_port()}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, WORKER, scenario, address, str(processes), str(number), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for number in range(processes)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        ended = [(p, *p.communicate(timeout=max(0.1, deadline - time.monotonic()))) for p in started]
        return [(p.returncode, out, err) for p, out, err in ended]
    finally:
        for p in started:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def _results(scenario, processes, folder):
    ended = _run(scenario, processes, folder)
    assert all(code == 0 for code, _, _ in ended), ended
    results = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    for result in results:
        assert result["scaler"] == results[0]["scaler"]
        assert result["scales"] == results[0]["scales"]
    params = {place: bits for result in results for place, bits in result["params"].items()}
    assert sorted(map(int, params)) == [0, 2, 4, 6]
    return params, results[0]["scaler"], results[0]["scales"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The uninterrupted run in one process."""
    params, scaler, scales = _results("train", 1, tmp_path_factory.mktemp("alone"))
    assert scales == SCALES
    return params, scaler


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The run in two processes, which write a checkpoint together half way, and the folder of that."""
    folder = tmp_path_factory.mktemp("together")
    return *_results("train", 2, folder), folder


def _assert_the_run(params, scaler, scales, alone):
    assert scales == SCALES
    assert scaler == alone[1]
    assert params == alone[0], "bit for bit what one process computes on the same four devices"


def test_an_overflow_on_the_last_process_skips_the_step_on_all(alone, together):
    *results, _ = together
    _assert_the_run(*results, alone)


@FULL
@pytest.mark.once
def test_an_overflow_on_the_last_of_four_processes_skips_the_step_on_all(alone, tmp_path):
    _assert_the_run(*_results("train", 4, tmp_path), alone)


@FULL
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.once)])
def test_a_process_that_raises_ends_the_others_with_an_error(processes, tmp_path):
    begun = time.monotonic()
    ended = _run("raise", processes, tmp_path)
    assert all(code != 0 for code, _, _ in ended), ended
    assert "fails in the middle of the run" in ended[-1][2]
    assert time.monotonic() - begun < 60, "bounded by the heartbeat, not by a hang"


@pytest.mark.parametrize("readers", [1, pytest.param(2, marks=FULL), pytest.param(4, marks=FULL)])
def test_a_checkpoint_written_by_two_is_resumed_bit_for_bit(readers, alone, together):
    params, scaler, after = _results("resume", readers, together[-1])
    assert after == SCALES[len(SCALES) // 2 :]
    assert (params, scaler) == alone
