"""What a device must do with a step, on whatever device JAX finds: the tests that `benchmarks.accelerator` runs first.

All of them also run on a CPU. They take few minutes on a GPU, because each compiles few programs.
"""

import functools
import inspect
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import check_step

import meshes
import reference
import worker
from bits import assert_equal_bits
from compiling import count

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]  # `benchmarks.accelerator` runs all
WIDTH = 64
X = np.random.default_rng(0).standard_normal((32, WIDTH)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8


def _params():
    """Returns parameters with values that an operation may change, such as -0.0."""
    return {"w": jnp.array(W), "v": jnp.array(W), "b": jnp.array([1e-30, *[0.0, -0.0] * (WIDTH // 2)])[:WIDTH]}


def _loss(params, x, fault):
    """Returns a loss whose gradient with respect to the last element of `v` is `fault`, and the loss without it."""
    x = jnp.tanh(x @ params["w"] + params["b"][None])
    loss = jnp.mean((x @ params["v"]) ** 2)
    return loss + params["v"][-1, -1] * fault, loss


GRADIENTS = jmpscale.value_and_grad(jmpscale.autocast(_loss), has_aux=True)


def _functional():
    tx = optax.adamw(1e-2)

    def step(params, opt_state, scaler, x, fault):
        (_, loss), grads = GRADIENTS(scaler, params, x, fault)
        finite = jmpscale.all_finite(grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    return step, (_params(), tx.init(_params()), jax.tree.map(jnp.array, jmpscale.dynamic()))


def _wrapper(**options):
    tx = jmpscale.with_loss_scaling(optax.adamw(1e-2), **options)

    def step(params, opt_state, x, fault):
        (_, loss), grads = GRADIENTS(opt_state, params, x, fault)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return step, (_params(), tx.init(_params()))


STEPS = {"functional": _functional, "wrapper": _wrapper, "max_norm": functools.partial(_wrapper, max_norm=1.0)}


@functools.cache
def _compiled(name):
    step, state = STEPS[name]()
    args = jnp.array(X), jnp.float32(0)
    return jax.jit(step, donate_argnums=range(len(state))).lower(*state, *args).compile()


def _take(name, state, fault=0.0):
    return _compiled(name)(*jax.tree.map(jnp.copy, state), jnp.array(X), jnp.float32(fault))


def _without_scaler(state):
    return state[:2] if len(state) == 3 else (state[0], state[1].inner_state)


@pytest.mark.parametrize("fault", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", STEPS)
def test_skipped_step_changes_no_bit(name, fault):
    start = STEPS[name]()[1]
    state = start[:1] + _take(name, start)[1:]  # moments that are not zero
    skipped = _take(name, state, fault)
    assert_equal_bits(_without_scaler(skipped), _without_scaler(state))
    assert (int(jmpscale.get_scaler(skipped).total_skips), int(jmpscale.get_scaler(state).total_skips)) == (1, 0)
    applied = _take(name, skipped)
    assert np.any(np.asarray(applied[0]["w"]) != np.asarray(state[0]["w"]))


@pytest.mark.parametrize("name", STEPS)
def test_step_has_a_branch_on_cpu_only(name):
    branches = count(_compiled(name).as_text(), "conditional")
    assert branches == (1 if jax.default_backend() == "cpu" else 0)


@pytest.mark.parametrize("name", STEPS)
def test_step_updates_its_donated_state_in_place(name):
    state = jax.tree.map(jnp.copy, STEPS[name]()[1])
    arrays = jax.tree.leaves(_without_scaler(state))
    size = sum(x.nbytes for x in arrays)
    _compiled(name)(*state, jnp.array(X), jnp.float32(0))
    assert all(x.is_deleted() for x in arrays)
    assert _compiled(name).memory_analysis().alias_size_in_bytes >= size


def test_scale_follows_the_rule():
    config = {"growth_interval": 3, "init_scale": 2.0**4}
    update, scaler = jax.jit(jmpscale.update), jmpscale.dynamic(**config)
    expected = reference.INITIAL | {"loss_scale": np.float32(2.0**4)}
    for finite in [True, False, True, True, True, False, False, False, False, False, False, True]:
        scaler = update(scaler, jnp.array(finite))
        expected = reference.step(scaler.config, expected, finite)
        assert {name: getattr(scaler, name).item() for name in expected} == expected


SIZE = 2**18 + 5  # reductions of 4,096 elements lose NaN if they take a maximum


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_all_finite_is_exact(dtype):
    check = jax.jit(lambda x: jmpscale.all_finite([x, jnp.zeros(3)]))
    largest = np.full(SIZE, jnp.finfo(dtype).max, dtype)
    assert check(largest)
    for place in (0, SIZE // 2, SIZE - 1):
        for value in (np.inf, -np.inf, np.nan):
            assert not check(np.where(np.arange(SIZE) == place, np.array(value, dtype), largest)), (place, value)


def test_unscale_is_exact_for_powers_of_two():
    scaler = jax.tree.map(jnp.array, jmpscale.dynamic(2.0**24))
    grads = np.float32(2.0) ** np.arange(-100, 100, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(jmpscale.unscale)(scaler, grads), grads / np.float32(2.0**24))


@pytest.mark.parametrize("result", [None, jnp.float32])
def test_autocast_rounds_operands_and_never_applies_an_overflow(result):
    x, w = jnp.array(X), jnp.array(W)
    product = jax.jit(jmpscale.autocast(lambda x, w: x @ w, result_dtype=result))
    rounded = X.astype(np.float16).astype(np.float64) @ W.astype(np.float16).astype(np.float64)
    error = np.abs(np.asarray(product(x, w)) - rounded).max() / np.abs(rounded).max()
    if jax.default_backend() != "tpu":  # which multiplies in bfloat16
        assert error < (1e-3 if result is None else 1e-5)
    assert np.isnan(product(x.at[0].set(1e6), w)[0]).all()  # the operands overflow
    sums = product(x.at[0].set(60000), jnp.ones_like(w))[0]  # the results exceed 65504
    assert np.isnan(sums).all() if result is None else np.isfinite(sums).all()


def test_convolution_with_autocast_is_in_float16():
    images, kernel = jnp.array(X).reshape(2, 16, 16, 4), jnp.array(W[:9, :32]).reshape(3, 3, 4, 8)
    dimensions = ("NHWC", "HWIO", "NHWC")

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=dimensions, precision="highest"
        )

    def half(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dimensions)

    expected = np.asarray(jax.jit(convolve)(images, kernel))
    error = np.abs(np.asarray(jax.jit(jmpscale.autocast(half))(images, kernel)) - expected).max()
    assert 1e-5 < error / np.abs(expected).max() < 2e-2  # a TPU multiplies in bfloat16


def _overflowing(w, x):
    hidden = jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16))
    return jnp.sum(hidden * jnp.float16(1e4)).astype(jnp.float32)


def test_diagnose_names_the_line_that_overflows():
    diagnosis = jmpscale.diagnose(_overflowing)(jmpscale.static(2.0**4), jnp.array(W), jnp.abs(jnp.array(X)) + 1)
    source, start = inspect.getsourcelines(_overflowing)
    assert diagnosis.lines == (f"test_accelerator.py:{start + len(source) - 1} (_overflowing)",)


def test_diagnose_step_runs_the_whole_step():
    step, state = _wrapper()
    diagnosis = jmpscale.diagnose_step(step)(*state, jnp.array(X), jnp.float32(0))
    assert diagnosis.gradient_error < 0.05
    low, high = diagnosis.fitting_scales
    assert low < high


def test_check_step_accepts_a_right_step_and_refuses_a_wrong_one():
    step, state = _functional()
    batch = jnp.array(X), jnp.float32(0)
    check_step(step)(*state, *batch)

    def wrong(state):
        params, opt_state, scaler = step(*state, *batch)
        _, grads = GRADIENTS(scaler, params, *batch)
        return params | {"b": params["b"] - 1e-2 * grads["b"]}, opt_state, scaler  # outside the gate

    with pytest.raises(AssertionError):
        check_step(wrong)(state)


def test_devices_skip_together():
    devices = min(jax.device_count(), 2)
    mesh = meshes.make_mesh(data=devices)
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    def step(w, opt_state, x):
        _, grads = jmpscale.value_and_grad(lambda w: jax.lax.pmean(jnp.sum(w * x[0]), "data"))(opt_state, w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.ones(3)
    good = np.ones((devices, 3), np.float32)
    bad = good.copy()
    bad[-1, -1] = np.inf  # on the last device
    new, opt_state = step(w, tx.init(w), bad)
    assert_equal_bits(new, w)
    new, opt_state = step(w, opt_state, good)
    np.testing.assert_allclose(new, w - 0.1, rtol=1e-6)
    assert int(opt_state.scaler.total_skips) == 1


@pytest.mark.full
def test_two_processes_skip_together():
    """Each process has one device: a GPU, or a simulated device of a CPU."""
    platform = jax.devices()[0].platform
    if platform not in ("cpu", "gpu"):
        pytest.skip("one process uses all devices")
    meshes.require_devices(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(pathlib.Path(jmpscale.__file__).parent.parent)}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    started = [
        subprocess.Popen([sys.executable, worker.__file__, "one device", address, "2", str(number), "."], **pipes)
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], [errors for _, errors in ended]
    outcomes = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    assert [outcome["scales"] for outcome in outcomes] == [[2.0**n for n in (10, 9, 8, 8, 7, 7)]] * 2
