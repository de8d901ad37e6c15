"""`to_torch_state_dict` and `from_torch_state_dict` continue runs of `torch.amp.GradScaler`.

`data/torch_state_dicts.json` was recorded by `benchmarks/torch_state_dicts.py` with torch.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import jmpscale

TORCH = json.loads((pathlib.Path(__file__).parents[1] / "data" / "torch_state_dicts.json").read_text())
RUNS = TORCH["runs"]
SAVED = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
# Settings that torch lacks, so they are lost. Only a dynamic scaler has settings, so the mode is known.
NOT_IN_TORCH = {"mode", "hysteresis", "hysteresis_reset", "min_scale", "max_scale"}


@jax.jit
def _scan(scaler, found_inf):
    def step(scaler, found_inf):
        scaler = jmpscale.update(scaler, ~found_inf)
        return scaler, scaler.loss_scale

    return jax.lax.scan(step, scaler, found_inf)


@pytest.mark.parametrize("name", RUNS)
def test_from_torch_state_dict_continues_run_of_torch(name):
    run = RUNS[name]
    scaler = jmpscale.from_torch_state_dict(run["state_dict"])
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict"]
    assert (scaler.config.min_scale, scaler.config.max_scale) == (2.0**-126, 2.0**126)
    scaler, scales = _scan(scaler, jnp.array(run["found_inf"], bool))
    assert scales.tolist() == run["scales"]
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict_after"]


def test_to_torch_state_dict_returns_python_numbers():
    saved = jmpscale.to_torch_state_dict(jmpscale.from_torch_state_dict(SAVED))
    assert saved == SAVED
    assert {name: type(value) for name, value in saved.items()} == {name: type(value) for name, value in SAVED.items()}


def test_to_torch_state_dict_of_a_disabled_scaler_is_empty_as_in_torch():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.disabled())
    assert jmpscale.to_torch_state_dict(jmpscale.disabled()) == jmpscale.to_torch_state_dict(tx.init(1.0)) == {}


def test_to_torch_state_dict_exports_each_setting_that_torch_has():
    exported = jmpscale.to_torch_state_dict(jmpscale.dynamic()).keys() - {"scale", "_growth_tracker"}
    settings = {field.name for field in dataclasses.fields(jmpscale.ScalerConfig)}
    assert exported == settings - NOT_IN_TORCH, "a new setting is exported, or listed in NOT_IN_TORCH"
    assert settings >= NOT_IN_TORCH


def test_from_torch_state_dict_grows_after_a_lowered_interval():
    run = TORCH["lowered_interval"]
    first_overflow = run["found_inf"].index(1)
    assert set(run["scales"][:first_overflow]) == {run["state_dict"]["scale"]}, "torch must not grow before an overflow"
    scaler = jmpscale.update(jmpscale.from_torch_state_dict(run["state_dict"]), True)
    assert scaler.loss_scale == 2 * run["state_dict"]["scale"]


def test_to_torch_state_dict_exports_a_tracker_from_which_torch_can_grow():
    """torch never grows a scale whose tracker has passed its interval."""
    scaler = jmpscale.dynamic(1024.0)._replace(finite_steps=jnp.int32(500))
    saved = jmpscale.to_torch_state_dict(scaler._replace(config=jmpscale.ScalerConfig(growth_interval=10)))
    assert saved["_growth_tracker"] == 9
    assert jmpscale.update(jmpscale.from_torch_state_dict(saved), True).loss_scale == 2048.0
    late = jmpscale.dynamic()._replace(finite_steps=jnp.int32(-1))  # a schedule that grows one step later
    assert jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(late)).finite_steps == -1


@pytest.mark.parametrize("limit", [0.7, 0.3, 1.1, 2.0, 2.0**-126, 2.0**126])
def test_from_torch_state_dict_accepts_rounded_limits(limit):
    """A scale at its limit was saved as the nearest float32 number, which may be outside the limit."""
    limits = {"min_scale": limit, "max_scale": limit}
    scaler = jmpscale.dynamic(limit, **limits)
    assert jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(scaler), **limits) == scaler
