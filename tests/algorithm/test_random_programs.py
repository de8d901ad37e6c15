"""Training with faults equals a reference in NumPy bit for bit: in several ways, under settings of JAX, in threads."""

import contextlib
import functools
import gc
import re
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated

import reference
from bits import assert_equal_bits
from compiling import count_compilations

STEPS, ROWS = 6, 16
RNG = np.random.default_rng(0)
SCALER = jmpscale.dynamic(2.0**6, growth_interval=2, hysteresis=2, max_scale=2.0**7)
PARAMS = {name: RNG.integers(-8, 9, ROWS).astype(np.float32) for name in ("b", "w")}
START = (PARAMS, {name: np.zeros(ROWS, np.float32) for name in PARAMS}, SCALER)
BATCHES = {  # all factors are powers of two, so that it does not matter whether XLA fuses a product and a sum
    "x": RNG.choice(np.float32([-2, -1, 0.5, 1]), (STEPS, ROWS)),
    "y": RNG.integers(-8, 9, (STEPS, ROWS)).astype(np.float32),
    "row": np.tile(np.arange(ROWS, dtype=np.int32), (STEPS, 1)),
}
# Each step has a fault, which consists of its place, its row and its value.
NOWHERE, IN_GRAD_OF_B, IN_GRAD_OF_W, IN_LOSS = range(4)
FAULTS = st.tuples(
    st.sampled_from([NOWHERE, NOWHERE, IN_GRAD_OF_B, IN_GRAD_OF_W, IN_LOSS]),
    st.integers(0, ROWS - 1),
    st.sampled_from([np.inf, -np.inf, np.nan]),
)
EACH_KIND = [(NOWHERE, 0, 0), (IN_GRAD_OF_B, 15, np.nan), (IN_GRAD_OF_W, 7, -np.inf), (IN_LOSS, 8, np.inf)]
EACH_KIND += [(IN_LOSS, 3, np.nan), (NOWHERE, 0, 0)]

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]


def _train_in_numpy(faults):
    (params, velocity, _), history = START, []
    scaler = dict(zip(reference.FIELDS, SCALER, strict=False))
    for i, place in enumerate(faults["place"]):
        x, y = BATCHES["x"][i], BATCHES["y"][i]
        residual = params["w"] * x + params["b"] - y
        if place == NOWHERE:
            grads = {"b": 2 * residual, "w": 2 * residual * x}
            velocity = {name: velocity[name] * np.float32(0.5) + grads[name] for name in params}
            params = {name: params[name] - velocity[name] * np.float32(0.125) for name in params}
        scaler = reference.step(SCALER.config, scaler, place == NOWHERE, place != IN_LOSS)
        fields = [np.asarray(x, getattr(SCALER, name).dtype) for name, x in scaler.items()]
        history.append((params, velocity, jmpscale.ScalerState(*fields, SCALER.config)))
    return jax.tree.map(lambda *x: np.stack(x), *history)


def _update(grads, velocity, params=None):
    velocity = jax.tree.map(lambda v, g: v * 0.5 + g, velocity, grads)
    return jax.tree.map(lambda v: v * -0.125, velocity), velocity


MOMENTUM = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), _update)


def _loss_and_grads(holder, params, batch, fault, total):
    def with_fault(place, x):
        return jnp.where((batch["row"] == fault["row"]) & (fault["place"] == place), fault["value"], x)

    def loss_fn(params):
        y = with_fault(IN_LOSS, batch["y"])
        return total(jnp.sum((params["w"] * batch["x"] + params["b"] - y) ** 2))

    loss, grads = jmpscale.value_and_grad(loss_fn)(holder, params)
    return loss, {"b": with_fault(IN_GRAD_OF_B, grads["b"]), "w": with_fault(IN_GRAD_OF_W, grads["w"])}


def _functional(carry, batch, fault, total=lambda x: x):
    params, velocity, scaler = carry
    loss, grads = _loss_and_grads(scaler, params, batch, fault, total)
    finite = jmpscale.all_finite(grads)
    params, velocity = jmpscale.apply_if(finite, jmpscale.optax_step(MOMENTUM, grads), params, velocity)
    return params, velocity, jmpscale.update(scaler, finite, loss=loss)


def _wrapper(carry, batch, fault, total=lambda x: x):
    params, velocity, scaler = carry
    opt_state = jmpscale.WithLossScalingState(scaler, velocity, None)
    loss, grads = _loss_and_grads(opt_state, params, batch, fault, total)
    updates, opt_state = jmpscale.with_loss_scaling(MOMENTUM).update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state.inner_state, opt_state.scaler


# Each way turns a step into a function `run(carry, batches, faults)`, which returns the states after each step.


def _loop(step):
    def run(carry, batches, faults):
        history = []
        for i in range(STEPS):
            carry = step(carry, *jax.tree.map(lambda x, i=i: x[i], (batches, faults)))
            history.append(carry)
        return jax.tree.map(lambda *x: np.stack(x), *history)

    return run


def _scan(step):
    def body(carry, batch_and_fault):
        carry = step(carry, *batch_and_fault)
        return carry, carry

    return jax.jit(lambda carry, batches, faults: jax.lax.scan(body, carry, (batches, faults))[1])


def _vmap(step):
    """Runs three members; the first never overflows, and the last always does."""
    scan = jax.jit(jax.vmap(_scan(step), in_axes=(None, None, 0)))

    def run(carry, batches, faults):
        never, always = (np.full_like(faults["place"], place) for place in (NOWHERE, IN_GRAD_OF_B))
        members = [faults | {"place": place} for place in (never, faults["place"], always)]
        histories = scan(carry, batches, jax.tree.map(lambda *x: np.stack(x), *members))
        return jax.tree.map(lambda x: x[1], histories)

    return run


def _mesh(step, axis_type=AxisType.Auto, shard_map=False):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    state, rows = (P("data"), P("data"), P()), P(None, "data")
    scan = _scan(step)
    if shard_map:
        scan = _scan(functools.partial(step, total=lambda loss: jax.lax.psum(loss, "data")))
        scan = jax.jit(jax.shard_map(scan, mesh=mesh, in_specs=(state, rows, P()), out_specs=(rows, rows, P())))

    def run(carry, batches, faults):
        put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
        with jax.set_mesh(mesh):
            return scan(tuple(map(put, carry, state)), put(batches, rows), put(faults, P()))

    return run


WAYS = {
    "eager": _loop,
    "disable_jit": lambda step: jax.disable_jit()(_loop(step)),
    "scan": _scan,
    "vmap": _vmap,
    "explicit": functools.partial(_mesh, axis_type=AxisType.Explicit),
    "auto": _mesh,
    "shard_map": functools.partial(_mesh, shard_map=True),
}


each_step = pytest.mark.parametrize("step", [_functional, _wrapper], ids=["functional", "wrapper"])


def _arrays(faults):
    place, row, value = map(np.array, zip(*faults, strict=True))
    return {"place": place, "row": row.astype(np.int32), "value": value.astype(np.float32)}


def _assert_equals_numpy(history, faults=EACH_KIND):
    assert_equal_bits(_train_in_numpy(_arrays(faults)), jax.device_get(history))


@pytest.mark.parametrize("way", WAYS)
@each_step
def test_training_with_faults_equals_the_reference(step, way):
    run = WAYS[way](step)

    def check(faults):
        history = run(START, BATCHES, _arrays(faults))
        assert_replicated(history[2])
        _assert_equals_numpy(history, faults)

    check(EACH_KIND)
    with count_compilations() as compilations:
        check(EACH_KIND)
    assert not compilations
    if way not in ("eager", "disable_jit"):  # these are slow
        hypothesis.given(st.lists(FAULTS, min_size=STEPS, max_size=STEPS))(check)()


def _first_step():
    return START, *jax.tree.map(lambda x: x[0], (BATCHES, _arrays(EACH_KIND)))


@each_step
def test_step_makes_no_transfer_between_host_and_device(step):
    program = jax.jit(step).lower(*_first_step()).compile().as_text()
    assert not re.search(r"callback|infeed|outfeed|\bsend\b|\brecv\b", program)


def test_memory_of_a_training_loop_does_not_grow():
    step, (carry, *args), sizes = jax.jit(_functional), _first_step(), []
    monitor = jmpscale.RunMonitor(max_consecutive_skips=5)
    for i in range(300):
        carry = step(carry, *args)
        jmpscale.metrics(carry[-1])
        jmpscale.grad_report(carry[0]).describe()
        monitor.raise_if_stuck(carry[-1])
        if i in (100, 299):
            gc.collect()
            sizes.append((len(jax.live_arrays()), len(gc.get_objects())))
    (arrays, objects), (arrays_after, objects_after) = sizes
    assert arrays_after == arrays
    assert objects_after - objects < 100  # one object for each step would add 199


# Settings of JAX, threads and the compilation cache change no bit.

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


@pytest.mark.parametrize("name", SETTINGS)
@each_step
def test_setting_keeps_the_bits_of_a_compiled_run(step, name):
    args = jax.device_put((START, BATCHES, _arrays(EACH_KIND)))
    with _settings(**SETTINGS[name]):
        history = jax.device_get(_scan(step)(*args))
    _assert_equals_numpy(history)


def test_debug_nans_accepts_finite_gradients_without_jit():
    with _settings(jax_debug_nans=True, jax_debug_infs=True):
        grads, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), {"w": jnp.ones(3)})
        assert jmpscale.update(jmpscale.dynamic(), finite, loss=jnp.float32(1.0)).finite_steps == 1
        assert jmpscale.grad_report(grads).describe().startswith("All leaves are finite")


def test_threads_share_a_jitted_step():
    run, together, results = _scan(_wrapper), threading.Barrier(4), []

    def work():
        with jax.numpy_dtype_promotion("standard"):
            together.wait(60)
            results.extend(run(START, BATCHES, _arrays(EACH_KIND)) for _ in range(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 8
    for history in results:
        _assert_equals_numpy(history)


def test_compilation_cache_keeps_the_bits(tmp_path):
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
            _assert_equals_numpy(_scan(_functional)(START, BATCHES, _arrays(EACH_KIND)))
            counts.append(len(hits))
    compilation_cache.reset_cache()
    assert counts[0] < counts[1]
