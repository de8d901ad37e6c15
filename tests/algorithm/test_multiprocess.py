"""Processes that jax.distributed connects skip together, resume, end if one fails, diagnose the same, and compare."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jmpscale

import meshes
import worker

SCALES = [2.0**n for n in (10, 9, 8, 8, 7, 7)]
full = pytest.mark.full  # each process takes seconds to start


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(scenario, processes, folder):
    """Runs the processes to their end; returns each process with its output and its errors."""
    address = f"127.0.0.1:{_free_port()}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(pathlib.Path(jmpscale.__file__).parent.parent)  # the package under test
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = []
    try:
        for number in range(processes):
            command = [sys.executable, worker.__file__, scenario, address, str(processes), str(number), str(folder)]
            started.append(subprocess.Popen(command, env=environment, **pipes))
        return [(process, *process.communicate(timeout=300)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def _outcome(scenario, processes, folder):
    """Returns the results, which must be equal on all processes, and the shards of all processes."""
    ended = _run(scenario, processes, folder)
    assert all(process.returncode == 0 for process, _, _ in ended), [errors for _, _, errors in ended]
    outcomes = [json.loads(output.splitlines()[-1]) for _, output, _ in ended]
    shards = {start: shard for outcome in outcomes for start, shard in outcome.pop("shards").items()}
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0] | {"shards": shards}


@pytest.fixture(scope="module")
def single_process():
    """The outcome in a single process, on the same number of devices."""
    meshes.require_devices(4)
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        return worker.train()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder with a checkpoint that two processes have written together, and the outcome of their run."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, _outcome("save", 2, folder)


@full
def test_overflow_on_one_process_skips_the_step_on_all(single_process, saved):
    assert single_process["scales"] == SCALES
    assert saved[1] == single_process


@full
@pytest.mark.parametrize("readers", [1, 4])
def test_checkpoint_of_two_processes_resumes_on_any_number(readers, single_process, saved):
    assert _outcome("resume", readers, saved[0]) == single_process | {"scales": SCALES[len(SCALES) // 2 :]}


@full
def test_process_that_raises_ends_the_others(tmp_path):
    ended = _run("raise", 2, tmp_path)
    assert all(process.returncode != 0 for process, _, _ in ended), ended
    assert "fails in the middle of the run" in ended[-1][2]


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The results of the tools on each of two processes, by the name of the tool."""
    ended = _run("tools", 2, tmp_path_factory.mktemp("tools"))
    assert all(process.returncode == 0 for process, _, _ in ended), [errors for _, _, errors in ended]
    results = [json.loads(output.splitlines()[-1]) for _, output, _ in ended]
    return {name: [result[name] for result in results] for name in results[0]}


@full
def test_diagnose_has_the_same_result_on_all_processes(tools):
    first, second = tools["diagnose"]
    assert first == second
    alone = worker.diagnose(lambda x, spec: jnp.array(x))
    for (description, fitting), begins, (_, expected) in zip(first, worker.FAULTS.values(), alone, strict=True):
        assert description.startswith(begins)
        assert fitting == (expected and list(expected))


@full
def test_diagnose_step_has_the_same_result_on_all_processes(tools):
    first, second = tools["diagnose_step"]
    assert first == second
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        alone = worker.diagnose_step(lambda x, spec: jnp.array(x))
    for (_, changes), (_, expected) in zip(first, alone, strict=True):
        assert [name for name, _ in changes] == [name for name, _ in expected]
        errors, expected_errors = ([error for _, error in found] for found in (changes, expected))
        assert errors == pytest.approx(expected_errors, rel=0.05, abs=0.01)  # sums over devices round differently
    (in_float32, _), (in_bfloat16, changes) = first
    assert " loses " not in in_float32
    assert in_bfloat16.startswith("Even with the right gradients, the update loses ")
    assert dict(changes)["w"] > 0.8


@full
def test_assert_replicated_raises_on_all_processes_or_on_none(tools):
    first, second = tools["compare"]
    expected = {name: words for name, (_, words) in worker.TREES.items()} | {
        "replicated": "tree['w'] differs between the processes 0 and 1.",
        "a copy of each shard on each process": "tree['w'] differs between the processes 0 and 1.",
        "a device of process 1": "tree['w'] differs between devices: 0.0 on ",
        "check_step": "Build the state and the batch on jax.local_devices()",
    }
    for name, words in expected.items():
        for error in (first[name], second[name]):
            assert error is None if words is None else words in (error or ""), (name, error)
