"""A training run gives the same bits under each setting of JAX, in threads, and from the compilation cache."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jmpscale

pytestmark = pytest.mark.full

TX = jmpscale.with_loss_scaling(optax.trace(0.9), jmpscale.dynamic(2.0**18, growth_interval=3))
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}  # halves the compile time


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
    updates, opt_state = TX.update(grads, opt_state, wrapped, value=loss)
    return params, scaler, optax.apply_updates(wrapped, updates), opt_state


def _start():
    w = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    return jax.device_put((w, jmpscale.dynamic(2.0**18, growth_interval=3), w, TX.init(w)))


def _train(step, carry):
    """Trains from a scale that is too large, with one batch that overflows; returns the final carry."""
    for number in range(9):
        x = np.random.default_rng(number).standard_normal((4, 8)).astype(np.float32)
        carry = step(carry, jax.device_put(x * np.float32(1e5) if number == 4 else x))
    return jax.device_get(carry)


def _bits(tree):
    return [[list(x.shape), x.dtype.name, x.tobytes().hex()] for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def expected():
    with jax.numpy_dtype_promotion("standard"):
        carry = _train(jax.jit(_step, **FAST), _start())
    for scaler in (carry[1], jmpscale.get_scaler(carry[3])):
        assert scaler.last_skip_reason in (1, 2)
        assert 2 < scaler.total_skips < 8
        assert scaler.loss_scale < 2.0**18
    return carry


SETTINGS = {
    "x64": {"jax_enable_x64": True},
    "debug": {"jax_debug_nans": True, "jax_debug_infs": True},
    "checks": {"jax_enable_checks": True},
    "tracer-leaks": {"jax_check_tracer_leaks": True},
    "transfer-guard": {"jax_transfer_guard": "disallow"},
}


@contextlib.contextmanager
def _settings(**settings):
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_keeps_the_bits_of_a_compiled_run(name, expected):
    start = _start()
    with _settings(**SETTINGS[name]):
        assert _bits(_train(jax.jit(lambda *args: _step(*args), **FAST), start)) == _bits(expected)


def test_x64_keeps_the_dtypes_of_a_state(x64):
    state = jmpscale.dynamic(growth_interval=1)
    dtypes = [x.dtype for x in jax.tree.leaves(state)]
    for finite in (True, False):
        state = jmpscale.update(state, np.bool_(finite), loss=np.float64(1.0))
        assert [x.dtype for x in jax.tree.leaves(state)] == dtypes
    loss, grads = jmpscale.value_and_grad(lambda w: jnp.sum(w**2))(state, jnp.array([1.0, 3.0]))
    assert loss.dtype == grads.dtype == jnp.float64
    assert grads.tolist() == [2.0, 6.0]


def test_debug_nans_accepts_finite_gradients_without_jit():
    with _settings(jax_debug_nans=True, jax_debug_infs=True):
        grads, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), {"w": jnp.ones(3)})
        assert jmpscale.update(jmpscale.dynamic(), finite, loss=jnp.float32(1.0)).finite_steps == 1
        assert jmpscale.grad_report(grads).describe().startswith("All leaves are finite")


@pytest.mark.usefixtures("standard_promotion")
def test_threads_share_a_jitted_step(expected):
    step, together, results = jax.jit(lambda *args: _step(*args), **FAST), threading.Barrier(4), {}

    def work(number):
        with jax.numpy_dtype_promotion("standard"):
            together.wait(60)
            results[number] = [_bits(_train(step, _start())) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {number: [_bits(expected)] * 2 for number in range(4)}


@pytest.mark.usefixtures("standard_promotion")
def test_compilation_cache_keeps_the_bits(expected, tmp_path):
    """Between the runs JAX forgets its programs, as in a new process."""
    hits, counts = [], []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with _settings(**settings):
        compilation_cache.reset_cache()
        for _ in range(2):
            jax.clear_caches()
            hits.clear()
            assert _bits(_train(jax.jit(_step, **FAST), _start())) == _bits(expected)
            counts.append(len(hits))
    compilation_cache.reset_cache()
    assert counts[0] < counts[1]
