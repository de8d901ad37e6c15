"""`update` follows the rule in `reference.py` bit for bit, under every transformation."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import jmpscale
from jmpscale import SkipReason

import reference
from compiling import count_compilations
from tables import names, rows

LIMIT = reference.COUNTER_LIMIT

# Settings with which a short run takes every branch of the rule.
APEX = jmpscale.dynamic(
    1000.0,
    growth_factor=1.1,
    backoff_factor=0.7,
    growth_interval=3,
    hysteresis=2,
    hysteresis_reset="finite",
    min_scale=600.0,
    max_scale=1300.0,
)
NEAR_LIMIT = np.int32(LIMIT - 5)  # of a counter
STATES = {
    "apex": APEX._replace(total_skips=NEAR_LIMIT),
    "megatron": jmpscale.dynamic(256.0, growth_interval=4, hysteresis=3),
    "torch": jmpscale.dynamic(256.0, growth_interval=1, max_scale=512.0)._replace(consecutive_skips=np.int32(LIMIT)),
    "static": jmpscale.static(0.1)._replace(finite_steps=NEAR_LIMIT, total_steps=NEAR_LIMIT),
    # Settings that a user has changed apply to a scale and to counters outside the new limits.
    "above max_scale": jmpscale.dynamic(growth_interval=2, max_scale=2.0**16)._replace(loss_scale=np.float32(2.0**20)),
    "below min_scale": jmpscale.dynamic(min_scale=2.0**12, max_scale=2.0**17)._replace(loss_scale=np.float32(2.0)),
}


def _update(state, finite, loss):
    return jmpscale.update(state, finite, loss=loss)


def _scan(state, finite, loss):
    def body(state, outcome):
        state = _update(state, *outcome)
        return state, state

    return jax.lax.scan(body, state, (finite, loss))[1]


def _random_outcomes(length, seed=0):
    """Returns flags and losses; some losses are not finite although the gradients are."""
    random = np.random.default_rng(seed)
    return random.random(length) < 0.6, random.choice(np.float32([1, 1, 1, np.nan, np.inf]), length)


def _expected(state, finite, loss):
    now = {name: getattr(state, name).item() for name in reference.FIELDS}
    after = []
    for flag, value in zip(finite, loss, strict=True):
        now = reference.step(state.config, now, flag, np.isfinite(value))
        after.append(now)
    return after


def _assert_equal_bits(states, expected):
    """Compares a batch of states with a list of states of the reference."""
    for name in reference.FIELDS:
        got = np.asarray(getattr(states, name))
        want = np.array([state[name] for state in expected]).astype(got.dtype)
        assert got.dtype == (np.float32 if name == "loss_scale" else np.int32), name
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32), err_msg=name)


# update follows the rule


@st.composite
def _configs(draw):
    """Draws settings of all magnitudes, their limits included."""
    scales = st.sampled_from([2.0**-126, 1.0, 2.0**126]) | st.floats(-126, 126).map(lambda exponent: 2.0**exponent)
    low, high = sorted([draw(scales), draw(scales)])
    return jmpscale.ScalerConfig(
        growth_factor=draw(st.sampled_from([2.0, 1.0 + 2.0**-23, 2.0**126]) | st.floats(1.001, 100.0)),
        backoff_factor=draw(st.sampled_from([0.5, 1.0 - 2.0**-24, 2.0**-126]) | st.floats(0.01, 0.999)),
        growth_interval=draw(st.integers(1, 10) | st.just(LIMIT)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_reset=draw(st.sampled_from(["growth", "finite"])),
        min_scale=low,
        max_scale=high,
    )


def _random_states(config, count):
    """Returns a batch of states at and between the limits of `config`, with counters at which the rule changes."""
    random = np.random.default_rng(0)
    low, high = np.float32(config.min_scale), np.float32(config.max_scale)
    scales = [low, np.float32(low * np.float32(1.5)), np.float32(high / np.float32(1.5)), high]
    before_growth = [max(config.growth_interval - steps, 0) for steps in (1, 2)]
    counters = [0, 1, 2, 3, LIMIT - 1, LIMIT, *before_growth, config.hysteresis]
    fields = {name: random.choice(np.int32(counters), count) for name in reference.FIELDS}
    fields["loss_scale"] = np.clip(random.choice(scales, count), low, high)
    fields["last_skip_reason"] = random.choice(np.int32(SkipReason), count)
    return jmpscale.ScalerState(**fields, config=config)


@pytest.mark.full
@hypothesis.given(_configs())
@hypothesis.example(jmpscale.ScalerConfig())
@hypothesis.example(jmpscale.ScalerConfig(mode="static"))
@hypothesis.example(jmpscale.ScalerConfig(growth_interval=LIMIT))
@hypothesis.example(jmpscale.ScalerConfig(growth_interval=1, hysteresis=2, hysteresis_reset="finite", max_scale=1.0))
def test_update_follows_reference_from_any_state(config):
    states, outcomes = _random_states(config, 96), _random_outcomes(96)
    # Without jit, because each example would compile a program of its own.
    with jax.disable_jit():
        after = jax.vmap(_update)(states, *outcomes)
    expected = []
    for i, outcome in enumerate(zip(*outcomes, strict=True)):
        expected += _expected(jax.tree.map(lambda x, i=i: x[i], states), *([value] for value in outcome))
    _assert_equal_bits(after, expected)


def _in_python(update):
    def run(state, finite, loss):
        states = []
        for outcome in zip(finite, loss, strict=True):
            state = update(state, *outcome)
            states.append(state)
        return jax.tree.map(lambda *x: np.stack(x), *states)

    return run


RUNS = {"eager": _in_python(_update), "jit": _in_python(jax.jit(_update)), "scan": jax.jit(_scan)}


@pytest.mark.parametrize("state", rows(STATES))
@pytest.mark.parametrize("run", rows(RUNS, {"eager", "jit"}))
def test_update_follows_reference_step_by_step(state, run):
    outcomes = _random_outcomes(40)
    _assert_equal_bits(run(state, *outcomes), _expected(state, *outcomes))


# The loss decides the reason of a skip

START = jmpscale.dynamic(1024.0)._replace(finite_steps=np.int32(1))
AT_LIMIT = START._replace(loss_scale=np.float32(1.0))
MIXED_LOSSES = {"a": jnp.ones(3), "count": jnp.int32(2), "name": "x"}
OUTCOMES = {  # the state, the flag, the loss, and the expected scale, count of finite steps, and reason
    "finite, although the loss is not": (START, np.True_, np.nan, (1024, 2, SkipReason.NONE)),
    "no loss": (START, False, None, (512, 0, SkipReason.GRADIENTS)),
    "finite loss": (START, np.False_, 1.0, (512, 0, SkipReason.GRADIENTS)),
    "tree of finite losses": (START, jnp.array(False), MIXED_LOSSES, (512, 0, SkipReason.GRADIENTS)),
    "empty tree of losses": (START, False, {}, (512, 0, SkipReason.GRADIENTS)),
    "infinite loss": (START, False, -np.inf, (1024, 1, SkipReason.LOSS)),
    "one NaN in a tree of losses": (
        START,
        False,
        MIXED_LOSSES | {"b": jnp.float16([1, jnp.nan])},
        (1024, 1, SkipReason.LOSS),
    ),
    "at min_scale": (AT_LIMIT, False, None, (1, 0, SkipReason.MIN_SCALE)),
    "at min_scale, NaN loss": (AT_LIMIT, False, np.nan, (1, 1, SkipReason.LOSS)),
}


@pytest.mark.parametrize("row", rows(OUTCOMES))
def test_update_distinguishes_the_reasons_of_a_skip(row):
    state, finite, loss, expected = row
    after = jmpscale.update(state, finite, loss=loss)
    assert (after.loss_scale, after.finite_steps, after.last_skip_reason) == expected
    assert after.total_skips == after.consecutive_skips == (0 if finite else 1)


def test_update_returns_a_disabled_scaler_itself():
    state = jmpscale.disabled()
    assert jmpscale.update(state, False, loss=np.nan) is state


# The state keeps its type as a carry


def _on_mesh(axis_type, spec):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(axis_type,))
    return lambda state: jax.device_put(state, NamedSharding(mesh, spec))


def _batch(state):
    return jax.tree.map(lambda x: jnp.stack([x] * 8), state)


ALONE = {
    "default_device": lambda state: jax.tree.map(jnp.asarray, state),
    "weakly_typed": lambda state: jax.tree.map(lambda x: jnp.asarray(x.item()), state),
    "other_device": lambda state: jax.device_put(state, jax.devices()[-1]),
    "replicated": _on_mesh(AxisType.Auto, Spec()),
    "replicated_by_type": _on_mesh(AxisType.Explicit, Spec()),
}
BATCHES = {
    "batch": _batch,
    "sharded_batch": lambda state: _on_mesh(AxisType.Auto, Spec("data"))(_batch(state)),
    "batch_sharded_by_type": lambda state: _on_mesh(AxisType.Explicit, Spec("data"))(_batch(state)),
}


@pytest.mark.parametrize("mode", ["dynamic", pytest.param("static", marks=pytest.mark.full)])
@pytest.mark.parametrize("place", names(ALONE | BATCHES, BATCHES.keys() | {"replicated"}))
def test_update_keeps_types_and_shardings(place, mode):
    state = (ALONE | BATCHES)[place](APEX if mode == "dynamic" else jmpscale.static(2.0))
    update = jax.jit(jax.vmap(_update, in_axes=(0, None, None)) if place in BATCHES else _update)
    for finite, loss in ((True, 1.0), (False, 1.0), (False, np.nan)):
        after = update(state, np.bool_(finite), np.float32(loss))
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            # A type is a dtype, a shape, a weak type and, along axes that are explicit, a sharding.
            assert jax.typeof(now) == jax.typeof(was)
            assert now.sharding.is_equivalent_to(was.sharding, was.ndim)
            assert now.committed == was.committed, "otherwise the next step would be compiled again"


@pytest.mark.parametrize("mode", ["dynamic", "static", "disabled"])
def test_update_compiles_once(mode):
    state = {"dynamic": APEX, "static": jmpscale.static(2.0), "disabled": jmpscale.disabled()}[mode]
    update = jax.jit(chex.assert_max_traces(_update, n=1), donate_argnums=0)
    finite, loss = _random_outcomes(20)
    skipped = 0
    with count_compilations() as compilations:
        for outcome in zip(finite, loss, strict=True):
            state = update(state, *outcome)
            skipped += not outcome[0]
    assert len(compilations) == 1
    assert state.total_skips == (0 if mode == "disabled" else skipped)
