"""A checkpoint of PyTorch continues in jmpscale, and the reverse, with the same scales at each step."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

from checkpointing import orbax

HERE = pathlib.Path(__file__).parent
TORCH = json.loads((HERE / "data" / "torch_state_dicts.json").read_text())

_update = jax.jit(jmpscale.update)


@pytest.mark.parametrize("name", TORCH["runs"])
def test_from_torch_state_dict_continues_with_the_scales_of_torch(name):
    run = TORCH["runs"][name]
    scaler, scales = jmpscale.from_torch_state_dict(run["state_dict"]), []
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict"]
    for found_inf in run["found_inf"]:
        scaler = _update(scaler, jnp.array(not found_inf))
        scales.append(float(scaler.loss_scale))
    assert len(scales) == 100
    assert scales == run["scales"]
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict_after"]


def test_the_recorded_runs_cover_growth_backoff_and_factors_other_than_two():
    ups, downs = 0, 0
    for run in TORCH["runs"].values():
        signs = np.sign(np.diff([run["state_dict"]["scale"], *run["scales"]])).tolist()
        ups, downs = ups + (1 in signs), downs + (-1 in signs)
    assert (ups, downs) == (6, 6)
    assert {run["state_dict"]["growth_factor"] for run in TORCH["runs"].values()} == {2.0, 1.5, 4.0, 1.25}


def test_a_state_from_torch_survives_orbax(tmp_path):
    run = TORCH["runs"]["growth 1.5, backoff 0.75"]
    scaler = jmpscale.from_torch_state_dict(run["state_dict"])
    for found_inf in run["found_inf"][:50]:
        scaler = _update(scaler, jnp.array(not found_inf))
    scaler = orbax(tmp_path, scaler, jmpscale.from_torch_state_dict(run["state_dict"]))
    for found_inf in run["found_inf"][50:]:
        scaler = _update(scaler, jnp.array(not found_inf))
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict_after"]


def test_from_torch_state_dict_refuses_that_of_a_disabled_scaler():
    assert TORCH["disabled"] == {}
    with pytest.raises(ValueError, match="saved by a disabled GradScaler"):
        jmpscale.from_torch_state_dict(TORCH["disabled"])


def test_from_torch_state_dict_with_an_interval_below_the_tracker_grows_where_torch_waits():
    run = TORCH["lowered_interval"]
    tracker, interval = run["state_dict"]["_growth_tracker"], run["state_dict"]["growth_interval"]
    assert tracker >= interval
    first_overflow = run["found_inf"].index(1)
    assert set(run["scales"][:first_overflow]) == {run["state_dict"]["scale"]}
    scaler = jmpscale.update(jmpscale.from_torch_state_dict(run["state_dict"]), True)
    assert scaler.loss_scale == 2 * run["state_dict"]["scale"]


@pytest.fixture
def recorder():
    """The script that recorded torch, with torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    spec = importlib.util.spec_from_file_location("recorder", HERE / "data" / "record_torch_state_dicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = torch
    return module


@pytest.mark.parametrize("name", TORCH["runs"])
def test_torch_repeats_the_recorded_runs(name, recorder):
    seed = list(recorder.RUNS).index(name)
    assert recorder.record(*recorder.RUNS[name], seed) == TORCH["runs"][name]


@pytest.mark.parametrize("name", TORCH["runs"])
def test_to_torch_state_dict_continues_in_torch(name, recorder):
    run = TORCH["runs"][name]
    settings = {name: run["state_dict"][name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    scaler = jmpscale.dynamic(2.0**10, **settings, min_scale=2.0**-126, max_scale=2.0**126)
    for found_inf in run["found_inf"][:13]:
        scaler = _update(scaler, jnp.array(not found_inf))
    theirs = recorder.torch.amp.GradScaler("cpu")
    theirs.load_state_dict(jmpscale.to_torch_state_dict(scaler))
    assert theirs.state_dict() == jmpscale.to_torch_state_dict(scaler)
    scales = []
    for found_inf in run["found_inf"]:
        scaler = _update(scaler, jnp.array(not found_inf))
        scales.append(float(scaler.loss_scale))
    assert recorder.follow(theirs, run["found_inf"]) == scales
    assert theirs.state_dict() == jmpscale.to_torch_state_dict(scaler)


def test_a_disabled_scaler_of_torch_saves_nothing_and_loads_anything(recorder):
    disabled = recorder.torch.amp.GradScaler("cpu", enabled=False)
    assert disabled.state_dict() == TORCH["disabled"]
    disabled.load_state_dict(jmpscale.to_torch_state_dict(jmpscale.dynamic()))
    assert disabled.state_dict() == {}
