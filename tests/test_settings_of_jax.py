"""A training run gives the same bits under all settings of JAX, in several threads, and from the compilation cache."""

import inspect
import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

import pages


def _step(carry, x):
    """Trains with the functional API and with the optax wrapper, on the same loss."""
    params, scaler, wrapped, opt_state = carry

    def loss_fn(w):
        return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)

    loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params)
    finite = jmpscale.all_finite(grads)
    params = jmpscale.apply_if(finite, lambda w: w - jnp.float32(0.01) * grads, params)
    scaler = jmpscale.update(scaler, finite, loss=loss)
    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, wrapped)
    updates, opt_state = _tx().update(grads, opt_state, wrapped, value=loss)
    return params, scaler, optax.apply_updates(wrapped, updates), opt_state


def _tx():
    return jmpscale.with_loss_scaling(optax.trace(0.9), jmpscale.dynamic(2.0**18, growth_interval=3))


def _train(step=None):
    """Trains from a scale that is too large, with one bad batch; returns the bits of the result, and the result."""
    step = jax.jit(lambda *args: _step(*args)) if step is None else step
    w = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    carry = jax.tree.map(jnp.asarray, (w, jmpscale.dynamic(2.0**18, growth_interval=3), w, _tx().init(w)))
    for number in range(9):
        x = np.random.default_rng(number).standard_normal((4, 8)).astype(np.float32)
        carry = step(carry, x * np.float32(1e5) if number == 4 else x)
    carry = jax.device_get(carry)
    return [[list(x.shape), x.dtype.name, x.tobytes().hex()] for x in jax.tree.leaves(carry)], carry


@pytest.fixture(scope="module")
def expected():
    with jax.numpy_dtype_promotion("standard"):
        bits, (_, scaler, _, opt_state) = _train()
    for state in (scaler, jmpscale.get_scaler(opt_state)):
        assert int(state.last_skip) in (1, 2)
        assert 2 < int(state.skipped) < 8
        assert state.loss_scale < 2.0**18
    return bits


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "settings",
    [
        {"jax_enable_x64": True},
        {"jax_debug_nans": True, "jax_debug_infs": True},
        {"jax_enable_checks": True},
        {"jax_check_tracer_leaks": True},
        {"jax_numpy_rank_promotion": "allow"},
        {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "standard"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_under_any_setting_of_jax_a_compiled_training_gives_the_same_bits(settings, expected):
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert _train()[0] == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("enable", [False, True])
def test_64_bits_allowed_or_not_a_state_keeps_its_32(enable):
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enable)
    try:
        state = jmpscale.update(jmpscale.dynamic(), np.bool_(False), loss=np.float64(1.0))
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
        loss, grads = jmpscale.value_and_grad(lambda w: jnp.sum(w**2))(state, jnp.asarray([1.0, 3.0]))
        assert loss.dtype == grads.dtype == (jnp.float64 if enable else jnp.float32)
        assert grads.tolist() == [2.0, 6.0]
    finally:
        jax.config.update("jax_enable_x64", before)


def test_with_the_debugging_flags_on_a_jitted_step_goes_on_after_an_overflow_and_stops_at_a_bad_loss():
    page = pages.run("skips", "Debugging flags")
    assert int(page["scaler"].skipped) > 0
    assert int(page["scaler"].last_skip) == 1
    assert "encountered in" in str(page["error"])
    step, params, x = page["train_step"], page["params"], page["x"]
    with jax.debug_nans(True), jax.debug_infs(True):
        gated = jax.jit(lambda *args: step(*args)[:2])
        after, scaler = gated(params, page["scaler"], jnp.full_like(x, 6e4))
        testing.assert_step_is_noop(params, after)
        assert scaler.last_skip == 2
        with pytest.raises(FloatingPointError, match="invalid value"):
            jax.jit(jmpscale.value_and_grad(page["loss_fn"]))(jmpscale.dynamic(2.0**24), params, x)
        with jax.disable_jit(), pytest.raises(FloatingPointError, match="invalid value"):
            step(params, jmpscale.dynamic(2.0**24), x)
        # Without jit every result is checked. Where nothing overflows, nothing may be found.
        grads, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), {"w": jnp.ones(3), "b": jnp.ones(2)})
        assert int(jmpscale.update(jmpscale.dynamic(), finite, loss=jnp.float32(1.0)).finite_steps) == 1
        assert jmpscale.grad_report(grads).describe().startswith("All 2 leaves are finite")
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit():
            after, scaler = step(params, jmpscale.dynamic(2.0**24), x)[:2]
    testing.assert_step_is_noop(params, after)
    assert scaler.last_skip == 1


@pytest.mark.usefixtures("standard_promotion")
def test_threads_that_share_a_jitted_step_do_not_disturb_each_other(expected):
    step = jax.jit(lambda *args: _step(*args))
    together, results = threading.Barrier(8), {}

    def work(number):
        with jax.numpy_dtype_promotion("standard"):
            together.wait(60)
            results[number] = [_train(step)[0] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {number: [expected] * 5 for number in range(8)}
    assert step._cache_size() == 1


# Only the training of the tests above, because this module takes long to import.
CACHED = """
import json, sys, jax, jax.numpy as jnp, jmpscale, numpy as np, optax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
{sources}
bits, _ = _train()
print(json.dumps([events.count("/jax/compilation_cache/cache_hits"), bits]))
"""


@pytest.mark.full
def test_a_second_process_reads_the_compilation_cache_and_gets_the_same_bits(expected, tmp_path):
    program = CACHED.format(sources="\n".join(map(inspect.getsource, (_step, _tx, _train))))
    command = [sys.executable, "-c", program, tmp_path]
    runs = []
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        hits, bits = json.loads(ended.stdout.splitlines()[-1])
        assert bits == expected
        runs.append(hits)
    assert any(tmp_path.iterdir())
    assert runs[0] < runs[1]
