"""A run that is killed, while it saves or between two steps, continues as though it had never stopped."""

import pathlib
import signal

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop

from checkpointing import example, same
from children import end, start

pytestmark = [pytest.mark.full, pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]
HERE = pathlib.Path(__file__).parent

IN_ORBAX = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(100, exit=True)  # never hang
sys.path.insert(0, sys.argv[1])
import pages
definitions, _ = pages.examples("guides/checkpoints")["Orbax"].split("folder = ")
exec(definitions, page := {})

def make_batch(step):
    print(step, flush=True)
    if step == 8:
        sys.stdin.readline()  # until killed
    return page["make_batch"](step)

if sys.argv[3] == "while saving":
    for name in ("rename", "replace"):
        def and_die(source, target, *args, rename=getattr(os, name), **kwargs):
            if os.path.basename(target) == "6":
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(source, target, *args, **kwargs)
        setattr(os, name, and_die)
page["train"](sys.argv[2], 14, make_batch)
"""


@pytest.mark.parametrize("when", ["while saving", "between two steps"])
def test_a_killed_run_resumes_from_orbax(when, tmp_path):
    train, killed = example("Orbax")["train"], tmp_path / "killed"
    child = start("-c", IN_ORBAX, HERE, killed, when)
    try:
        whole = train(tmp_path / "whole", 14)
        for line in child.stdout:
            if line == "8\n" and when == "between two steps":
                child.kill()
    finally:
        _, errors = end(child)
    assert child.returncode == -signal.SIGKILL, errors
    with ocp.CheckpointManager(killed) as manager:
        steps = manager.all_steps()
    assert steps in ([3], [3, 6]) if when == "between two steps" else steps == [3]
    seen = []

    def make_batch(step):
        seen.append(step)
        return example("Orbax")["make_batch"](step)

    assert same(train(killed, 14, make_batch), whole)
    assert seen[0] == max(steps)


def _batch(step):
    x = np.random.default_rng(step).standard_normal((4, 8)).astype(np.float16)
    return jnp.asarray(x), jnp.full((4, 1), 30.0)


def train_to_file(path, steps, at_step=lambda step: None):
    """Trains with the guide's functions for Flax; continues from the file if there is one; saves every third step."""
    page = example("Flax")
    state = page["state"]
    if path.exists():
        state = page["load"](path, state)
    for step in range(int(state.step), steps):
        at_step(step)
        state, _ = page["train_step"](state, *_batch(step))
        if (step + 1) % 3 == 0:
            page["save"](path, state)
    return state


IN_A_FILE = """
import faulthandler, os, pathlib, signal, sys
faulthandler.dump_traceback_later(100, exit=True)  # never hang
sys.path.insert(0, sys.argv[1])
import test_killed_runs

def and_die(file):
    os.ftruncate(file, os.fstat(file).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

def at_step(step):
    if step == 5:
        os.fsync = and_die  # the save after this step is the second

test_killed_runs.train_to_file(pathlib.Path(sys.argv[2]), 12, at_step)
"""


def test_a_killed_run_resumes_from_its_msgpack_file(tmp_path):
    child = start("-c", IN_A_FILE, HERE, tmp_path / "killed")
    try:
        whole = train_to_file(tmp_path / "whole", 12)
    finally:
        _, errors = end(child)
    assert child.returncode == -signal.SIGKILL, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "killed.part", "whole"]
    assert int(jmpscale.get_scaler(whole).skipped) > 0
    seen = []
    resumed = train_to_file(tmp_path / "killed", 12, seen.append)
    assert seen[0] == 3, "half of the second checkpoint has not replaced the first"
    for part in ("step", "params", "opt_state"):
        assert_step_is_noop(getattr(whole, part), getattr(resumed, part))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"], "the next save cleans up"
