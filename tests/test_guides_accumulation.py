"""The page on accumulation: finite windows give the full batch's step, and an overflow does what the page says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

import pages

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

PAGE, MULTI_STEPS, SCAN = "guides/accumulation", "MultiSteps", "A scan over micro-batches"
BOTH_DROPS = pytest.mark.parametrize("drop", ["window", "micro-batch"])

# Integers so small that float16 holds every gradient exactly, while their sums need float32: only sums in float32 give
# the exact gradient. 12 micro-batches have 8 or 4 examples, and 4 consist of padding.
RNG = np.random.default_rng(0)
X = RNG.integers(0, 4, (16, 8, 3)).astype(np.float32)
WEIGHTS = np.array([4, 8, 4, 0, 8, 4, 4, 0, 0, 4, 8, 4, 4, 8, 0, 4])
MASK = (np.arange(8) < WEIGHTS[:, None]).astype(np.float32)[..., None]
W = np.array([[1.0], [-2.0], [3.0]], np.float32)
Y = (X @ W - RNG.integers(1, 20, (16, 8, 1))).astype(np.float32)
INTEGERS = X, Y, MASK


def _gradient(x, y, mask=None, w=W, activation=lambda z: z, slope=lambda z: 1.0):
    """Returns the full batch's gradient and loss, in float64."""
    x, y = (np.asarray(a, np.float64).reshape(-1, np.shape(a)[-1]) for a in (x, y))
    mask = np.ones_like(y) if mask is None else np.asarray(mask, np.float64).reshape(-1, 1)
    z = x @ np.asarray(w, np.float64)
    error = mask * (activation(z) - y)
    return 2 * x.T @ (error * slope(z)) / mask.sum(), (error**2).sum() / mask.sum()


@functools.cache
def _names(title):
    return pages.run(PAGE, title)


@functools.cache
def _linear_step(title):
    """The page's own step with a linear model and `sgd(1.0)`, whose update is the gradient itself."""
    names = pages.run(PAGE, title)

    def loss_fn(params, micro_batch):
        x, y, mask = micro_batch
        prediction = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
        weight = jnp.sum(mask)
        loss = jnp.sum(mask * (prediction - y) ** 2) / jnp.maximum(weight, 1)
        return loss if title == MULTI_STEPS else (loss, weight)

    names["loss_fn"], names["tx"] = loss_fn, optax.sgd(1.0)
    if title == MULTI_STEPS:
        window = optax.MultiSteps(names["tx"], 16)
        names["tx"] = jmpscale.with_loss_scaling(window, jmpscale.dynamic(16.0))
        return names["tx"], jax.jit(names["train_step"].__wrapped__)
    return jax.jit(names["train_step"].__wrapped__, static_argnames="drop")


def _scan_step(micro_batches, drop, scaler=None):
    params = {"w": jnp.asarray(W)}
    opt_state = optax.sgd(1.0).init(params)
    after, _, scaler, loss = _linear_step(SCAN)(
        params, opt_state, scaler or jmpscale.dynamic(16.0), jax.tree.map(jnp.asarray, micro_batches), drop
    )
    return np.asarray(params["w"] - after["w"]), scaler, float(loss)


def _with(bad, places):
    """Returns the micro-batches with one target of some of them replaced."""
    y = Y.copy()
    y[list(places), 0] = bad
    return X, y, MASK


OVERFLOW, FAILED_FORWARD_PASS = 1e6, np.nan


@pytest.mark.full
@pytest.mark.parametrize("title", [MULTI_STEPS, SCAN])
def test_it_trains(title):
    names = _names(title)
    x, y, mask = names["batch"] if title == SCAN else (names["x"], names["y"], None)
    _, loss = _gradient(x, y, mask, names["params"]["w"], np.tanh)
    _, at_first = _gradient(x, y, mask, 0 * names["params"]["w"], np.tanh)
    assert loss < 0.15 * at_first


@BOTH_DROPS
def test_without_an_overflow_the_scan_gives_the_full_batchs_gradient_bit_for_bit(drop):
    expected, expected_loss = _gradient(*INTEGERS)
    got, scaler, loss = _scan_step(INTEGERS, drop)
    assert np.abs(expected * 128).max() > 4096
    np.testing.assert_array_equal(got, expected)
    assert loss == expected_loss
    assert (scaler.loss_scale, scaler.finite_steps, scaler.skipped) == (16.0, 1, 0)


@pytest.mark.full
def test_the_plain_mean_of_the_micro_batches_would_be_another_gradient():
    means = [_gradient(*(a[i] for a in INTEGERS))[0] for i in np.flatnonzero(WEIGHTS)]
    expected, _ = _gradient(*INTEGERS)
    assert (np.abs(np.mean(means, 0) - expected) > 0.01 * np.abs(expected)).any()


@pytest.mark.full
@BOTH_DROPS
def test_the_pages_own_model_gives_the_full_batchs_gradient_to_float16s_precision(drop):
    names = _names(SCAN)
    params = {"w": jnp.array([[0.5], [-0.25], [0.125], [0.75]])}
    state = params, names["tx"].init(params), jmpscale.dynamic(2.0**10)
    _, opt_state, _, _ = names["train_step"](*state, names["batch"], drop)
    got = optax.tree.get(opt_state, "mu")["w"] / 0.1
    expected, _ = _gradient(*names["batch"], params["w"], np.tanh, lambda z: 1 - np.tanh(z) ** 2)
    np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max())


@BOTH_DROPS
@pytest.mark.parametrize("places", [[0], [15, 4], [0, 1, 2]])
def test_an_overflow_drops_the_micro_batch_or_the_window_and_the_scale_backs_off_once(drop, places):
    places = [i for i in places if WEIGHTS[i]] + [4]
    got, scaler, loss = _scan_step(_with(OVERFLOW, places), drop)
    kept = np.setdiff1d(np.arange(16), places)
    expected, expected_loss = _gradient(*(a[kept] for a in INTEGERS))
    if drop == "window":
        np.testing.assert_array_equal(got, 0)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert (scaler.loss_scale, scaler.finite_steps, scaler.skipped) == (8.0, 0, 1)
    assert scaler.last_skip == jmpscale.SkipReason.GRADIENTS
    assert scaler.consecutive_skips == 1, "raise_if_stuck counts the window, even if the step was applied"


@BOTH_DROPS
def test_a_failed_forward_pass_drops_the_same_and_leaves_the_scale_unchanged(drop):
    got, scaler, _ = _scan_step(_with(FAILED_FORWARD_PASS, [4]), drop)
    assert (got == 0).all() == (drop == "window")
    assert (scaler.loss_scale, scaler.skipped, scaler.last_skip) == (16.0, 1, jmpscale.SkipReason.LOSS)


@BOTH_DROPS
def test_a_failed_forward_pass_does_not_hide_an_overflow_in_another_micro_batch(drop):
    x, y, mask = _with(FAILED_FORWARD_PASS, [4])
    y[9, 0] = OVERFLOW
    _, scaler, _ = _scan_step((x, y, mask), drop)
    assert (scaler.loss_scale, scaler.last_skip) == (8.0, jmpscale.SkipReason.GRADIENTS)


@pytest.mark.full
@BOTH_DROPS
@pytest.mark.parametrize("bad", [OVERFLOW, 0.0], ids=["all overflow", "all are padding"])
def test_a_window_without_a_micro_batch_is_skipped(drop, bad):
    names = _names(SCAN)
    x, y, mask = names["batch"]
    batch = x, y + bad, mask * bool(bad)
    before = names["params"], names["opt_state"]
    params, opt_state, scaler, _ = names["train_step"](*before, jmpscale.dynamic(2.0**10), batch, drop)
    testing.assert_step_is_noop(before, (params, opt_state))
    assert (scaler.loss_scale, scaler.skipped) == ((2.0**9, 1) if bad else (2.0**10, 0))


@pytest.mark.full
def test_a_skipped_window_leaves_parameters_and_optimizer_state_unchanged():
    names = _names(SCAN)
    x, y, mask = names["batch"]
    batch = x, y.at[1, 0].set(OVERFLOW), mask
    before = names["params"], names["opt_state"]
    scaler = jmpscale.dynamic(2.0**10)
    window, micro = (names["train_step"](*before, scaler, batch, drop) for drop in ("window", "micro-batch"))
    testing.assert_step_is_noop(before, window[:2])
    assert (micro[0]["w"] != before[0]["w"]).all()
    assert optax.tree.get(micro[1], "count") == optax.tree.get(before[1], "count") + 1


@pytest.mark.full
@BOTH_DROPS
def test_a_scale_that_is_far_too_large_backs_off_once_for_each_window(drop):
    scaler = jmpscale.dynamic(2.0**30)
    for _ in range(30):
        got, scaler, _ = _scan_step(INTEGERS, drop, scaler)
        if not scaler.consecutive_skips:
            break
    assert scaler.skipped > 16
    assert scaler.loss_scale == 2.0 ** (30 - int(scaler.skipped))
    np.testing.assert_array_equal(got, _gradient(*INTEGERS)[0])


@pytest.mark.full
@BOTH_DROPS
def test_growth_counts_windows(drop):
    scaler = jmpscale.dynamic(16.0, growth_interval=2)
    scales = []
    for _ in range(4):
        _, scaler, _ = _scan_step(INTEGERS, drop, scaler)
        scales.append(float(scaler.loss_scale))
    assert scales == [16.0, 32.0, 32.0, 64.0]


def _multi_steps(micro_batches):
    """Runs `MultiSteps` over windows of 16 micro-batches; yields the parameters and the scaler after each."""
    tx, step = _linear_step(MULTI_STEPS)
    params = {"w": jnp.asarray(W)}
    opt_state = tx.init(params)
    for x, y in micro_batches:
        params, opt_state, _ = step(params, opt_state, (jnp.asarray(x), jnp.asarray(y), jnp.ones((8, 1))))
        yield np.asarray(params["w"]), jmpscale.get_scaler(opt_state)


@pytest.mark.full
def test_without_an_overflow_multi_steps_gives_the_full_batchs_gradient():
    *waiting, (after, scaler) = _multi_steps(zip(X, Y, strict=True))
    assert all((w == W).all() for w, _ in waiting)
    np.testing.assert_allclose(W - after, _gradient(X, Y)[0], rtol=1e-6)
    assert scaler.finite_steps == 16


@pytest.mark.full
def test_multi_steps_replaces_a_dropped_micro_batch_by_the_next_one():
    bad = Y[0] + OVERFLOW
    windows = [*zip(X[:3], Y[:3], strict=True), (X[0], bad), *zip(X[3:], Y[3:], strict=True)]
    seen = list(_multi_steps(windows))
    assert [float(s.loss_scale) for _, s in seen] == [16.0] * 3 + [8.0] * 14, "it backs off at once"
    assert [(w != W).any() for w, _ in seen] == [False] * 16 + [True]
    np.testing.assert_allclose(W - seen[-1][0], _gradient(X, Y)[0], rtol=1e-6)


@pytest.mark.full
def test_micro_batches_sharded_over_devices_give_the_same_step():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    for bad, drop in (([], "window"), ([4], "micro-batch")):
        batch = _with(OVERFLOW, bad)
        alone, scaler, _ = _scan_step(batch, drop)
        sharded, sharded_scaler, _ = _scan_step(tuple(jax.device_put(a, sharding) for a in batch), drop)
        np.testing.assert_array_equal(sharded, alone)
        assert sharded_scaler.loss_scale == scaler.loss_scale
