"""Runs as long as real ones: ten million updates, thousands of training steps with faults, memory that stays flat.

Runs of seconds are marked full, runs of minutes slow; a shorter form of most of them is unmarked.
"""

import functools
import gc
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import inject

import compilations
import reference
from cases import some

pytestmark = pytest.mark.once
FULL, SLOW = pytest.mark.full, pytest.mark.slow

LIMIT = reference.COUNTER_LIMIT
GRADIENTS, LOSS = jmpscale.SkipReason.GRADIENTS, jmpscale.SkipReason.LOSS


# --- ten million updates ---

UPDATES, LOOKS = 10_000_000, 1_000

# Each rule with the frequencies of overflows and of non-finite losses.
RULES = {
    "defaults": (jmpscale.dynamic(), 1 / 3_000, 1 / 30_000),
    "apex with odd factors": (
        jmpscale.dynamic(
            1000.0,
            growth_factor=1.3,
            backoff_factor=0.7,
            growth_interval=450,
            hysteresis=2,
            hysteresis_reset="finite",
            min_scale=0.9,
            max_scale=1e30,
        ),
        1 / 100,
        1 / 500,
    ),
    "megatron": (jmpscale.dynamic(growth_interval=105, hysteresis=3), 1 / 90, 1 / 900),
    "static": (jmpscale.static(0.1), 1 / 200, 1 / 200),
}
OF_A_RULE = ("scaler", "overflows", "bad_losses")


@jax.jit
def _scan(state, finite, loss_finite):
    """Returns the states after each chunk of steps, and the smallest and the largest loss scale of the run."""

    def one(carry, step):
        state, low, high = carry
        finite, loss_finite = step
        state = jmpscale.update(state, finite, loss=jnp.where(loss_finite, 1.0, jnp.nan))
        return (state, jnp.minimum(low, state.loss_scale), jnp.maximum(high, state.loss_scale)), None

    def chunk(carry, steps):
        carry, _ = jax.lax.scan(one, carry, steps)
        return carry, carry[0]

    start = state, state.loss_scale, state.loss_scale
    (_, low, high), states = jax.lax.scan(chunk, start, (finite, loss_finite))
    return states, low, high


def _flags(overflows, bad_losses):
    random = np.random.default_rng(0)
    loss_finite = random.random(UPDATES, np.float32) >= bad_losses
    finite = (random.random(UPDATES, np.float32) >= overflows) & loss_finite
    return finite.reshape(LOOKS, -1), loss_finite.reshape(LOOKS, -1)


def _near_the_limits(state):
    """Returns the state with counters that reach their limit in the run, after some skips or some finite steps."""
    skips = jnp.array(LIMIT - 2_000, jnp.int32)
    finite = jnp.array(LIMIT - 50 if state.config.mode == "static" else 0, jnp.int32)
    return state._replace(finite_steps=finite, skipped=skips, consecutive_skips=skips)


def _after_finite_steps(config, state, count):
    """Applies the rule to consecutive finite steps, all at once."""
    if not count:
        return state
    finite, growths = min(state["finite_steps"] + count, LIMIT), 0
    if config.mode == "dynamic":
        growths, finite = divmod(state["finite_steps"] + count, config.growth_interval)
    state = state | {"finite_steps": finite, "consecutive_skips": 0}
    if growths or (config.mode == "dynamic" and config.hysteresis_reset == "finite"):
        state["hysteresis_left"] = config.hysteresis
    highest = np.float32(config.max_scale)
    for _ in range(growths):
        if state["loss_scale"] == highest:
            break
        state["loss_scale"] = min(np.float32(state["loss_scale"] * np.float32(config.growth_factor)), highest)
    return state


def _run_by_run(state, finite, loss_finite):
    """Returns the states after each chunk, from the lengths of the runs of finite steps; skips as in the reference."""
    config = state.config
    now = {name: getattr(state, name).item() for name in reference.FIELDS}
    now["loss_scale"] = np.float32(now["loss_scale"])
    looks = []
    for flags, losses in zip(finite, loss_finite, strict=True):
        done = 0
        for skip in np.flatnonzero(~flags).tolist():
            now = _after_finite_steps(config, now, skip - done)
            now = reference.step(config, now, False, losses[skip])
            done = skip + 1
        now = _after_finite_steps(config, now, len(flags) - done)
        looks.append(now)
    return looks


def _step_by_step(state, finite, loss_finite):
    now = {name: getattr(state, name).item() for name in reference.FIELDS}
    now["loss_scale"] = np.float32(now["loss_scale"])
    looks = []
    for flags, losses in zip(finite.tolist(), loss_finite.tolist(), strict=True):
        for step in zip(flags, losses, strict=True):
            now = reference.step(state.config, now, *step)
        looks.append(now)
    return looks


def _assert_long_run(expected, scaler, overflows, bad_losses):
    finite, loss_finite = _flags(overflows, bad_losses)
    scaler = _near_the_limits(scaler)
    states, low, high = _scan(scaler, finite, loss_finite)
    looks = expected(scaler, finite, loss_finite)
    for name in reference.FIELDS:
        got = np.asarray(getattr(states, name))
        want = np.array([look[name] for look in looks], got.dtype)
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32), err_msg=name)
    assert states.skipped[-1] == LIMIT, "the run is so long that a counter reaches its limit"
    config = scaler.config
    if config.mode == "static":
        assert low == high == scaler.loss_scale
        assert states.finite_steps.max() < LIMIT, "every overflow resets the count of finite steps"
    else:
        assert np.float32(config.min_scale) <= low < high <= np.float32(config.max_scale)
        assert len(np.unique(states.loss_scale)) > 5, "the scale changes in the run"


@pytest.mark.parametrize(OF_A_RULE, some(RULES, default=["apex with odd factors"]))
def test_after_ten_million_updates_the_state_is_what_the_rule_says(scaler, overflows, bad_losses):
    _assert_long_run(_run_by_run, scaler, overflows, bad_losses)


@pytest.mark.slow
@pytest.mark.parametrize(OF_A_RULE, RULES.values(), ids=RULES)
def test_after_ten_million_updates_the_state_is_that_of_the_reference(scaler, overflows, bad_losses):
    _assert_long_run(_step_by_step, scaler, overflows, bad_losses)


EXTREMES = {"growth_factor": 2.0**126, "backoff_factor": 2.0**-126, "min_scale": 2.0**-126, "max_scale": 2.0**126}
EXTREME_RUNS = {
    "random steps": (jmpscale.dynamic(**EXTREMES, growth_interval=1), None),
    "only finite steps": (jmpscale.dynamic(**EXTREMES, growth_interval=1), True),
    "only overflows": (jmpscale.dynamic(**EXTREMES, hysteresis=LIMIT), False),
    "only finite steps, static": (jmpscale.static(2.0**-126), True),
    "slow growth": (jmpscale.dynamic(2.0**-126, **EXTREMES | {"growth_factor": 1 + 2.0**-23}, growth_interval=1), True),
    "slow backoff": (jmpscale.dynamic(2.0**126, **EXTREMES | {"backoff_factor": 1 - 2.0**-24}), False),
}


@pytest.mark.parametrize(("scaler", "always"), some(EXTREME_RUNS, default=["random steps"]))
def test_in_ten_million_updates_the_scale_stays_within_its_limits_and_no_counter_wraps(scaler, always):
    if always is None:
        finite, loss_finite = _flags(0.5, 0.1)
    else:
        finite, loss_finite = np.full((LOOKS, UPDATES // LOOKS), always), np.ones((LOOKS, UPDATES // LOOKS), bool)
    half_way = jnp.array(LIMIT - UPDATES // 2, jnp.int32)
    start = scaler._replace(finite_steps=half_way, skipped=half_way, consecutive_skips=half_way)
    states, low, high = _scan(start, finite, loss_finite)
    config = scaler.config
    lowest, highest = (np.float32(x) for x in (config.min_scale, config.max_scale))
    if config.mode == "static":
        lowest = highest = scaler.loss_scale
    assert lowest <= low <= high <= highest  # false of NaN
    skips = np.cumsum(~finite.reshape(-1), dtype=np.int64)[UPDATES // LOOKS - 1 :: UPDATES // LOOKS]
    np.testing.assert_array_equal(states.skipped, np.minimum(int(half_way) + skips, LIMIT))
    consecutive_skips, finite_steps = np.asarray(states.consecutive_skips), np.asarray(states.finite_steps)
    assert consecutive_skips.min() >= 0
    assert finite_steps.min() >= 0
    if always is False:
        np.testing.assert_array_equal(consecutive_skips, states.skipped)
        np.testing.assert_array_equal(states.hysteresis_left, np.maximum(config.hysteresis - skips, 0))
    elif config.mode == "static":
        steps = (1 + np.arange(LOOKS)) * (UPDATES // LOOKS)
        np.testing.assert_array_equal(finite_steps, np.minimum(int(half_way) + steps, LIMIT))


# --- training with faults, next to a float64 run that skips the same steps ---


def _examples(count=1_797):
    """Returns noisy pictures of ten shapes, with values from 0 to 1, and the number of each picture's shape."""
    random = np.random.default_rng(0)
    labels = random.integers(10, size=count)
    shapes = random.random((10, 64)) < 0.4
    inputs = np.clip(shapes[labels] + 0.6 * random.standard_normal((count, 64)), 0, 1)
    return inputs.astype(np.float32), labels.astype(np.int32)


INPUTS, LABELS = _examples()
RATE, MOMENTUM, DECAY, BATCH = 0.05, 0.9, 1e-3, 32
PATHS = ["['hidden']['b']", "['hidden']['w']", "['out']['b']", "['out']['w']"]
IN_THE_BATCH = len(PATHS)
LARGEST = 65504.0
FIRST_SCALE = 2.0**20


def _params():
    random = np.random.default_rng(0)
    sizes = {"hidden": (64, 32), "out": (32, 10)}
    return {
        name: {"w": random.standard_normal(size) / size[0] ** 0.5, "b": np.zeros(size[1])}
        for name, size in sizes.items()
    }


def _loss(params, inputs, labels):
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jnp.tanh(inputs.astype(jnp.float16) @ params["hidden"]["w"] + params["hidden"]["b"][None])
    logits = (hidden @ params["out"]["w"] + params["out"]["b"][None]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Without the option XLA may keep float32 between the operations, where the float16 overflow does not occur.
@functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
def _train(carry, rows, faults, values):
    def one(carry, step):
        params, velocity, scaler = carry
        rows, fault, value = step
        inputs = jnp.where(fault == IN_THE_BATCH, jnp.nan, jnp.asarray(INPUTS)[rows])

        loss, grads = jmpscale.value_and_grad(_loss)(scaler, params, inputs, jnp.asarray(LABELS)[rows])
        for i, path in enumerate(PATHS):
            grads = inject(grads, value, path=path, when=fault == i)
        finite = jmpscale.all_finite(grads)

        def descend(params, velocity):
            velocity = jax.tree.map(lambda v, g, p: MOMENTUM * v + g + DECAY * p, velocity, grads, params)
            return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity

        params, velocity = jmpscale.apply_if(finite, descend, params, velocity)
        after = jmpscale.update(scaler, finite, loss=loss)
        return (params, velocity, after), (finite, loss, after)

    return jax.lax.scan(one, carry, (rows, faults, values))


def _backward(params, inputs, labels):
    """Returns the gradients in float64, their largest magnitude, and a bound for all sums in the backward pass."""
    hidden = np.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["out"]["w"] + params["out"]["b"]
    exp = np.exp(logits - logits.max(1, keepdims=True))
    to_logits = (exp / exp.sum(1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    to_hidden = to_logits @ params["out"]["w"].T
    to_sums = to_hidden * (1 - hidden**2)
    grads = {
        "hidden": {"w": inputs.T @ to_sums, "b": to_sums.sum(0)},
        "out": {"w": hidden.T @ to_logits, "b": to_logits.sum(0)},
    }
    largest = max(np.abs(x).max() for x in (to_logits, to_hidden, *jax.tree.leaves(grads)))
    # Every input and every hidden value is at most 1. JAX computes g * (1 - h^2) as (g + g * h) * (1 - h).
    steep = 2 * (np.abs(to_logits) @ np.abs(params["out"]["w"].T))
    return grads, largest, max(np.abs(to_logits).sum(0).max(), steep.max(), steep.sum(0).max())


def _train_in_float64(finite, rows, looks):
    """Returns the parameters at each look, and for each step the largest gradient and the bound of the sums."""
    params = _params()
    velocity = jax.tree.map(np.zeros_like, params)
    seen, sizes = [], []
    for i, (apply, batch) in enumerate(zip(finite, rows, strict=True), 1):
        grads, *size = _backward(params, INPUTS[batch].astype(np.float64), LABELS[batch])
        sizes.append(size)
        if apply:
            velocity = jax.tree.map(lambda v, g, p: MOMENTUM * v + g + DECAY * p, velocity, grads, params)
            params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
        if i % (len(rows) // looks) == 0:
            seen.append(params)
    return seen, *np.array(sizes).T


def _norm(a, b):
    return np.sqrt(sum(((x - y) ** 2).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)))


@pytest.mark.parametrize("steps", [500, pytest.param(2_000, marks=FULL), pytest.param(20_000, marks=SLOW)])
def test_training_through_faults_is_the_float64_run_that_skips_the_same_steps(steps):
    looks = 10
    random = np.random.default_rng(1)
    rows = random.integers(len(INPUTS), size=(steps, BATCH))
    faults = np.where(random.random(steps) < 0.01, random.integers(IN_THE_BATCH + 1, size=steps), -1)
    values = random.choice([np.inf, -np.inf, np.nan], steps).astype(np.float32)

    scaler = jmpscale.dynamic(FIRST_SCALE, growth_interval=40)
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _params())
    carry, seen, history = (start, jax.tree.map(jnp.zeros_like, start), scaler), [], []
    for part in range(looks):
        here = slice(part * steps // looks, (part + 1) * steps // looks)
        carry, happened = _train(carry, rows[here], faults[here], values[here])
        seen.append(jax.tree.map(np.asarray, carry[0]))
        history.append(happened)
    finite, loss, states = jax.tree.map(lambda *x: np.concatenate(x), *history)

    # Every fault causes a skip for the right reason, and the scaler has followed its rule.
    assert not finite[faults >= 0].any()
    np.testing.assert_array_equal(np.isnan(loss), faults == IN_THE_BATCH)
    np.testing.assert_array_equal(states.last_skip[~finite], np.where(faults == IN_THE_BATCH, LOSS, GRADIENTS)[~finite])
    now = reference.start(scaler.config, FIRST_SCALE)
    for step, flags in enumerate(zip(finite, np.isfinite(loss), strict=True)):
        now = reference.step(scaler.config, now, *flags)
        assert all(getattr(states, name)[step] == now[name] for name in reference.FIELDS), step
    assert states.skipped[-1] == (~finite).sum()

    # All other skips are float16 overflows, and every float16 overflow is a skip; 2 % allows for rounding.
    expected, largest, bound = _train_in_float64(finite, rows, looks)
    used = np.concatenate([[FIRST_SCALE], states.loss_scale[:-1]])
    natural = ~finite & (faults < 0)
    assert natural.sum() > steps / 400, "float16 overflows occur in the run"
    assert ((used * bound)[natural] > 0.98 * LARGEST).all()
    assert ((used * largest)[finite] < 1.02 * LARGEST).all()

    # A float16 operation rounds to 2^-11. The difference of the runs stays within twenty times that, relative to the
    # distance from the initial parameters: roundings are independent of each other, and weight decay reduces them.
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours))
        assert _norm(ours, theirs) < 0.01 * _norm(theirs, _params())
    if steps < 10_000:  # The measure distinguishes one sequence of skips from another.
        shifted = _train_in_float64(np.roll(finite, 1), rows, looks)[0]
        assert _norm(seen[-1], shifted[-1]) > 0.01 * _norm(shifted[-1], _params())


# --- memory ---


def _resident():
    """Returns the bytes of memory that this process occupies, or 0 where that is unknown."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


WARM_UP = 60


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("steps", [pytest.param(500, marks=FULL), pytest.param(10_000, marks=SLOW)])
def test_memory_stays_flat(steps):
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(growth_interval=50))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _params())
    state = tx.init(params)
    own = jmpscale.dynamic(growth_interval=50)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, inputs, labels):
        loss, grads = jmpscale.value_and_grad(_loss)(state, params, inputs, labels)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss, jmpscale.grad_report(grads)

    def run(first, last, params, state, own):
        for i in range(first, last):
            inputs = INPUTS[i % 1_000 :][:BATCH] * np.float32(np.nan if i % 13 == 0 else 1)
            params, state, loss, report = step(params, state, inputs, LABELS[i % 1_000 :][:BATCH])
            # The calls that a program makes between its steps, and the functions outside jit.
            scaler = jmpscale.get_scaler(state)
            jmpscale.raise_if_stuck(scaler, max_consecutive_skips=5)
            seen = {name: float(value) for name, value in jmpscale.metrics(scaler).items()}
            assert seen
            assert np.isnan(loss) == (i % 13 == 0)
            report.describe()
            grads, finite = jmpscale.unscale_and_check(own, jmpscale.scale(own, {"loss": loss}))
            assert bool(finite) == bool(jmpscale.all_finite(grads)) == (i % 13 != 0)
            own = jmpscale.update(own, finite, loss=loss)
        return params, state, own

    def measure():
        gc.collect()
        arrays = jax.live_arrays()
        held = len(arrays), sum(x.nbytes for x in arrays), step._cache_size(), len(compilations.SEEN)
        del arrays
        return held, len(gc.get_objects()), tracemalloc.get_traced_memory()[0], _resident()

    tracemalloc.start()
    try:
        carry = run(0, WARM_UP, params, state, own)
        held, objects, traced, resident = measure()
        carry = run(WARM_UP, WARM_UP + steps, *carry)
        after = measure()
    finally:
        tracemalloc.stop()
    assert after[0] == held, "no new array, program or trace"
    assert held[3] > 0
    # One leaked object for each step would be 500 objects, or in the long form some hundred kilobytes.
    assert after[1] - objects < 100
    assert after[2] - traced < 2**16
    assert after[3] - resident < 2**24
    assert int(carry[2].skipped) == len(range(0, WARM_UP + steps, 13))
