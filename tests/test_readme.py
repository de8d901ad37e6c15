"""Every code block of the README runs as it stands, and its two commands say what the project can do."""

import pathlib
import re

import jax.numpy as jnp
import pytest

import jmpscale

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


@pytest.mark.usefixtures("standard_promotion")
def test_every_python_block_runs_after_those_before_it():
    namespace = {}
    for number, code in enumerate(PYTHON):
        exec(compile(code, f"README.md, python block {number + 1}", "exec"), namespace)
    assert len(PYTHON) >= 2


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("last", [0, 1], ids=["functional", "optax"])
def test_the_train_steps_train(last):
    namespace = {}
    for code in PYTHON[: last + 1]:
        exec(code, namespace)
    loss = namespace["loss_fn"](namespace["params"], namespace["batch"])
    assert loss < 0.7 * namespace["loss_fn"]({"w": jnp.full((3, 1), 0.1)}, namespace["batch"])
    scaler = jmpscale.get_scaler(namespace["opt_state"]) if last else namespace["scaler"]
    assert int(scaler.good_steps) == 100 - int(scaler.skipped)


def test_it_is_short_and_has_the_two_commands():
    assert TEXT.count("\n") <= 170
    commands = [code for language, code in BLOCKS if language == "bash"]
    assert any("-m jmpscale" in command for command in commands)
    assert any("-m pytest" in command for command in commands)
