"""The package reproduces the numbers in the tests of other loss scalers, and recorded runs of these scalers.

Most upstream tests give a sequence of finite steps and overflows, and a scale after each step: a row of `CASES`. If the
original has no limits, the row has the widest valid limits. Sources: PyTorch 2.13 (`test_torch.py`, `test_cuda.py`,
`test_fsdp_sharded_grad_scaler.py`, `test_fully_shard_grad_scaler.py`), DeepSpeed (`unit/runtime/half_precision`), apex
(`L0/run_amp`), TensorFlow (`loss_scale_test.py`), Keras 3 (`loss_scale_optimizer_test.py`), jmp (`loss_scale_test.py`),
Flax (`DynamicScaleTest` of 2021), mpx (`test_loss_scaling.py`), optax (`_conditionality_test.py`,
`_accumulation_test.py`).

jmpscale deliberately differs from the original in these tests:

- PyTorch, `test_grad_scaling_unscale`, `..._sparse`: dtypes may differ in one call. float16 is unscaled to float32,
  so duplicates in a sparse gradient add up without an overflow. Infinities that unscaling causes are detected.
- PyTorch, `test_grad_scale_will_not_overflow`; TensorFlow, `test_keep_increasing_until_capped`; Flax: the scale stops
  at 2^126. PyTorch, TensorFlow, apex, `test_fuzz`: it stops at 2^-126 instead of 0. A growth factor of 1 raises.
- Flax: where Flax returns NaN as the loss, jmpscale returns the loss of the program.
- jmp: an integer scale is accepted, and the lower limit also applies under `jit`.
- mpx, `test_scaling_clipping`, and DeepSpeed's `loss_scale` of 0: a scale outside the limits raises.
- DeepSpeed (PR 8588), ColossalAI, mpx: gradients are unscaled by the scale that scaled the loss, not by the next one.
- optax, `test_apply_if_finite`: all non-finite updates are skipped, and `raise_if_stuck` reports too many of them.

These tests do not apply:

- PyTorch, the tests with `_create_scaling_case`: test_training.py and test_accumulation.py train with clipping,
  accumulation and penalties.
- PyTorch, `test_grad_scaling_autocast_foreach`, `..._fused`, `..._fused_optimizers`, `test_grad_scaler_pass_itself`: no
  optimizer unscales and skips by itself. Errors for calls in the wrong order: nothing is modified in place.
- Keras, `test_finite_step_with_inner_loss_scale`: optax optimizers have no scale. `test_finite_step_with_overwrite`:
  `unscale` returns the values that Flax's fp8 layers mark unchanged.
- Keras, `test_config` and others; TensorFlow, `test_get`, `test_call_type`: there are no configuration objects.
- mpx, `test_scaled_decorator`: `scale` takes values.
"""

import functools
import json
import math
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import jmpscale
from jmpscale.testing import inject_backward

from tables import full, rows

TESTS = pathlib.Path(__file__).parent
TORCH = json.loads((TESTS / "data" / "torch_grad_scaler_traces.json").read_text())["traces"]
ORACLE = json.loads((TESTS / "data" / "oracle_traces.json").read_text())
PAGE = (TESTS.parent / "docs" / "schedules.md").read_text()

LOWEST, HIGHEST = 2.0**-126, 2.0**126
dynamic = functools.partial(jmpscale.dynamic, min_scale=LOWEST, max_scale=HIGHEST)
F16, F32 = jnp.float16, jnp.float32
SGD = optax.sgd(1.0)
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}  # halves the compile time


@functools.partial(jax.jit, static_argnames="edit", **FAST)
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


class Case(NamedTuple):
    """A row of the table.

    Attributes:
      scales: the scale after each step, or a dict of the scales after some steps, counted from 1.
      finite_steps: the same for the count of finite steps.
      note: the text on the framework in the documentation.
    """

    scaler: jmpscale.ScalerState
    sequence: str
    scales: list[float] | dict[int, float]
    finite_steps: list[int] | None = None
    note: str = ""
    rtol: float = 0.0


def _torch_run(trace):
    sequence = "".join("GB"[found_inf] for found_inf in trace["found_inf"])
    return Case(dynamic(**trace["config"]), sequence, trace["scale_after"], trace["growth_tracker_after"])


def _apex_fuzz(growth_factor, backoff_factor, growth_interval, hysteresis, overflows=30, finite=250, init=1024.0):
    scaler = dynamic(
        init,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        hysteresis_reset="finite",
    )
    lengths = (hysteresis - 1, growth_interval - 1, hysteresis + overflows, growth_interval + finite)
    ends = np.cumsum(lengths).tolist()
    low = init * backoff_factor ** (1.0 + overflows)
    high = low * growth_factor ** (1 + finite // growth_interval)
    sequence = "".join(letter * length for letter, length in zip("BGBG", lengths, strict=True))
    return Case(scaler, sequence, dict(zip(ends, (init, init, low, high), strict=True)))


def _jmp(period, factor, min_scale=1.0, loss_scale=10.0):
    return dynamic(
        loss_scale, growth_factor=factor, backoff_factor=1 / factor, growth_interval=period, min_scale=min_scale
    )


def _jmp_backoff(period, factor, min_scale):
    scales = [max(min_scale, 10 / factor**n) for n in range(1, 101)]
    return Case(_jmp(period, factor, min_scale), "B" * 100, scales, [0] * 100, rtol=1e-5)


def _deepspeed(sequence, scales, hysteresis=1, power=8, min_scale=1.0):
    scaler = dynamic(2.0**power, growth_interval=2, hysteresis=hysteresis, min_scale=min_scale)
    return Case(scaler, sequence, scales, note="late growth")


MPX = functools.partial(dynamic, 2.0**14, min_scale=2.0**-14, max_scale=65504.0)
DOUBLING = [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]
CASES = {
    "torch_update_scale": Case(dynamic(4.0, backoff_factor=0.25, growth_interval=2), "GGB", [4, 8, 2], [1, 0, 0]),
    "torch_largest_scale": Case(dynamic(HIGHEST, growth_factor=16.0, growth_interval=1), "GG", [HIGHEST] * 2),
    "torch_smallest_scale": Case(dynamic(LOWEST), "BB", [LOWEST] * 2),
    "fsdp_found_inf": Case(dynamic(2.0), "BGBGBGBGBG", np.repeat([1, 0.5, 0.25, 0.125, 0.0625], 2).tolist()),
    "fsdp2_gradient_scaler": Case(dynamic(2.0), "GB", [2, 1]),
    "deepspeed_fused_no_overflow": _deepspeed("G" * 10, DOUBLING),
    "deepspeed_fused_all_overflow": _deepspeed("B" * 8, [8, 4, 2, 1, 1, 1, 1, 1], power=4),
    "deepspeed_fused_some_overflow": _deepspeed("BBGGGB", [128, 64, 64, 64, 128, 64]),
    "deepspeed_unfused_all_overflow": _deepspeed("B" * 8, [8, 4, 2, 1, 0.5, 0.25, 0.25, 0.25], power=4, min_scale=0.25),
    "deepspeed_zero_no_overflow": _deepspeed("G" * 10, DOUBLING, hysteresis=2),
    "deepspeed_zero_all_overflow": _deepspeed("B" * 8, [128, 64, 32, 16, 8, 4, 2, 1]),
    "apex_fuzz_2_0.5_10_10": _apex_fuzz(2.0, 0.5, 10, 10),
    "apex_fuzz_4_0.25_10_100": _apex_fuzz(4.0, 0.25, 10, 100),
    "apex_fuzz_2_0.25_100_10": _apex_fuzz(2.0, 0.25, 100, 10, finite=550),
    "tensorflow_keep_increasing_until_capped": Case(
        dynamic(HIGHEST / 4, growth_interval=2, min_scale=1.0),
        "GGGGGG",
        [HIGHEST / 4, HIGHEST / 2, HIGHEST / 2, HIGHEST, HIGHEST, HIGHEST],
    ),
    "tensorflow_fixed": Case(jmpscale.static(1000.0), "GB", [1000, 1000]),
    "keras_downscaling": Case(dynamic(400.0), "BBBB", [200, 100, 50, 25]),
    "keras_upscaling": Case(dynamic(2.0, growth_interval=2), "G" * 8, [2, 4, 4, 8, 8, 16, 16, 32]),
    "jmp_increases_on_finite_20_2": Case(_jmp(20, 2), "G" * 20, [10] * 19 + [20], [*range(1, 20), 0]),
    "jmp_increases_on_finite_30_3": Case(_jmp(30, 3), "G" * 30, [10] * 29 + [30], [*range(1, 30), 0]),
    "jmp_reduce_on_non_finite_20_2": _jmp_backoff(20, 2, 1.0),
    "jmp_reduce_on_non_finite_30_3": _jmp_backoff(30, 3, 1.0),
    "jmp_explicit_min_loss_scale_20_2": _jmp_backoff(20, 2, 0.3125),
    "jmp_explicit_min_loss_scale_30_3": _jmp_backoff(30, 3, 0.37),
    "jmp_explicit_min_loss_scale_5_2": _jmp_backoff(5, 2, LOWEST),
    "flax": Case(  # growth_interval is 2 there
        dynamic(growth_interval=3), "BBGGGB", [2**15, 2**14, 2**14, 2**14, 2**15, 2**14], [0, 0, 1, 2, 0, 0]
    ),
    "flax_smallest_scale": Case(dynamic(2.0**-125), "BBB", [float(np.finfo(np.float32).tiny)] * 3),
    "mpx_adjust_finite": Case(
        MPX(), "G" * 4000, {1999: 2**14, 2000: 2**15, 3999: 2**15, 4000: 65504}, [*range(1, 2000), 0] * 2
    ),
    "mpx_adjust_infinite": Case(MPX(), "B", [2.0**13]),
    "mpx_adjust_infinite_at_the_limit": Case(MPX()._replace(loss_scale=np.float32(2.0**-14)), "B", [2.0**-14]),
}


CASES |= {f"torch_run_{i}": _torch_run(trace) for i, trace in enumerate(TORCH)}
DEFAULT = {  # one run of each library
    "torch_run_0",
    "fsdp_found_inf",
    "deepspeed_fused_some_overflow",
    "apex_fuzz_2_0.5_10_10",
    "keras_upscaling",
    "jmp_reduce_on_non_finite_20_2",
    "flax",
    "mpx_adjust_finite",
}


@pytest.mark.parametrize("case", rows(CASES, default=DEFAULT))
def test_update_reproduces_scales(case):
    states = _run_of_row(case.scaler, case.note, case.sequence)
    expected = case.scales if isinstance(case.scales, dict) else dict(enumerate(case.scales, start=1))
    scales = [states.loss_scale[step - 1].item() for step in expected]
    np.testing.assert_allclose(scales, list(expected.values()), rtol=case.rtol, atol=0)
    if case.finite_steps is not None:
        assert states.finite_steps.tolist() == case.finite_steps
    assert states.total_skips[-1] == case.sequence.count("B")


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


def _apex_amp(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    start, lowest = min(init_scale, max_loss_scale), min_loss_scale or LOWEST
    return jmpscale.dynamic(start, growth_interval=scale_window, min_scale=lowest, max_scale=max_loss_scale)


def _apex_fp16_utils(init_scale=2.0**32, scale_factor=2.0, scale_window=1000):
    factors = {"growth_factor": scale_factor, "backoff_factor": 1 / scale_factor}
    return jmpscale.dynamic(init_scale, **factors, growth_interval=scale_window, min_scale=1.0, max_scale=HIGHEST)


def _openseq2seq(scale_min=1.0, scale_max=2.0**14, step_factor=2.0, step_window=2000):
    factors = {"growth_factor": step_factor, "backoff_factor": 1 / step_factor}
    return jmpscale.dynamic(scale_max, **factors, growth_interval=step_window, min_scale=scale_min, max_scale=scale_max)


def _sharded_grad_scaler(init_scale=2.0**16, growth_interval=2000):
    return dynamic(init_scale, growth_interval=growth_interval)


# Scalers that the page omits: they are obsolete, or have the settings of another framework.
OMITTED = {
    "torch ShardedGradScaler": (_sharded_grad_scaler, ""),
    "NVIDIA apex amp": (_apex_amp, ""),
    "NVIDIA apex fp16_utils": (_apex_fp16_utils, ""),
    "OpenSeq2Seq BackoffScaler": (_openseq2seq, ""),
}
UNSUPPORTED = {"fairseq, fp16_scale_tolerance above 0", "metaseq", "OpenSeq2Seq LogMaxScaler"}  # other rules
SETTINGS = _settings_on_page() | OMITTED
RECORDED = [run for run in ORACLE["runs"] if run["from"] not in UNSUPPORTED]


def test_settings_on_page_have_a_recorded_run_of_each_framework():
    assert SETTINGS.keys() == {run["from"] for run in RECORDED}


@pytest.mark.full
@pytest.mark.parametrize("run", RECORDED, ids=lambda run: f"{run['from']} {run['trace']}")
def test_settings_on_page_reproduce_recorded_run(run):
    create, note = SETTINGS[run["from"]]
    scaler = create(**run["settings"])
    trace = ORACLE["traces"][run["trace"]]
    for name, scales in trace["scales"].items():
        end = trace.get("raises", {}).get(name, [None])[0]  # the original ends the run there, at its lowest scale
        states = _run_of_row(scaler, note, ORACLE["words"][name])
        assert states.loss_scale.tolist()[:end] == scales[:end]


# Gradients are reproduced

FULL, INF, NAN = (np.full((10, 10), 4.0, np.float32) for _ in range(3))
INF[2, 2], NAN[2, 2] = np.inf, np.nan
HALF, HALF_INF = FULL.astype(np.float16), INF.astype(np.float16)


def _sparse(values, dtype, indices=((0, 2), (1, 0), (1, 2))):
    return sparse.BCOO((jnp.array(values, dtype), jnp.array(indices)), shape=(2, 3))


GRADIENTS = {  # the scale, the gradients, and the value of all unscaled gradients, or None for an overflow
    "torch_unscale": (4, (FULL, FULL.T, FULL[:, :5]), 1),
    "torch_unscale_inf": (4, (FULL, INF), None),
    "torch_unscale_nan": (4, (FULL, NAN[:, :5]), None),
    "torch_unscale_inf_first": (4, (INF[:, :5], FULL[:, :5]), None),
    "torch_unscale_mixed": (4, (FULL, FULL[:, :5], HALF, HALF), 1),
    "torch_unscale_mixed_inf": full((4, (FULL, FULL[:, :5], HALF, HALF_INF), None)),
    "torch_unscale_sparse": (4, _sparse([16, 16, 16], F32), 4),
    "torch_unscale_sparse_inf": full((4, _sparse([16, 32, np.inf], F32), None)),
    "torch_unscale_sparse_nan": full((4, _sparse([16, 32, np.nan], F16), None)),
    "torch_unscale_float64": full((10, np.float64(1), 0.1)),
    "torch_unscale_overflow": (2.0**-10, F32(3e38), None),
    "torch_unscale_float16_underflow": (2.0**16, F16(2.0**-14), 2.0**-30),
    "torch_unscale_float16_overflow": (0.25, F16(60_000), 240_000),
    "tensorflow_update_with_none_gradients": full((1, [None], 1)),
    "tensorflow_none_and_nan": (1, [None, F32(np.nan)], None),
    "tensorflow_single_tensor_gradient": full((1, F32(1), 1)),
    "mpx_scale_unscale": (2.0**14, {"a": F16(2.0**14), "none": None}, 1),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("row", rows(GRADIENTS))
def test_unscale_and_check_reproduces_gradients(row):
    loss_scale, grads, expected = row
    unscaled, finite = jmpscale.unscale_and_check(jmpscale.static(loss_scale), grads)
    assert finite == (expected is not None)
    if expected is not None:
        for leaf in jax.tree.leaves(unscaled):
            assert not jnp.issubdtype(leaf.dtype, np.inexact) or (leaf == expected).all()


@pytest.mark.full
def test_unscale_and_check_adds_sparse_duplicates_in_float32():
    grads = _sparse([64_000.0, 32.0, 64_000.0], F16, indices=((0, 2), (1, 0), (0, 2)))
    assert jnp.isinf(grads.todense()[0, 2]), "in float16 the sum must overflow, as in torch"
    unscaled, finite = jmpscale.unscale_and_check(jmpscale.static(1.0), grads)
    assert finite
    assert unscaled.todense().tolist() == [[0, 0, 128_000], [32, 0, 0]]


@pytest.mark.parametrize("loss_scale", [2, 3, 4])
def test_scale_reproduces_losses(loss_scale):
    """`test_grad_scaling_scale` and `test_grad_scaling` of PyTorch, `test_static_loss_scale` of jmp."""
    for scaler in (jmpscale.static(loss_scale), dynamic(loss_scale)):
        scaled = jmpscale.scale(scaler, (F32(8), (F32(4), {"a": 1.0})))
        assert scaled == (8 * loss_scale, (4 * loss_scale, {"a": loss_scale}))
        assert jmpscale.unscale(scaler, scaled) == (8, (4, {"a": 1}))


# Training is reproduced


def _descend(tx, grads):
    """Returns the parameter, which starts at 0, and the optimizer state after each gradient."""

    def step(carry, grad):
        params, opt_state = carry
        updates, opt_state = tx.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (params, opt_state)

    params = jnp.zeros_like(grads[0])
    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), grads)[1], **FAST)()


PARAMETERS = {  # the optimizer, the scaler, the gradients, and the parameter after each of them
    "optax_apply_if_finite": (SGD, jmpscale.static(1.0), "GBBGBBB", [-1, -1, -1, -2, -2, -2, -2]),
    "optax_multi_steps_skip_not_finite": (
        optax.MultiSteps(SGD, 2).gradient_transformation(),
        jmpscale.static(1.0),
        "GGBBGG",
        [0, -1, -1, -1, -1, -2],
    ),
    "optax_multi_steps_computes_mean": (
        optax.MultiSteps(SGD, 4).gradient_transformation(),
        jmpscale.dynamic(8.0),
        [1, 2, 3, 4],
        [0, 0, 0, -2.5],
    ),
    "keras_finite_and_infinite_step": (optax.sgd(0.5), dynamic(2.0**15), "GBBB", [-0.5] * 4),
    "deepspeed_bfloat16_detect_grad_overflow": (SGD, jmpscale.static(1.0), "BBBB", [0] * 4),
    "deepspeed_bfloat16_ignore_grad_overflow": (SGD, jmpscale.disabled(), "BB", [-np.inf] * 2),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("row", rows(PARAMETERS))
def test_with_loss_scaling_reproduces_parameters(row):
    tx, scaler, grads, params = row
    grads = np.float32([{"G": 1, "B": np.inf}.get(grad, grad) for grad in grads])
    seen, opt_state = _descend(jmpscale.with_loss_scaling(tx, scaler), grads)
    assert seen.tolist() == params
    if scaler.config.mode != "disabled":
        assert opt_state.scaler.total_skips.tolist() == np.cumsum(~np.isfinite(grads)).tolist()


@pytest.mark.parametrize(("tx", "step"), [(SGD, 3.0), (optax.chain(optax.clip(1.5), SGD), 1.5)], ids=["sgd", "clip"])
def test_value_and_grad_unscales_by_scale_of_the_same_step(tx, step):
    """DeepSpeed (PR 8588), ColossalAI and mpx apply half of the update when the scale grows."""
    tx = jmpscale.with_loss_scaling(tx, dynamic(4.0, growth_interval=1))

    def descend(opt_state, finite):
        def loss_fn(w):
            return 3.0 * inject_backward(w, jnp.inf, path="", when=~finite)

        _, grad = jmpscale.value_and_grad(loss_fn)(opt_state, F32(0))
        updates, opt_state = tx.update(grad, opt_state)
        return opt_state, (updates, opt_state.scaler.loss_scale)

    finite = jnp.array([letter == "G" for letter in "GGBGBBG"])
    _, (updates, scales) = jax.lax.scan(descend, tx.init(F32(0)), finite)
    assert scales.tolist() == [8, 16, 8, 16, 8, 4, 8]
    assert updates.tolist() == [-step, -step, 0, -step, 0, 0, -step]
