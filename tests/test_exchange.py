"""The state dicts of torch's GradScaler, in both directions."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

GOOD = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
TRACES = json.loads((pathlib.Path(__file__).parent / "data" / "torch_grad_scaler_traces.json").read_text())["traces"]


def test_to_and_from_torch_state_dict_are_inverse():
    state = jmpscale.from_torch_state_dict(GOOD)
    assert jmpscale.to_torch_state_dict(state) == GOOD
    assert all(type(value) in (int, float) for value in jmpscale.to_torch_state_dict(state).values())


@pytest.mark.parametrize("index", range(0, len(TRACES), 7))
def test_from_torch_state_dict_continues_a_run_of_torch(index):
    trace = TRACES[index]
    half = len(trace["found_inf"]) // 2
    saved = {name: trace["config"][name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    saved |= {"scale": trace["scale_after"][half - 1], "_growth_tracker": trace["growth_tracker_after"][half - 1]}
    state = jmpscale.from_torch_state_dict(saved)
    for found_inf, scale in zip(trace["found_inf"][half:], trace["scale_after"][half:], strict=True):
        state = jmpscale.update(state, not found_inf)
        assert float(state.loss_scale) == scale


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_torch_continues_with_the_same_scales(direction):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=4)
    scaler.scale(torch.zeros(()))  # creates the state
    state = jmpscale.dynamic(4096.0, growth_interval=4, min_scale=2.0**-126, max_scale=2.0**126)
    word = np.random.default_rng(0).random(100) < 0.7
    for step, finite in enumerate(word):
        if step == 50 and direction == "to torch":
            scaler.load_state_dict(jmpscale.to_torch_state_dict(state))
        if step == 50 and direction == "from torch":
            state = jmpscale.from_torch_state_dict(scaler.state_dict())
        state = jmpscale.update(state, bool(finite))
        tracker, scale = scaler._growth_tracker, scaler._scale
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), 2.0, 0.5, 4)
        assert float(state.loss_scale) == scaler.get_scale()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": None}, TypeError, r"mapping\['scale'\] must be a Python number, got None"),
        ({"scale": 0.0}, ValueError, r"mapping\['scale'\] must be between"),
        ({"scale": float("inf")}, ValueError, r"mapping\['scale'\] must be between"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor must be above 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be between"),
        ({"_growth_tracker": -1}, ValueError, r"mapping\['_growth_tracker'\] must be between 0 and 2147483647, got -1"),
        ({"_growth_tracker": 1.5}, TypeError, r"mapping\['_growth_tracker'\] must be an integer, got 1\.5"),
        ({"_growth_tracker": True}, TypeError, r"mapping\['_growth_tracker'\] must be an integer, got True"),
        ({"extra": 1}, ValueError, r"missing \[\], unexpected \['extra'\]"),
    ],
)
def test_from_torch_state_dict_refuses_an_invalid_value(change, error, message):
    with pytest.raises(error, match=message):
        jmpscale.from_torch_state_dict(GOOD | change)


def test_from_torch_state_dict_refuses_other_mappings():
    with pytest.raises(ValueError, match=r"missing \['scale'\], unexpected \[\]"):
        jmpscale.from_torch_state_dict({name: value for name, value in GOOD.items() if name != "scale"})
    with pytest.raises(ValueError, match="saved by a disabled GradScaler"):
        jmpscale.from_torch_state_dict({})
    with pytest.raises(TypeError, match="mapping must be the result of"):
        jmpscale.from_torch_state_dict(None)


@pytest.mark.parametrize("make", [lambda: jmpscale.static(8.0), jmpscale.disabled])
def test_to_torch_state_dict_refuses_modes_that_torch_lacks(make):
    with pytest.raises(
        ValueError, match=r"state must be dynamic to become a torch state dict, got mode '(static|disabled)'"
    ):
        jmpscale.to_torch_state_dict(make())


def test_from_torch_state_dict_takes_the_limits_of_the_caller():
    state = jmpscale.from_torch_state_dict(GOOD, min_scale=512.0, max_scale=2048.0)
    for _ in range(5):
        state = jmpscale.update(state, jnp.array(False))
    assert state.loss_scale == 512.0


@pytest.mark.parametrize("limit", [0.7, 0.3, 1.1, 3.0, 2.0**-126, 2.0**126])
def test_from_torch_state_dict_accepts_a_limit_that_float32_has_rounded(limit):
    state = jmpscale.dynamic(limit, min_scale=limit, max_scale=limit)
    saved = jmpscale.to_torch_state_dict(state)
    back = jmpscale.from_torch_state_dict(saved, min_scale=limit, max_scale=limit)
    assert back == state
    for outside in (1 - 1e-6, 1 + 1e-6):
        with pytest.raises(ValueError, match=r"mapping\['scale'\] must be between .* The limits are min_scale and"):
            jmpscale.from_torch_state_dict(saved | {"scale": limit * outside}, min_scale=limit, max_scale=limit)


def test_from_torch_state_dict_allows_the_rounding_to_float32_and_no_more():
    saved = jmpscale.to_torch_state_dict(jmpscale.dynamic(2.0))
    for outside, limits in ((2 + 2.0**-22, {"max_scale": 2.0}), (2 - 2.0**-22, {"min_scale": 2.0})):
        with pytest.raises(ValueError, match=r"mapping\['scale'\] must be between"):
            jmpscale.from_torch_state_dict(saved | {"scale": outside}, **limits)
        rounded = 2 + (outside - 2) / 4
        assert jmpscale.from_torch_state_dict(saved | {"scale": rounded}, **limits).loss_scale == np.float32(rounded)
