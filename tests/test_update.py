"""update follows the rule of `tests/reference.py` bit for bit, however it is run, and the recorded runs of torch."""

import json
import pathlib

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

import reference
from cases import some, some_of_all

TORCH = json.loads((pathlib.Path(__file__).parent / "data" / "torch_grad_scaler_traces.json").read_text())

# The outcomes of a step: whether its gradients are finite, and its loss. A non-finite loss explains a skip; with finite
# gradients it changes nothing.
GOOD = (True, 1.0)
OVERFLOW = (False, 1.0)
BAD_LOSS = (False, np.nan)
GOOD_WITH_BAD_LOSS = (True, np.inf)
WORD_LENGTH = 48
WORDS = st.lists(st.sampled_from([GOOD, OVERFLOW, BAD_LOSS, GOOD_WITH_BAD_LOSS]), min_size=1, max_size=WORD_LENGTH)

SCALERS = {
    "torch": jmpscale.dynamic(min_scale=2.0**-14, growth_interval=3),
    "every_step_grows": jmpscale.dynamic(128.0, growth_interval=1),
    "never_grows": jmpscale.dynamic(growth_interval=reference.COUNTER_LIMIT),
    "megatron": jmpscale.dynamic(256.0, growth_interval=4, hysteresis=3, hysteresis_reset="growth"),
    "apex": jmpscale.dynamic(256.0, growth_interval=4, hysteresis=3, hysteresis_reset="finite"),
    "apex_growing_at_once": jmpscale.dynamic(256.0, growth_interval=1, hysteresis=2, hysteresis_reset="finite"),
    "tight_limits": jmpscale.dynamic(2.0, growth_interval=2, min_scale=1.0, max_scale=8.0),
    "limits_between_powers": jmpscale.dynamic(2.0, growth_interval=2, min_scale=0.3, max_scale=11.1),
    "equal_limits": jmpscale.dynamic(0.1, growth_interval=1, hysteresis=2, min_scale=0.1, max_scale=0.1),
    "odd_factors": jmpscale.dynamic(1000.0, growth_factor=1.1, backoff_factor=0.7, growth_interval=2, hysteresis=2),
    "largest_scales": jmpscale.dynamic(2.0**100, growth_factor=2.0**60, growth_interval=1, max_scale=2.0**126),
    "smallest_scales": jmpscale.dynamic(2.0**-120, backoff_factor=2.0**-60, growth_interval=2, min_scale=2.0**-126),
    "static": jmpscale.static(1.0),
    "static_odd": jmpscale.static(0.1),
}
each_scaler = pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
a_few_scalers = pytest.mark.parametrize("scaler", some(SCALERS, default=["apex", "odd_factors", "static_odd"]))


def _arrays(word):
    finite, loss = zip(*word, strict=True)
    return jnp.array(finite), jnp.array(loss, jnp.float32)


@jax.jit
def _scan(state, finite, loss):
    """Returns the states after each step; without losses if `loss` is None."""

    def body(state, step):
        state = jmpscale.update(state, step[0], loss=step[1])
        return state, state

    return jax.lax.scan(body, state, (finite, loss))[1]


def _expected(state, word):
    """Returns the states after each step according to the reference, as arrays."""
    config = state.config
    now = {name: getattr(state, name).item() for name in reference.FIELDS}
    now["loss_scale"] = np.float32(now["loss_scale"])
    after = []
    for finite, loss in word:
        now = reference.step(config, now, finite, np.isfinite(loss))
        after.append(now)
    return {name: np.array([state[name] for state in after]) for name in reference.FIELDS}


def _assert_same_bits(states, want):
    for name in reference.FIELDS:
        got = np.asarray(getattr(states, name))
        assert got.dtype == (np.float32 if name == "loss_scale" else np.int32), name
        np.testing.assert_array_equal(got.view(np.int32), want[name].astype(got.dtype).view(np.int32), err_msg=name)


def _assert_within_limits(states):
    limits = np.float32([states.config.min_scale, states.config.max_scale])
    scales = np.asarray(states.loss_scale)
    assert (limits[0] <= scales).all()
    assert (scales <= limits[1]).all()


def _assert_follows_the_reference(state, word):
    # Padded, so that the words of all lengths share one compilation.
    states = _scan(state, *_arrays(word + [GOOD] * (WORD_LENGTH - len(word))))
    states = jax.tree.map(lambda x: x[: len(word)], states)
    _assert_same_bits(states, _expected(state, word))
    if state.config.mode == "dynamic":
        _assert_within_limits(states)


@each_scaler
def test_any_word_of_steps_follows_the_reference(scaler):
    @hypothesis.given(WORDS)
    def follows(word):
        _assert_follows_the_reference(scaler, word)

    follows()


COUNTS = st.integers(0, 5) | st.integers(reference.COUNTER_LIMIT - 5, reference.COUNTER_LIMIT)
LEGAL_SCALES = st.floats(-126, 126).map(lambda exponent: 2.0**exponent)


@st.composite
def _legal_scalers(draw):
    """Draws settings, and a state that a program with other settings may have saved."""
    low, high = sorted([draw(LEGAL_SCALES), draw(LEGAL_SCALES)])
    state = jmpscale.dynamic(
        draw(st.sampled_from([low, high]) | st.floats(low, high)),
        growth_factor=draw(st.sampled_from([2.0, 1.0 + 2.0**-23, 2.0**126]) | st.floats(1.001, 100.0)),
        backoff_factor=draw(st.sampled_from([0.5, 1.0 - 2.0**-24, 2.0**-126]) | st.floats(0.01, 0.999)),
        growth_interval=draw(st.integers(1, 10) | st.just(reference.COUNTER_LIMIT)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_reset=draw(st.sampled_from(["growth", "finite"])),
        min_scale=low,
        max_scale=high,
    )
    counters = {name: draw(COUNTS) for name in ("finite_steps", "hysteresis_left", "skipped", "consecutive_skips")}
    return state._replace(**{name: jnp.array(count, jnp.int32) for name, count in counters.items()})


@hypothesis.given(_legal_scalers(), WORDS)
def test_any_legal_state_and_settings_follow_the_reference(state, word):
    _assert_follows_the_reference(state, word)


def _one_by_one(update, time_axis=0):
    def run(state, *steps):
        states = []
        for finite, loss in zip(*(jnp.moveaxis(x, time_axis, 0) for x in steps), strict=True):
            state = update(state, finite, loss)
            states.append(state)
        return jax.tree.map(lambda *x: jnp.stack(x, time_axis), *states)

    return run


def _update_with_loss(state, finite, loss):
    return jmpscale.update(state, finite, loss=loss)


def _seeded_words(count, length, seed=0):
    letters = [GOOD, GOOD, GOOD, GOOD_WITH_BAD_LOSS, OVERFLOW, OVERFLOW, BAD_LOSS]
    picks = np.random.default_rng(seed).integers(len(letters), size=(count, length))
    return [[letters[i] for i in row] for row in picks]


@a_few_scalers
@pytest.mark.parametrize(
    "run", [_one_by_one(_update_with_loss), _one_by_one(jax.jit(_update_with_loss))], ids=["eager", "jit"]
)
def test_eager_and_jit_follow_the_reference_as_scan_does(scaler, run):
    [word] = _seeded_words(1, 24)
    states = run(scaler, *_arrays(word))
    _assert_same_bits(states, _expected(scaler, word))
    chex.assert_trees_all_equal(states, _scan(scaler, *_arrays(word)))


@a_few_scalers
@pytest.mark.parametrize(
    "run",
    [jax.vmap(_scan), _one_by_one(jax.vmap(_update_with_loss), time_axis=1)],
    ids=["vmap of scan", "steps of vmap"],
)
def test_scalers_in_a_batch_are_independent(scaler, run):
    words = _seeded_words(5, 24)
    batch = jax.tree.map(lambda x: jnp.stack([x] * len(words)), scaler)
    finite, loss = zip(*map(_arrays, words), strict=True)
    states = run(batch, jnp.stack(finite), jnp.stack(loss))
    for i, word in enumerate(words):
        _assert_same_bits(jax.tree.map(lambda x, i=i: x[i], states), _expected(scaler, word))


def _on_mesh(axis_type, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    return lambda state: jax.device_put(state, NamedSharding(mesh, spec))


def _in_a_batch(state):
    return jax.tree.map(lambda x: jnp.stack([x] * 8), state)


ALONE = {
    "default device": lambda state: jax.tree.map(jnp.asarray, state),
    "weakly typed": lambda state: jax.tree.map(lambda x: jnp.asarray(x.item()), state),
    "on one device": lambda state: jax.device_put(state, jax.devices()[3]),
    "replicated": _on_mesh(AxisType.Auto, Spec()),
    "replicated by type": _on_mesh(AxisType.Explicit, Spec()),
}
IN_A_BATCH = {
    "batch": _in_a_batch,
    "sharded batch": lambda state: _on_mesh(AxisType.Auto, Spec("data"))(_in_a_batch(state)),
    "batch sharded by type": lambda state: _on_mesh(AxisType.Explicit, Spec("data"))(_in_a_batch(state)),
}


def _scanned(update):
    def run(state, finite, loss):
        return jax.lax.scan(lambda state, _: (update(state, finite, loss), None), state, length=3)[0]

    return jax.jit(run)


@pytest.mark.parametrize("run", some({"eager": lambda fn: fn, "jit": jax.jit, "scan": _scanned}, default=["jit"]))
@pytest.mark.parametrize(
    ("name", "place"),
    some_of_all(
        ["megatron", "apex", "static", "disabled"],
        ALONE | IN_A_BATCH,
        default=[
            *(("apex", place) for place in ALONE | IN_A_BATCH),
            ("static", "default device"),
            ("disabled", "batch"),
        ],
    ),
)
def test_structure_types_and_sharding_of_a_state_never_change(name, place, run):
    state = (ALONE | IN_A_BATCH)[place](jmpscale.disabled() if name == "disabled" else SCALERS[name])
    update = jax.vmap(_update_with_loss, in_axes=(0, None, None)) if place in IN_A_BATCH else _update_with_loss
    update = run(update)
    for finite, loss in (GOOD, OVERFLOW, BAD_LOSS):
        after = update(state, np.bool_(finite), np.float32(loss))
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            # A type is a dtype, a shape, a weak type and, along axes that are explicit, a sharding.
            assert jax.typeof(now) == jax.typeof(was)
            assert now.sharding.is_equivalent_to(was.sharding, was.ndim)
            assert now.committed == was.committed, "else the next step is compiled once more"


LONG_RUNS = {
    "defaults": (jmpscale.dynamic(), 1 / 3_000, 1 / 30_000),
    "odd_factors": (
        jmpscale.dynamic(
            growth_factor=1.3, backoff_factor=0.7, growth_interval=7, hysteresis=2, min_scale=0.9, max_scale=1e5
        ),
        1 / 10,
        1 / 50,
    ),
}


@pytest.mark.parametrize(("scaler", "overflows", "bad_losses"), LONG_RUNS.values(), ids=LONG_RUNS)
def test_sixty_thousand_steps_keep_to_the_reference(scaler, overflows, bad_losses):
    random = np.random.default_rng(0)
    finite = random.random(60_000) >= overflows
    loss = np.where(random.random(60_000) >= bad_losses, 1.0, np.nan)
    finite &= np.isfinite(loss)
    states = _scan(scaler, jnp.array(finite), jnp.array(loss, jnp.float32))
    _assert_same_bits(states, _expected(scaler, zip(finite, loss, strict=True)))
    scales = np.asarray(states.loss_scale)
    assert len(np.unique(scales)) > 5, "the scale must change in this run"
    assert (scales[1:] > scales[:-1]).any()
    assert (scales[1:] < scales[:-1]).any()


LAST_TWO = [reference.COUNTER_LIMIT, reference.COUNTER_LIMIT]


@a_few_scalers
@pytest.mark.parametrize("letter", [OVERFLOW, BAD_LOSS], ids=["overflow", "bad loss"])
def test_counters_of_skips_stop_at_their_limit(scaler, letter):
    full = jnp.array(reference.COUNTER_LIMIT - 1, jnp.int32)
    states = _scan(scaler._replace(skipped=full, consecutive_skips=full), *_arrays([letter] * 2))
    assert states.skipped.tolist() == LAST_TWO
    assert states.consecutive_skips.tolist() == LAST_TWO


def test_the_counter_of_finite_steps_stops_at_its_limit():
    full = jnp.array(reference.COUNTER_LIMIT - 1, jnp.int32)
    assert _scan(SCALERS["static"]._replace(finite_steps=full), *_arrays([GOOD] * 2)).finite_steps.tolist() == LAST_TWO


def test_the_longest_growth_interval_ends():
    almost = SCALERS["never_grows"]._replace(finite_steps=jnp.array(reference.COUNTER_LIMIT - 2, jnp.int32))
    states = _scan(almost, *_arrays([GOOD] * 2))
    assert states.finite_steps.tolist() == [reference.COUNTER_LIMIT - 1, 0]
    assert states.loss_scale.tolist() == [2.0**16, 2.0**17]


@a_few_scalers
def test_any_number_of_steps_is_traced_once(scaler):
    step = jax.jit(chex.assert_max_traces(_update_with_loss, n=1))
    [word] = _seeded_words(1, 40)
    for finite, loss in zip(*_arrays(word), strict=True):
        scaler = step(scaler, finite, loss)
    assert scaler.skipped == sum(not finite for finite, _ in word)


def test_without_a_loss_every_skip_is_an_overflow():
    [word] = _seeded_words(1, WORD_LENGTH)
    finite, _ = _arrays(word)
    states = _scan(SCALERS["apex"], finite, None)
    _assert_same_bits(states, _expected(SCALERS["apex"], [(finite, 1.0) for finite, _ in word]))


@pytest.mark.parametrize("trace", TORCH["traces"], ids=range(len(TORCH["traces"])))
def test_between_the_limits_the_rule_is_that_of_torch(trace):
    # The lowest scale in these runs of torch, which has no floor, is 2^-13; the highest is below the default ceiling.
    state = jmpscale.dynamic(min_scale=2.0**-14, **trace["config"])
    word = [OVERFLOW if found_inf else GOOD for found_inf in trace["found_inf"]]
    after = _expected(state, word)
    states = _scan(state, _arrays(word)[0], None)
    _assert_same_bits(states, after)
    for scales, finite_steps in [
        (states.loss_scale, states.finite_steps),
        (after["loss_scale"], after["finite_steps"]),
    ]:
        # Compared as float64, in which every float32 is exact: nothing is rounded on the way.
        np.testing.assert_array_equal(np.asarray(scales, np.float64), trace["scale_after"])
        np.testing.assert_array_equal(finite_steps, trace["growth_tracker_after"])
