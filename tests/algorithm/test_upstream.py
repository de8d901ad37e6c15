"""The package reproduces recorded runs of other loss scalers, and unscales sparse gradients as PyTorch does.

The runs in `data` are runs of the original classes, transcriptions of their rules, or numbers of their own tests. If
the original has no limits, jmpscale has the widest valid ones: the scale stops at 2^-126 instead of 0, and at 2^126.
Unlike DeepSpeed (PR 8588), ColossalAI and mpx, it unscales by the scale that scaled the loss, not by the next one.

The page that compares libraries describes jmp, Flax and optax as they are installed.
"""

import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.experimental import sparse

import jmpscale

TESTS = pathlib.Path(__file__).parents[1]
TORCH = json.loads((TESTS / "data" / "torch_grad_scaler_traces.json").read_text())["traces"]
ORACLE = json.loads((TESTS / "data" / "oracle_traces.json").read_text())
PAGE = (TESTS.parent / "docs" / "schedules.md").read_text()

LOWEST, HIGHEST = 2.0**-126, 2.0**126
dynamic = functools.partial(jmpscale.dynamic, min_scale=LOWEST, max_scale=HIGHEST)
F16, F32 = jnp.float16, jnp.float32


@functools.partial(jax.jit, static_argnames="edit")
def _scan(scaler, finite, edit):
    def step(scaler, finite):
        scaler = edit(jmpscale.update(scaler, finite))
        return scaler, scaler

    return jax.lax.scan(step, scaler, finite)[1]


def _run(scaler, sequence, edit=lambda scaler: scaler):
    """Returns the scalers after each step of a sequence of G (finite) and B (overflow)."""
    # Padded, so that sequences of several lengths share one compilation.
    finite = np.array([letter == "G" for letter in sequence] + [True] * (-len(sequence) % 64))
    return jax.tree.map(lambda x: x[: len(sequence)], _scan(scaler, finite, edit))


# Scales are reproduced


@functools.cache
def _example(heading):
    """Returns the names that an example in the documentation defines."""
    [code] = re.findall(rf"^## {heading}$.*?^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    names = {"jmpscale": jmpscale, "jnp": jnp}
    exec(code, names)
    return names


def _run_of_row(scaler, note, sequence):
    """Returns the scalers after each step, with the change that the note on a framework requires."""
    if "late growth" in note:
        example = _example("Late growth")
        return _run(example["late_start"](scaler), sequence, example["late_growth"])
    if "hysteresis reset" in note:
        return _run(scaler, sequence, _example("Hysteresis reset")["reset_hysteresis"])
    return _run(scaler, sequence)


@pytest.mark.parametrize("trace", [TORCH[0], *(pytest.param(trace, marks=pytest.mark.full) for trace in TORCH[1:])])
def test_update_reproduces_recorded_runs_of_torch(trace):
    states = _run(dynamic(**trace["config"]), ["GB"[found_inf] for found_inf in trace["found_inf"]])
    assert states.loss_scale.tolist() == trace["scale_after"]
    assert states.finite_steps.tolist() == trace["growth_tracker_after"]


# The settings in the documentation reproduce recorded runs


def _settings_on_page():
    """Returns for each framework the function from its settings to its scaler, and the notes on the framework."""
    names = {"dynamic": jmpscale.dynamic, "math": math, "lowest": LOWEST, "highest": HIGHEST}
    found, function = {}, None
    table = PAGE.split("\n|---|---|---|---|\n")[1].split("\n\n")[0]
    for row in table.splitlines():
        framework, settings, arguments, notes = row.strip("| ").split(" | ")
        if "`" in settings:  # a row without code refers to the row before it
            signature, call = settings.split("`")[1], arguments.split("`")[1]
            function = eval(f"lambda {signature}: dynamic({call})", names)
        found[framework.replace("`", "")] = function, notes
    return found


# Other rules; obsolete scalers with the settings of another framework; and a scaler with the settings of torch.
NOT_ON_PAGE = {"fairseq, fp16_scale_tolerance above 0", "metaseq", "OpenSeq2Seq LogMaxScaler"}
NOT_ON_PAGE |= {"torch ShardedGradScaler", "NVIDIA apex amp", "NVIDIA apex fp16_utils", "OpenSeq2Seq BackoffScaler"}
SETTINGS = _settings_on_page()
RECORDED = [run for run in ORACLE["runs"] if run["from"] not in NOT_ON_PAGE]
DEFAULT = {"Megatron-LM", "DeepSpeed, without ZeRO", "Keras 3", "Paddle", "jmp", "Flax DynamicScale", "mpx"}


def test_settings_on_page_have_a_recorded_run_of_each_framework():
    assert SETTINGS.keys() == {run["from"] for run in RECORDED}


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.full] * (run["from"] not in DEFAULT)) for run in RECORDED],
    ids=lambda run: f"{run['from']} {run['trace']}",
)
def test_settings_on_page_reproduce_recorded_run(run):
    create, note = SETTINGS[run["from"]]
    scaler = create(**run["settings"])
    trace = ORACLE["traces"][run["trace"]]
    for name, scales in trace["scales"].items():
        end = trace.get("raises", {}).get(name, [None])[0]  # the original ends the run there, at its lowest scale
        states = _run_of_row(scaler, note, ORACLE["words"][name])
        assert states.loss_scale.tolist()[:end] == scales[:end]


# Gradients are reproduced


def _sparse(values, dtype, indices=((0, 2), (1, 0), (1, 2))):
    return sparse.BCOO((jnp.array(values, dtype), jnp.array(indices)), shape=(2, 3))


@pytest.mark.parametrize(
    ("values", "expected"),
    [((16, 16, 16), 4), *(pytest.param((16, 32, bad), None, marks=pytest.mark.full) for bad in (np.inf, np.nan))],
)
def test_unscale_and_check_accepts_sparse_gradients(values, expected):
    unscaled, finite = jmpscale.unscale_and_check(jmpscale.static(4), _sparse(values, F32))
    assert finite == (expected is not None)
    assert expected is None or (unscaled.data == expected).all()


@pytest.mark.full
def test_unscale_and_check_adds_sparse_duplicates_in_float32():
    grads = _sparse([64_000.0, 32.0, 64_000.0], F16, indices=((0, 2), (1, 0), (0, 2)))
    assert jnp.isinf(grads.todense()[0, 2]), "in float16 the sum must overflow, as in torch"
    unscaled, finite = jmpscale.unscale_and_check(jmpscale.static(1.0), grads)
    assert finite
    assert unscaled.todense().tolist() == [[0, 0, 128_000], [32, 0, 0]]


# The comparison describes other libraries

COMPARISON = (TESTS.parent / "docs" / "comparison.md").read_text()
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def _cell(row, library):
    """Returns the cell of the first table of the comparison for a property and a library."""
    rows = [line.strip("| ").split(" | ") for line in COMPARISON.splitlines() if line.startswith("| ")]
    [cells] = [cells for cells in rows if cells[0] == row]
    return cells[1 + rows[0].index(library)]  # the first cell of the head is empty


@pytest.mark.usefixtures("standard_promotion")
def test_jmp_has_the_smallest_and_the_largest_scale_of_the_comparison():
    assert _cell("smallest scale", "jmp") == "1 (configurable, except under `jit`)"

    def adjust(scaler, finite=False):
        return scaler.adjust(jnp.asarray(finite))

    scaler = jmp.DynamicLossScale(F32(0.5), min_loss_scale=F32(0.25))
    assert adjust(adjust(scaler)).loss_scale == 0.25
    assert jax.jit(adjust)(scaler).loss_scale == 1
    assert _cell("largest scale", "jmp") == "3.4e38"
    largest = jmp.DynamicLossScale(F32(2.0**127), period=1)
    assert adjust(largest, finite=True).loss_scale == 2.0**127, "the next power of two is infinite"


def _flax_grads(scaler, axis_name=None):
    def grads(factor):
        return scaler.value_and_grad(lambda w: factor * w, axis_name=axis_name)(F32(1))

    return grads


def test_flax_has_the_smallest_and_the_largest_scale_of_the_comparison():
    assert _cell("smallest scale", "Flax `DynamicScale`") == "2^-126 (configurable)"
    assert DynamicScale().minimum_scale == 2.0**-126
    assert _cell("largest scale", "Flax `DynamicScale`") == "3.4e38"
    scaler, *_ = _flax_grads(DynamicScale(growth_interval=0, scale=F32(2.0**127)))(F32(0.25))
    assert scaler.scale == LARGEST_FLOAT32


@pytest.mark.full
def test_flax_averages_the_gradients_of_different_parameters():
    cell = _cell("with parameters sharded by hand under `shard_map`", "Flax `DynamicScale`")
    assert cell == "devices diverge; with `axis_name`, it averages the gradients of different parameters"
    factors = jnp.array([1.0, 3.0])
    apart, together = (
        jax.vmap(_flax_grads(DynamicScale(), axis_name), axis_name="devices")(factors)
        for axis_name in (None, "devices")
    )
    assert apart[3].tolist() == [1, 3]
    assert together[3].tolist() == [2, 2]


def test_apply_if_finite_applies_an_update_that_is_not_finite():
    cell = _cell("after many skips", "optax `apply_if_finite`")
    assert cell == "applies a non-finite update after `max_consecutive_errors` skips"
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    state, applied = tx.init(F32(1)), []
    for _ in range(3):
        updates, state = tx.update(F32(jnp.nan), state)
        applied.append(not jnp.isfinite(updates))
    assert applied == [False, False, True]
