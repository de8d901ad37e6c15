"""The recorded runs of other loss scalers, and the numbers of their own tests, against jmpscale.

The tables of `docs/moving/conformance.md` state for each upstream test whether it is reproduced, deliberately answered
better, or does not apply; those of `docs/moving/index.md` state which settings reproduce which framework. This module
reads both: a row without a test fails, and so does a test without a row. `test_moving.py` compares programs that move
from a framework to jmpscale. Upstream tests of another module's subject are ported there, and the table names them.

torch and others have no lower limit. Each port states its `min_scale`. A scale outside [2^-126, 2^126] is moved to the
nearest valid one, and the port says so.
"""

import ast
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop, inject_backward

import pages
import test_torch_cases as torch_cases

pytestmark = [
    pytest.mark.full,  # torch's rule, which is that of jmpscale, is in test_torch_cases.py and test_update.py
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion"),  # optax, Flax and jmp rely on it
    pytest.mark.filterwarnings("ignore:jax.interpreters.batching.NotMapped"),  # Equinox does on JAX 0.7
]

TESTS = pathlib.Path(__file__).parent
ORACLE = json.loads((TESTS / "data" / "oracle_traces.json").read_text())
NO_FLOOR, NO_CEILING = 2.0**-126, 2.0**126
LONGEST = max(map(len, ORACLE["words"].values()))


def _table(page, heading):
    """Returns the rows of the first table under a heading of a page, as dicts."""
    section = (pages.DOCS / f"{page}.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def _plain(cell):
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).replace("`", "")


def _evaluate(code, names):
    return eval(code.strip("`"), {"jmpscale": jmpscale, "math": math}, names)


def _scan(scaler, finite, edit=lambda scaler: scaler):
    """Returns the scalers after each step."""

    def body(scaler, finite):
        scaler = edit(jmpscale.update(scaler, finite))
        return scaler, scaler

    return jax.lax.scan(body, scaler, jnp.array(finite))[1]


_jitted_scan = jax.jit(_scan, static_argnames="edit")


def _run(scaler, word, edit=lambda scaler: scaler):
    """Returns the scalers after each step of a word of G (finite) and B (overflow)."""
    # Padded, so that the words of all lengths share one compilation.
    states = _jitted_scan(scaler, [letter == "G" for letter in word.ljust(LONGEST)], edit=edit)
    return jax.tree.map(lambda x: x[: len(word)], states)


# --- The table of settings: each row against recorded runs of its original ---

SETTINGS = {_plain(row["From"]): row for row in _table("moving/index", "The table of settings")}
NOT_FOLLOWED = {_plain(row["From"]): row for row in _table("moving/index", "What no settings follow")}


def _scaler_of_row(name, settings):
    """Creates the scaler of a row of the table, with its defaults except for the given settings."""
    row = SETTINGS[name]
    defaults = _evaluate(f"dict({row['Its settings and their defaults'].strip('`')})", {})
    assert settings.keys() <= defaults.keys()
    return _evaluate(row["In jmpscale"], defaults | settings)


_example = functools.cache(pages.run)


def _edits_of_row(name):
    """Returns the changes that a row adds to the settings: to the first scaler, and to the scaler after each step."""
    if "(#late-growth)" in SETTINGS[name]["Besides"]:
        example = _example("moving/index", "Late growth")
        return example["late_start"], example["late_growth"]
    if "(#fresh-hysteresis)" in SETTINGS[name]["Besides"]:
        return _unchanged, _example("moving/index", "Fresh hysteresis")["fresh_hysteresis"]
    return _unchanged, _unchanged


def _unchanged(scaler):
    return scaler


def _first_stop(start, states, word):
    """Returns the step at which `stop_at_floor`, in the same row as the settings, ends the run; None if none does."""
    stop_at_floor = _example("moving/index", "Stop at the floor")["stop_at_floor"]
    before = start
    for i in range(len(word)):
        after = jax.tree.map(lambda x, i=i: x[i], states)
        try:
            stop_at_floor(before, after)
        except FloatingPointError:
            return i + 1
        before = after
    return None


def _name_of_run(run):
    return f"{run['from']} {run['trace']} " + " ".join(f"{name}={value}" for name, value in run["settings"].items())


FOLLOWED = {_name_of_run(run): run for run in ORACLE["runs"] if run["from"] not in NOT_FOLLOWED}


@pytest.mark.parametrize("run", FOLLOWED.values(), ids=FOLLOWED)
def test_each_row_of_the_table_follows_its_original(run):
    start, edit = _edits_of_row(run["from"])
    scaler = start(_scaler_of_row(run["from"], run["settings"]))
    trace = ORACLE["traces"][run["trace"]]
    for name, scales in trace["scales"].items():
        word = ORACLE["words"][name]
        states = _run(scaler, word, edit)
        end = len(word)
        if "raises" in trace:  # the original ends the run there, although the record continues
            assert "(#stop-at-the-floor)" in SETTINGS[run["from"]]["Besides"]
            end = trace["raises"].get(name, [None])[0]
            assert _first_stop(scaler, states, word) == end
        assert states.loss_scale.tolist()[:end] == scales[:end]


def test_each_row_of_the_table_has_a_run_and_valid_defaults():
    recorded = {run["from"] for run in ORACLE["runs"]}
    assert recorded == SETTINGS.keys() | NOT_FOLLOWED.keys()
    assert not SETTINGS.keys() & NOT_FOLLOWED.keys()
    for name, row in SETTINGS.items():
        assert _scaler_of_row(name, {}).config.mode == "dynamic"
        assert "min_scale=" in row["In jmpscale"], "torch has no lower limit: each row states one"
        assert "max_scale=" in row["In jmpscale"]


def _first_difference(run, scaler):
    for name, scales in ORACLE["traces"][run["trace"]]["scales"].items():
        word = ORACLE["words"][name]
        for i, (theirs, ours) in enumerate(zip(scales, _run(scaler, word).loss_scale.tolist(), strict=True)):
            if theirs != ours:
                return f"`{word}`, step {i + 1}: {theirs:g}, here {ours:g}"
    return None


@pytest.mark.parametrize("run", [run for run in ORACLE["runs"] if run["from"] in NOT_FOLLOWED], ids=_name_of_run)
def test_an_unsupported_schedule_differs_first_where_the_page_says(run):
    row = NOT_FOLLOWED[run["from"]]
    assert _first_difference(run, _evaluate(row["Nearest"], run["settings"])) == row["First difference"]
    assert row["Rule"]


def _random_word(length, seed=0):
    return np.random.default_rng(seed).random(length) < 0.7


def test_jmp_itself_agrees():
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")
    settings = {"loss_scale": 64.0, "period": 3, "factor": 2, "min_loss_scale": 0.25}
    finite = _random_word(100)

    def step(carry, flag):
        # Created in each step, because jmp loses its lower limit when JAX flattens its state.
        after = jmp.DynamicLossScale(*carry, period=3, factor=2, min_loss_scale=jnp.float32(0.25)).adjust(flag)
        return (after.loss_scale, after.counter), (after.loss_scale, after.counter)

    _, theirs = jax.lax.scan(step, (jnp.float32(64.0), jnp.int32(0)), finite)
    states = _scan(_scaler_of_row("jmp", settings), finite)
    chex.assert_trees_all_equal((states.loss_scale, states.finite_steps), theirs)
    assert min(states.loss_scale.tolist()) == 0.25, "the lower limit must be reached"


@pytest.mark.parametrize("backoff_factor", [0.5, 0.25])
def test_flax_itself_agrees(backoff_factor):
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale", reason="Flax is not installed")
    settings = {"scale": 64.0, "growth_interval": 3, "backoff_factor": backoff_factor, "minimum_scale": 0.5}
    finite = _random_word(100)
    first = dynamic_scale.DynamicScale(**(settings | {"scale": jnp.float32(64.0)}), fin_steps=jnp.int32(0))

    def step(theirs, factor):
        theirs = theirs.value_and_grad(lambda x: x * factor)(jnp.float32(1.0)).dynamic_scale
        return theirs, (theirs.scale, theirs.fin_steps)

    _, (scales, fin_steps) = jax.lax.scan(step, first, jnp.where(finite, 1.0, jnp.inf))
    states = _scan(_scaler_of_row("Flax DynamicScale", settings), finite)
    chex.assert_trees_all_equal((states.loss_scale, states.finite_steps), (scales, fin_steps))


# --- PyTorch; more in test_torch_cases.py and test_parallel_training.py ---


def test_torch_state_dict_and_pickle_keep_every_field():
    """`test_grad_scaling_state_dict` and `test_pickle_gradscaler`; min_scale 2^-126, as `from_torch_state_dict` has."""
    saved = {"scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 0}
    s0 = jmpscale.dynamic(3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, min_scale=NO_FLOOR)
    assert jmpscale.to_torch_state_dict(s0) == saved
    for same in (jmpscale.from_torch_state_dict(saved), pickle.loads(pickle.dumps(s0))):
        assert jmpscale.to_torch_state_dict(same) == saved
        assert jmpscale.scale(same, [jnp.float32(4.0)]) == [12.0]


@pytest.mark.parametrize("api", torch_cases.APIS)
def test_torch_float16_trains_as_float32_does(api):
    """`test_grad_scaling_autocast`: computing in float16 with scaling, against float32 without; min_scale 2^-14."""

    def loss_fn(scaler, params, batch):
        dtype = jnp.float32 if scaler is None else jnp.float16
        prediction = torch_cases._predict(*jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch[0])))
        return jnp.mean((prediction.astype(jnp.float32) - batch[1]) ** 2)

    case = torch_cases._Case(loss_fn=loss_fn)
    scaler = torch_cases._starting_scaler("dynamic")
    *_, last = torch_cases._assert_trains_as_the_control(case, api, scaler, atol=1e-3)
    assert (last.loss_scale, last.skipped) == (512.0, 1)


def test_torch_gradients_that_become_nonfinite_after_the_check_are_applied():
    """`test_params_invalidated_with_grads_invalidated_between_unscale_and_step`: gradients are checked once."""
    scaler = jmpscale.dynamic(128.0, min_scale=NO_FLOOR)
    grads, finite = jmpscale.unscale_and_check(scaler, {"w": jnp.full(3, 128.0), "b": jnp.full(3, 128.0)})
    nonfinite = {"w": grads["w"] * jnp.nan, "b": grads["b"] * jnp.inf}
    params = {"w": jnp.ones(3), "b": jnp.ones(3)}
    params = jmpscale.apply_if(finite, lambda params: jax.tree.map(jnp.subtract, params, nonfinite), params)
    assert not any(jnp.isfinite(x).any() for x in jax.tree.leaves(params))
    assert jmpscale.update(scaler, finite).skipped == 0


EDGES = {
    # the scaled gradient, its dtype, the scale; the unscaled gradient and the flag, in torch and in jmpscale
    "overflow caused by unscaling": (3e38, "float32", 2.0**-10, (np.inf, True), (np.inf, False)),
    "float16 underflow": (2.0**-14, "float16", 2.0**16, (0.0, True), (2.0**-30, True)),
    "float16 overflow": (60_000.0, "float16", 0.25, (np.inf, True), (240_000.0, True)),
    "float64": (1.0, "float64", 10.0, (0.10000000149011612, True), (0.1, True)),
    "scale 1": (np.inf, "float32", 1.0, (np.inf, False), (np.inf, False)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("value", "dtype", "loss_scale", "in_torch", "here"), EDGES.values(), ids=EDGES)
def test_torch_edges_of_unscale(value, dtype, loss_scale, in_torch, here):
    """torch checks before it divides, and stays in the gradient's dtype; min_scale 2^-126."""
    scaler = jmpscale.dynamic(loss_scale, min_scale=NO_FLOOR)
    grad, finite = jmpscale.unscale_and_check(scaler, jnp.array(value, dtype))
    assert (grad.item(), finite.item()) == here


@pytest.mark.parametrize(("value", "dtype", "loss_scale", "in_torch", "here"), EDGES.values(), ids=EDGES)
def test_torch_itself_has_these_edges(value, dtype, loss_scale, in_torch, here):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    grad, found_inf = torch.tensor([value], dtype=getattr(torch, dtype)), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, torch.tensor([1 / loss_scale]))
    assert (grad.item(), found_inf.item() == 0) == in_torch


def test_torch_edges_of_update():
    """torch keeps 1e38, which growth would make infinite, and backs off from 2^-149 to 0, permanently.

    1e38 is above 2^126 and 2^-149 is below 2^-126: both are moved to the nearest valid scale.
    """
    limits = {"min_scale": NO_FLOOR, "max_scale": NO_CEILING}
    highest = jmpscale.dynamic(NO_CEILING, growth_factor=16.0, growth_interval=1, **limits)
    lowest = jmpscale.dynamic(NO_FLOOR, **limits)
    assert _run(highest, "GG").loss_scale.tolist() == [NO_CEILING] * 2
    assert _run(lowest, "BB").loss_scale.tolist() == [NO_FLOOR] * 2


# --- DeepSpeed (tests/unit/runtime/half_precision): each step fills every gradient with one value ---

NO_ZERO, ZERO = "DeepSpeed, without ZeRO", "DeepSpeed 2026, ZeRO"
NANS = [np.nan] * 6
SMALL = list(np.random.default_rng(0).uniform(-0.1, 0.1, 10))
DOUBLING = [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]
DEEPSPEED = {
    "TestFused.test_no_overflow": (NO_ZERO, 8, {}, SMALL, DOUBLING),
    "TestFused.test_all_overflow": (NO_ZERO, 4, {}, [np.inf, -np.inf, *NANS], [8, 4, 2, 1, 1, 1, 1, 1]),
    "TestFused.test_some_overflow": (
        NO_ZERO,
        8,
        {},
        [np.inf, np.nan, *SMALL[:3], np.inf],
        [128, 64, 64, 64, 128, 64],
    ),
    "TestUnfused.test_all_overflow": (
        NO_ZERO,
        4,
        {"min_loss_scale": 0.25},
        [np.inf, -np.inf, *NANS],
        [8, 4, 2, 1, 0.5, 0.25, 0.25, 0.25],
    ),
    "TestZeROFloat16.test_no_overflow": (ZERO, 8, {"hysteresis": 2}, SMALL, DOUBLING),
    "TestZeROFloat16.test_all_overflow": (
        ZERO,
        8,
        {"hysteresis": 1},
        [np.inf, -np.inf, *NANS],
        [128, 64, 32, 16, 8, 4, 2, 1],
    ),
    "TestZeROFloat16.test_some_overflow": (
        ZERO,
        8,
        {"hysteresis": 1},
        [np.inf, np.nan, *SMALL[:3], np.inf],
        [128, 64, 64, 64, 128, 64],
    ),
}


@pytest.mark.parametrize(("row", "power", "settings", "values", "scales"), DEEPSPEED.values(), ids=DEEPSPEED)
def test_deepspeed_float16(row, power, settings, values, scales):
    """min_scale is DeepSpeed's own min_loss_scale: 1, or 0.25 in `TestUnfused`."""
    start, edit = _edits_of_row(row)
    scaler = start(_scaler_of_row(row, settings | {"initial_scale_power": power, "loss_scale_window": 2}))

    def step(scaler, value):
        _, finite = jmpscale.unscale_and_check(scaler, {"w": jnp.full((1, 1), value), "b": jnp.full(1, value)})
        scaler = edit(jmpscale.update(scaler, finite))
        return scaler, (scaler.loss_scale, scaler.skipped)

    _, (seen, skipped) = jax.lax.scan(step, scaler, jnp.array(values))
    assert seen.tolist() == scales
    assert skipped.tolist() == np.cumsum(~np.isfinite(values)).tolist()


@pytest.mark.parametrize(
    ("check_grad_overflow", "values", "skipped", "finite_params"),
    [
        (True, SMALL, [0] * 10, True),
        (True, [np.inf, -np.inf, *NANS], [1, 2, 3, 4, 5, 6, 7, 8], True),
        (False, [np.inf, -np.inf, *NANS], [0] * 8, False),
    ],
    ids=["no_overflow", "detect_grad_overflow", "ignore_grad_overflow"],
)
def test_deepspeed_bfloat16(check_grad_overflow, values, skipped, finite_params):
    """`TestZeROBFloat16`: a fixed scale of 1, so no min_scale."""

    def step(carry, value):
        params, scaler = carry
        grads, finite = jmpscale.unscale_and_check(scaler, jnp.full(10, value))
        params = jmpscale.apply_if(finite, lambda params: params - grads, params)
        scaler = jmpscale.update(scaler, finite)
        return (params, scaler), scaler.skipped

    start = jnp.ones(10, jnp.bfloat16), jmpscale.static(1.0) if check_grad_overflow else jmpscale.disabled()
    (params, _), seen = jax.lax.scan(step, start, jnp.array(values, jnp.bfloat16))
    assert seen.tolist() == skipped
    assert jnp.isfinite(params).all() == finite_params


def test_deepspeed_precision_config():
    """The values of `fp16.loss_scale`. 0, which means dynamic in DeepSpeed, is refused, and so are strings."""
    for value in (-1, math.inf, math.nan, 0):
        with pytest.raises(ValueError, match="scale must be"):
            jmpscale.static(value)
    for value in (True, "3", [], {}):
        with pytest.raises(TypeError, match="scale must be a Python number"):
            jmpscale.static(value)
    assert [float(jmpscale.static(value).loss_scale) for value in (1, 2.0)] == [1.0, 2.0]


@pytest.mark.parametrize(("tx", "step"), [(optax.sgd(1.0), 3.0), (optax.chain(optax.clip(1.5), optax.sgd(1.0)), 1.5)])
def test_gradients_are_unscaled_by_the_scale_that_scaled_the_loss(tx, step):
    """On steps of growth, backoff and clipping; DeepSpeed (PR 8588), ColossalAI and mpx divide by the next scale."""
    tx = jmpscale.with_loss_scaling(tx, jmpscale.dynamic(4.0, growth_interval=1, min_scale=NO_FLOOR))

    def descend(opt_state, finite):
        def loss_fn(w):
            return 3.0 * inject_backward(w, jnp.inf, path="", when=~finite)

        _, grad = jmpscale.value_and_grad(loss_fn)(opt_state, jnp.float32(0))
        updates, opt_state = tx.update(grad, opt_state)
        return opt_state, (updates, opt_state.scaler.loss_scale)

    finite = jnp.array([letter == "G" for letter in "GGBGBBG"])
    _, (updates, scales) = jax.lax.scan(descend, tx.init(jnp.float32(0)), finite)
    assert scales.tolist() == [8, 16, 8, 16, 8, 4, 8]
    assert updates.tolist() == [-step, -step, 0, -step, 0, 0, -step]


# --- apex (`test_update_scale_hysteresis.py`) ---


@pytest.mark.parametrize(
    ("growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    list(itertools.product([1.0, 2.0, 4.0], [0.5, 0.25], [10, 100], [10, 100])),
)
def test_apex_fuzz(growth_factor, backoff_factor, growth_interval, hysteresis):
    """min_scale is 2^-126, the smallest normal number, where apex backs off to 0; max_scale 2^126, half of apex's.

    A growth factor of 1, which apex accepts, is reproduced by a scaler that never grows.
    """
    random = np.random.default_rng([int(growth_factor), growth_interval, hysteresis])
    more_bad, more_good = random.integers(0, 1000, size=2)
    phases = [(False, hysteresis - 1), (True, growth_interval - 1), (False, hysteresis + more_bad)]
    phases += [(True, growth_interval + more_good)]
    word = np.concatenate([np.full(length, finite) for finite, length in phases])
    padded = np.pad(word, (0, 2300 - len(word)), constant_values=True)
    ends = np.cumsum([length for _, length in phases]) - 1
    grows = growth_factor > 1
    for init in (1.0, 1024.0, 65536.0):
        scaler = jmpscale.dynamic(
            init,
            growth_factor=growth_factor if grows else 2.0,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval if grows else 2**31 - 1,
            hysteresis=hysteresis,
            hysteresis_reset="finite",
            min_scale=NO_FLOOR,
            max_scale=NO_CEILING,
        )
        low = max(init * backoff_factor ** (1.0 + more_bad), NO_FLOOR)
        high = min(low * growth_factor ** (1 + more_good // growth_interval), NO_CEILING)
        assert _jitted_scan(scaler, padded).loss_scale[ends].tolist() == [init, init, low, high]


# --- TensorFlow (`loss_scale_test.py`); its lists of scales are runs of the table of settings ---


def test_tensorflow_growth_stops_at_the_upper_limit():
    """`test_keep_increasing_until_capped`: from a quarter of the limit, the largest float32 number; min_scale 1.

    Here the limit is 2^126, the largest valid scale, and it is reached exactly.
    """
    scaler = _scaler_of_row("TensorFlow, tf-keras", {"initial_loss_scale": NO_CEILING / 4, "increment_period": 2})
    assert (_run(scaler, "GGGGGG").loss_scale / NO_CEILING).tolist() == [0.25, 0.5, 0.5, 1, 1, 1]


def test_tensorflow_no_gradients_single_tensors_and_fixed_scales():
    """`test_update_with_none_gradients`, `test_single_tensor_gradient`, min_scale 1; `test_basic` of a fixed scale."""
    scaler = _scaler_of_row("TensorFlow, tf-keras", {"initial_loss_scale": 1.0})
    for grads, expected in (([None], True), ([None, jnp.array(jnp.nan)], False), (jnp.array(1.0), True)):
        assert jmpscale.unscale_and_check(scaler, grads)[1] == expected
    fixed = jmpscale.static(1000.0)
    _, finite = jmpscale.unscale_and_check(fixed, jnp.array(jnp.nan))
    assert not finite
    assert jmpscale.update(fixed, finite).loss_scale == 1000.0


# --- Keras 3 (`loss_scale_optimizer_test.py`) ---


def test_keras_steps():
    """`test_finite_step`, `test_infinite_step`, `test_iterations_update`, with SGD at 0.5; min_scale 2^-126."""
    scaler = _scaler_of_row("Keras 3", {})
    tx = jmpscale.with_loss_scaling(optax.chain(optax.sgd(0.5), optax.scale_by_schedule(lambda count: 1.0)), scaler)
    params = jnp.array([1.0, 2.0, 3.0, 4.0])
    opt_state = tx.init(params)
    grads = jmpscale.unscale(jmpscale.get_scaler(opt_state), jnp.array([1.0, 6.0, 7.0, 2.0]) * 2.0**15)
    updates, opt_state = tx.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, [0.5, -1.0, -0.5, 3.0], rtol=1e-4)
    for _ in range(3):
        updates, opt_state = tx.update(jnp.full(4, jnp.inf), opt_state)
        assert_step_is_noop(params, optax.apply_updates(params, updates))
        assert optax.tree.get(opt_state, "count") == 1, "the step count of the inner optimizer does not advance"


def test_keras_scaling_up_and_down():
    """`test_downscaling`: 400 after four overflows; `test_upscaling`: 2 after eight steps of 2; min_scale 2^-126."""
    down = _run(_scaler_of_row("Keras 3", {"initial_scale": 400.0}), "BBBB")
    assert jmpscale.scale(jax.tree.map(lambda x: x[-1], down), 1.0) == 25.0
    up = _run(_scaler_of_row("Keras 3", {"initial_scale": 2.0, "dynamic_growth_steps": 2}), "GGGGGGGG")
    assert up.loss_scale[-1] == 32.0


# --- jmp (`loss_scale_test.py`) ---


@pytest.mark.parametrize("loss_scale", [2, 3, 4])
@pytest.mark.parametrize("make", [jmpscale.static, functools.partial(jmpscale.dynamic, min_scale=NO_FLOOR)])
def test_jmp_scale_and_unscale(make, loss_scale):
    """`test_static_loss_scale`, and jmp's warning for integers: here they are accepted, and become float32."""
    scaler = make(loss_scale)
    assert scaler.loss_scale.dtype == jnp.float32
    scaled = jmpscale.scale(scaler, {"a": 1.0})
    assert scaled == {"a": loss_scale}
    assert jmpscale.unscale(scaler, scaled) == {"a": 1.0}


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_jmp_growth_after_a_period(period, factor):
    """`test_dynamic_loss_scale_adjust_increases_on_finite`; min_scale is jmp's default, 1."""
    states = _scan(_scaler_of_row("jmp", {"loss_scale": 10.0, "period": period, "factor": factor}), [True] * period)
    assert states.loss_scale.tolist() == [10.0] * (period - 1) + [10.0 * factor]
    assert states.finite_steps.tolist() == [*range(1, period), 0]


@pytest.mark.parametrize(
    ("period", "factor", "min_scale"), [(20, 2, 1), (30, 3, 1), (20, 2, 0.3125), (30, 3, 0.37), (5, 2, NO_FLOOR)]
)
def test_jmp_backoff_stops_at_the_lower_limit(period, factor, min_scale):
    """`test_dynamic_loss_scale_adjust_reduce_on_non_finite`, `test_dynamic_loss_scale_explicit_min_loss_scale`.

    A limit of 0 is moved to 2^-126, the nearest valid one. Under jit, as here, jmp loses its limit.
    """
    settings = {"loss_scale": 10.0, "period": period, "factor": factor, "min_loss_scale": min_scale}
    states = _jitted_scan(_scaler_of_row("jmp", settings), [False] * 100)
    np.testing.assert_allclose(states.loss_scale, [max(min_scale, 10 / factor**n) for n in range(1, 101)], rtol=1e-5)
    assert not states.finite_steps.any()


# --- Flax (`DynamicScaleTest` of 2021, its only test) ---


@pytest.mark.parametrize("here", [True, False], ids=["jmpscale", "Flax"])
def test_flax_dynamic_scale(here):
    """A loss computed and returned in float16, which overflows above 2^15; min_scale 2^-126, as in Flax.

    Flax returns NaN as the first loss, since float16(1) * 65536 is infinite; jmpscale returns the user's loss, and
    warns.
    """

    def loss_fn(p):
        return jnp.asarray(p, jnp.float16) ** 2

    def ours(scaler, p):
        with pytest.warns(UserWarning, match="the loss is float16"):
            loss, grad = jmpscale.value_and_grad(loss_fn)(scaler, p)
        finite = jmpscale.all_finite(grad)
        return jmpscale.update(scaler, finite), finite, loss, grad

    def theirs(scaler, p):
        return tuple(scaler.value_and_grad(loss_fn)(p))

    if here:
        scaler = _scaler_of_row("Flax DynamicScale", {"growth_interval": 2})
    else:
        dynamic_scale = pytest.importorskip("flax.training.dynamic_scale", reason="Flax is not installed")
        scaler = dynamic_scale.DynamicScale(growth_interval=2)
    step, rows = jax.jit(ours if here else theirs), []
    for _ in range(6):
        scaler, finite, loss, grad = step(scaler, jnp.float32(1.0))
        state = (scaler.loss_scale, scaler.finite_steps) if here else (scaler.scale, scaler.fin_steps)
        rows.append([float(x) for x in (finite, loss, state[0], grad, state[1])])
    np.testing.assert_array_equal(
        rows,
        [
            [False, 1 if here else np.nan, 32768, np.inf, 0],
            [False, 1, 16384, np.inf, 0],
            [True, 1, 16384, 2, 1],
            [True, 1, 16384, 2, 2],
            [True, 1, 32768, 2, 0],
            [False, 1, 16384, np.inf, 0],
        ],
    )


def test_flax_limits():
    """Flax's lower limit, the smallest normal float32, is 2^-126; its upper one, the largest, is moved to 2^126."""
    for start, word, limit in ((2.0**-125, "BBB", np.finfo(np.float32).tiny), (2.0**125, "GGGGGGGGG", NO_CEILING)):
        scaler = _scaler_of_row("Flax DynamicScale", {"scale": start, "growth_interval": 2})
        assert _run(scaler, word).loss_scale[-1] == limit
        assert jmpscale.unscale(jmpscale.static(float(limit)), jnp.float32(limit)) == 1.0, (
            "at Flax's upper limit it is 0"
        )


# --- mpx (`test_loss_scaling.py`, `test_grad_tools.py`) ---

MPX = {"loss_scaling": 2.0**14, "min_loss_scaling": 2.0**-14}


def test_mpx_scale_and_unscale():
    """2^14 times float32 and back; a scale in float32, where mpx casts it to float16; min_scale 2^-14."""
    scaler = _scaler_of_row("mpx", MPX)
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.float32(3.0), "none": None}
    scaled = jmpscale.scale(scaler, tree)
    chex.assert_trees_all_equal(scaled, jax.tree.map(lambda x: x * 2.0**14, tree))
    unscaled, finite = jmpscale.unscale_and_check(scaler, jax.tree.map(lambda x: x.astype(jnp.float16), tree))
    chex.assert_trees_all_equal(unscaled, jax.tree.map(lambda x: x / 2.0**14, tree))
    assert finite


def test_mpx_adjust():
    """Twice 2,000 finite steps, to the limit of 65504, and an overflow; from either limit; min_scale 2^-14."""
    states = _scan(_scaler_of_row("mpx", MPX), [True] * 4000)
    assert states.loss_scale[jnp.array([1998, 1999, 3998, 3999])].tolist() == [2.0**14, 2.0**15, 2.0**15, 65504.0]
    assert states.finite_steps[jnp.array([1999, 3999])].tolist() == [0, 0]
    assert _run(_scaler_of_row("mpx", MPX), "B").loss_scale == 2.0**13
    assert _run(_scaler_of_row("mpx", MPX | {"loss_scaling": 2.0**-14}), "B").loss_scale == 2.0**-14
    with pytest.raises(ValueError, match="init_scale must be between"):
        _scaler_of_row("mpx", MPX | {"loss_scaling": 2.0**16})


# --- optax (`_conditionality_test.py`, `_accumulation_test.py`) ---

SGD = optax.sgd(1.0)


def _feed(tx, grads):
    """Returns the parameter, which starts at 0, and the optimizer state after each gradient."""

    def step(carry, grad):
        params, opt_state = carry
        updates, opt_state = tx.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (params, opt_state)

    start = jnp.float32(0)
    return jax.lax.scan(step, (start, tx.init(start)), jnp.array(grads, jnp.float32))[1]


def test_optax_apply_if_finite():
    """`test_apply_if_finite`: optax skips two consecutive NaN, jmpscale any number; a fixed scale, no min_scale."""
    grads = [1.0, np.nan, np.nan, 1.0, np.nan, np.nan, np.nan]
    theirs, their_state = _feed(optax.apply_if_finite(SGD, max_consecutive_errors=2), grads)
    ours, our_state = _feed(jmpscale.with_loss_scaling(SGD, jmpscale.static(1.0)), grads)
    scalers = our_state.scaler
    assert ours.tolist() == [-1, -1, -1, -2, -2, -2, -2]
    np.testing.assert_array_equal(theirs[:-1], ours[:-1])
    assert np.isnan(theirs[-1]), "optax applies the third"
    np.testing.assert_array_equal(scalers.consecutive_skips, their_state.notfinite_count)
    np.testing.assert_array_equal(scalers.skipped, their_state.total_notfinite)
    np.testing.assert_array_equal(scalers.consecutive_skips == 0, their_state.last_finite)
    last = jax.tree.map(lambda x: x[-1], scalers)
    jmpscale.raise_if_stuck(last, max_consecutive_skips=3)
    with pytest.raises(FloatingPointError, match="3 consecutive steps were skipped"):
        jmpscale.raise_if_stuck(last, max_consecutive_skips=2)


@pytest.mark.parametrize(
    ("grads", "applied"), [([np.inf, 0.0], False), ([np.nan, 0.0], False), ([11.0, 0.0], False), ([0.0, 0.0], True)]
)
def test_optax_skip_large_updates(grads, applied):
    """`test_skip_not_finite`, `test_skip_large_updates`: another condition is not an overflow; min_scale 1."""
    scaler = jmpscale.dynamic(16.0)
    grads, finite = jmpscale.unscale_and_check(scaler, jnp.array(grads) * 16.0)
    small = jnp.sum(grads**2) < 100.0
    count = jmpscale.apply_if(finite & small, lambda count: count + 1, jnp.int32(0))
    assert count == applied
    assert jmpscale.update(scaler, finite).skipped == (not np.isfinite(grads).all())


def test_optax_multi_steps_skip_not_finite():
    """`test_multi_steps_skip_not_finite`: an inf and a NaN in the second window; a fixed scale, no min_scale."""
    tx = jmpscale.with_loss_scaling(optax.MultiSteps(SGD, 2).gradient_transformation(), jmpscale.static(1.0))
    params, opt_state = _feed(tx, [1, 1, np.inf, np.nan, 1, 1])
    assert params.tolist() == [0, -1, -1, -1, -1, -2]
    assert opt_state.inner_state.mini_step.tolist() == [1, 0, 0, 0, 1, 0]


def test_optax_multi_steps_mean_and_accumulator():
    """`test_multi_steps_computes_mean`, and its accumulator under narrow gradients in a scan; min_scale 1."""
    alone = optax.MultiSteps(optax.scale(1.0), 4).gradient_transformation()
    tx = jmpscale.with_loss_scaling(alone, jmpscale.dynamic(8.0))
    in_optax = alone.init(jnp.bfloat16(0)).acc_grads.dtype  # float32 since optax 0.2.8
    for dtype, accumulator in ((jnp.float32, jnp.float32), (jnp.bfloat16, in_optax), (jnp.float16, jnp.float32)):
        zero = jnp.zeros((), dtype)

        def step(opt_state, scaled, params=zero):
            updates, opt_state = tx.update(jmpscale.unscale(opt_state.scaler, scaled), opt_state, params)
            return opt_state, updates

        opt_state, updates = jax.lax.scan(step, tx.init(zero), jnp.array([8, 16, 24, 32], dtype))
        assert opt_state.inner_state.acc_grads.dtype == accumulator
        assert updates.tolist() == [0, 0, 0, 2.5]


# --- Additional cases, each of which at least one of the other libraries fails ---


def test_settings_changed_during_a_run_apply_from_then_on():
    """One more compilation, since settings are static. With a tracker above the interval torch never grows again."""
    update = jax.jit(chex.assert_max_traces(jmpscale.update, n=2))
    scaler = jmpscale.dynamic(256.0, growth_interval=10, min_scale=NO_FLOOR)
    for _ in range(5):
        scaler = update(scaler, True)
    settings = {"growth_factor": 8.0, "backoff_factor": 0.125, "growth_interval": 3}
    limits = {"min_scale": 64.0, "max_scale": 1024.0}
    scaler = scaler._replace(config=dataclasses.replace(scaler.config, **settings, **limits))
    scales = []
    for finite in (True, False, False, False, True, True, True):
        scaler = update(scaler, finite)
        scales.append(scaler.loss_scale.item())
    assert scales == [1024, 128, 64, 64, 64, 64, 512]


def test_one_scaler_for_each_loss():
    """apex's `test_loss_scale_decrease`: no, one, two overflows in three losses that share parameters."""

    def step(carry, factors):
        params, scalers = carry
        flags, total = [], jnp.zeros(3)
        for scaler, factor in zip(scalers, factors, strict=True):
            scaled = jax.grad(lambda p, scaler=scaler, factor=factor: jmpscale.scale(scaler, p.sum() * factor))(params)
            grads, finite = jmpscale.unscale_and_check(scaler, scaled)
            flags.append(finite)
            total += grads
        params = jmpscale.apply_if(jnp.stack(flags).all(), lambda params: params - total, params)
        scalers = [jmpscale.update(scaler, finite) for scaler, finite in zip(scalers, flags, strict=True)]
        return (params, scalers), params[0]

    factors = jnp.array([[1.0, jnp.inf, jnp.inf], [1.0, 1.0, jnp.inf], [1.0, 1.0, 1.0]])
    start = jnp.ones(3), [jmpscale.dynamic(min_scale=NO_FLOOR)] * 3
    (_, scalers), params = jax.lax.scan(step, start, factors)
    assert [scaler.loss_scale.item() for scaler in scalers] == [2.0**16, 2.0**15, 2.0**14]
    assert params.tolist() == [1, 1, -2], "only the last step, with three gradients of 1, is applied"


def test_an_overflow_in_any_micro_batch():
    """Accumulation in two ways: one check of the sum skips the whole step; MultiSteps skips only the micro-batch."""
    tx = jmpscale.with_loss_scaling(optax.MultiSteps(SGD, 3).gradient_transformation(), jmpscale.static(4.0))
    feed = jax.jit(functools.partial(_feed, tx))
    for position in range(4):
        micro_batches = np.float32([1, 2, 3, 4])
        micro_batches[position] = np.inf
        assert not jmpscale.all_finite(micro_batches.sum())
        params, opt_state = feed(micro_batches)
        np.testing.assert_allclose(params[-1], -np.delete(micro_batches, position).mean(), rtol=1e-6)
        assert opt_state.scaler.skipped[-1] == 1


# --- The table of upstream tests ---


def _test_names():
    """Returns `module.py::test` for every test."""
    return {
        f"{path.name}::{node.name}"
        for path in TESTS.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _conformance():
    page = "moving/conformance"
    headings = re.findall(r"^## (.+)$", (pages.DOCS / f"{page}.md").read_text(), flags=re.MULTILINE)
    return [row for heading in headings for row in _table(page, heading)]


def test_the_table_of_upstream_tests_names_existing_tests_and_all_of_this_module():
    existing, named = _test_names(), set()
    for row in _conformance():
        tests = re.findall(r"`(test_\w+\.py::test_\w+)`", row["Tested by"])
        assert row["Here"] in {"reproduced", "better", "does not apply"}, row
        assert tests or row["Here"] == "does not apply", row
        assert row["How"] or row["Here"] == "reproduced", row
        assert set(tests) <= existing, set(tests) - existing
        named |= set(tests)
    own = {name for name in existing if name.startswith("test_conformance.py::")}
    about_the_page = "test_the_table_of_upstream_tests_names_existing_tests_and_all_of_this_module"
    assert own - named == {f"test_conformance.py::{about_the_page}"}
