"""The page on optax: each combination trains as without scaling, and a skip leaves unchanged what the page says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

import compilations
import pages

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

PAGE = "guides/optax"
FUNCTIONAL = "The functional API: value_and_grad and apply_if"
MULTI_STEPS, SETTINGS = "Gradient accumulation: MultiSteps", "A learning rate set by hand: inject_hyperparams"
AVERAGE, LINE_SEARCH = "Exponential moving average (EMA) of the parameters", "Line searches and L-BFGS"
BY_HAND = {"lookahead", "SAM with two gradients", FUNCTIONAL}
TITLES = list(pages.examples(PAGE))
IN_CI = {"reduce_on_plateau", "lookahead", "schedule_free", LINE_SEARCH, "SAM of optax"}  # the rarer ones
EVERY_EXAMPLE = pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.full] * (title in IN_CI)) for title in TITLES]
)


@functools.cache
def _namespace(title):
    return pages.run(PAGE, title)


@pytest.fixture
def example(title, monkeypatch):
    return _Example(title, monkeypatch)


class _Example:
    """One example of the page: its names, and its train step as a function of a training state and of rows."""

    def __init__(self, title, monkeypatch):
        self.names = _namespace(title)
        self.by_hand = title in BY_HAND
        self.fields = ["params", "opt_state"] + ["ema"] * ("ema" in self.names) + ["scaler"] * self.by_hand
        self._monkeypatch = monkeypatch

    def __getitem__(self, name):
        return self.names[name]

    @property
    def trained(self):
        """The training state at the end of the example."""
        return {name: self.names[name] for name in self.fields}

    @property
    def start(self):
        """The training state at the start of the example, but with a scale at which no step overflows."""
        params = jax.tree.map(jnp.zeros_like, self["params"])
        state = {"params": params, "opt_state": self["tx"].init(params), "ema": params, "scaler": jmpscale.dynamic()}
        state = {name: state[name] for name in self.fields}
        return self.with_scaler(state, self.scaler(state)._replace(loss_scale=jnp.float32(2.0**12)))

    def step(self, state, rows=slice(None)):
        before = [state[name] for name in self.fields]
        *after, loss = self["train_step"](*before, self["x"][rows], self["y"][rows])
        return dict(zip(self.fields, after, strict=True)), loss

    def scaler(self, state):
        return jmpscale.get_scaler(state)

    def with_scaler(self, state, scaler):
        return jmpscale.replace_scaler(state, scaler)

    def overflowing(self, state):
        """Sets a scale at which every float16 gradient overflows; the same settings, so nothing is recompiled."""
        return self.with_scaler(state, self.scaler(state)._replace(loss_scale=jnp.float32(2.0**100)))

    def without(self, state):
        """Returns a training state without its scaler."""
        rest = {name: part for name, part in state.items() if name not in ("opt_state", "scaler")}
        return rest | {"optimizer": state["opt_state"] if self.by_hand else state["opt_state"].inner_state}

    def unscaled_in_float32(self, steps):
        """Returns the training state after the same steps in float32, with the scaler disabled."""

        def loss_fn(params, x, y):
            return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)

        self._monkeypatch.setitem(self.names, "loss_fn", loss_fn)
        state = self.with_scaler(self.start, jmpscale.disabled())
        for _ in range(steps):
            state, _ = self.step(state)
        self._monkeypatch.undo()
        return self.without(state)


@EVERY_EXAMPLE
def test_it_trains(example):
    assert example["loss"] < 0.1 * jnp.mean(example["y"] ** 2), "the loss at the start, where all parameters are zero"
    assert example.scaler(example.trained).consecutive_skips == 0


@pytest.mark.full
@pytest.mark.parametrize("title", [title for title in TITLES if title != LINE_SEARCH])
def test_it_applies_the_steps_of_the_same_optimizer_in_float32_without_scaling(example):
    state = example.start
    for _ in range(4):
        state, _ = example.step(state)
    expected = example.unscaled_in_float32(4)
    got = example.without(state)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-3 * np.abs(y).max())


@EVERY_EXAMPLE
def test_a_skip_changes_only_the_scaler(example):
    before = example.overflowing(example.trained)
    after, _ = example.step(before)
    testing.assert_step_is_noop(example.without(before), example.without(after))
    scaler = example.scaler(after)
    assert (scaler.loss_scale, scaler.consecutive_skips) == (2.0**99, 1)
    assert scaler.last_skip == jmpscale.SkipReason.GRADIENTS
    moved, _ = example.step(example.trained)
    with pytest.raises(AssertionError, match="the step changed"):
        testing.assert_step_is_noop(example.without(before), example.without(moved))


@pytest.mark.full
@EVERY_EXAMPLE
def test_it_recovers_from_a_scale_that_is_far_too_large(example):
    state = example.start
    state = example.with_scaler(state, example.scaler(state)._replace(loss_scale=jnp.float32(2.0**32)))
    for _ in range(32):
        state, _ = example.step(state)
    assert 0 < example.scaler(state).skipped < 31
    assert example.scaler(state).consecutive_skips == 0


@pytest.mark.parametrize("title", ["Clipping"])
def test_max_norm_clips_gradients_in_true_units(example, platform):
    state, update = example.start, jax.jit(example["tx"].update)
    large = {"w": jnp.full((4, 1), 4.0), "b": jnp.array(6.0)}  # of norm 10
    _, opt_state = update(large, state["opt_state"], state["params"])
    np.testing.assert_allclose(optax.tree.norm(optax.tree.get(opt_state, "mu")), 0.1 * 0.2, rtol=1e-5)
    assert jmpscale.metrics(opt_state)["grad_norm"] == 10


def test_a_clip_before_with_loss_scaling_hides_an_overflow():
    params, grads = jnp.zeros(2), jnp.array([1.0, jnp.inf])
    for before in (True, False):
        wrapped = jmpscale.with_loss_scaling(optax.sgd(1.0) if before else optax.chain(optax.clip(1.0), optax.sgd(1.0)))
        tx = optax.chain(optax.clip(1.0), wrapped) if before else wrapped
        updates, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
        np.testing.assert_array_equal(updates, [-1.0, -1.0] if before else [0.0, 0.0])
        assert jmpscale.get_scaler(opt_state).skipped == (not before)


@pytest.mark.parametrize("title", ["Clipping"])
def test_max_norm_clips_as_optax_does_and_skips_where_optax_would_return_zeros(example):
    functional = _namespace(FUNCTIONAL)
    for name in ("w", "b"):
        np.testing.assert_allclose(example["params"][name], functional["params"][name], rtol=1e-2)

    large = jax.tree.map(lambda p: jnp.full_like(p, 1e20), example["params"])
    assert jmpscale.all_finite(large)
    state = example.start
    updates, opt_state = jax.jit(example["tx"].update)(large, state["opt_state"], state["params"])
    assert all((update == 0).all() for update in jax.tree.leaves(updates))
    assert jmpscale.get_scaler(opt_state).last_skip == 1
    clipped, _ = optax.clip_by_global_norm(0.2).update(large, optax.EmptyState())
    np.testing.assert_array_equal(clipped["w"], 0.0)


@pytest.mark.parametrize("title", ["A schedule"])
def test_the_schedule_counts_the_applied_steps(example):
    state, applied = example.start, 0
    for skip in (False, True, False, True, True, False):
        good = example.scaler(state)
        state, _ = example.step(example.overflowing(state) if skip else state)
        state = example.with_scaler(state, good) if skip else state
        applied += not skip
        counts = [count for _, count in optax.tree.get_all_with_path(state["opt_state"], "count")]
        assert counts
        assert all(count == applied for count in counts)


@pytest.mark.parametrize("title", [MULTI_STEPS])
def test_a_window_needs_one_more_micro_batch_for_each_that_was_dropped(example):
    def run(micro_batches):
        state, moved = example.start, []
        for quarter in micro_batches:
            before, good = state, example.scaler(state)
            state, _ = example.step(
                example.overflowing(state) if quarter is None else state,
                slice(8 * (quarter or 0), 8 * (quarter or 0) + 8),
            )
            state = example.with_scaler(state, good) if quarter is None else state
            moved.append(bool((state["params"]["w"] != before["params"]["w"]).any()))
        return state, moved

    whole, moved = run([0, 1, 2, 3])
    assert moved == [False, False, False, True]
    broken, moved = run([0, None, 1, 2, None, 3])
    assert moved == [False, False, False, False, False, True]
    testing.assert_step_is_noop(example.without(whole), example.without(broken))


@pytest.mark.parametrize("title", ["Different optimizers for different parameters"])
def test_an_overflow_in_one_part_skips_all_parts(example):
    state = example.start
    grads = testing.inject(jax.tree.map(jnp.ones_like, state["params"]), jnp.inf, path="['b']")
    updates, opt_state = jax.jit(example["tx"].update)(grads, state["opt_state"], state["params"])
    assert all((update == 0).all() for update in jax.tree.leaves(updates))
    testing.assert_step_is_noop(state["opt_state"].inner_state, opt_state.inner_state)


@pytest.mark.full
def test_an_overflow_in_a_frozen_part_skips_the_others_too():
    inner = optax.partition({"on": optax.sgd(1.0), "off": optax.set_to_zero()}, {"w": "on", "b": "off"})
    tx = jmpscale.with_loss_scaling(inner)
    params = {"w": jnp.ones(()), "b": jnp.ones(())}
    updates, _ = jax.jit(tx.update)({"w": jnp.ones(()), "b": jnp.array(jnp.inf)}, tx.init(params), params)
    assert updates["w"] == 0


@pytest.mark.parametrize("title", [SETTINGS])
def test_a_learning_rate_set_by_hand_survives_a_skip_and_takes_effect_then(example):
    def set_rate(state, rate):
        return state | {"opt_state": optax.tree.set(state["opt_state"], learning_rate=jnp.float32(rate))}

    assert optax.tree.get(example["opt_state"], "learning_rate") == jnp.float32(1e-3)
    compilations = example["train_step"]._cache_size()
    frozen = set_rate(example.start, 0.0)
    good = example.scaler(frozen)
    after, _ = example.step(example.overflowing(frozen))
    assert optax.tree.get(after["opt_state"], "learning_rate") == 0.0
    after, _ = example.step(example.with_scaler(after, good))
    testing.assert_step_is_noop(frozen["params"], after["params"])
    after, _ = example.step(set_rate(after, 0.1))
    assert (after["params"]["w"] != 0).all()
    assert example["train_step"]._cache_size() == compilations


@pytest.mark.full
@pytest.mark.parametrize("title", ["reduce_on_plateau"])
def test_the_plateau_never_sees_the_loss_of_a_skipped_step(example):
    state = example.start
    tx, params, opt_state = example["tx"], state["params"], state["opt_state"]
    update = jax.jit(tx.update)
    good, bad = jax.tree.map(jnp.ones_like, params), jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    for grads, loss in [
        (good, 4.0),
        (bad, -jnp.inf),
        (bad, jnp.nan),
        (good, 2.0),
        (good, 2.0),
        (bad, 0.0),
        (good, 4.0),
    ]:
        _, opt_state = update(grads, opt_state, params, value=jnp.float32(loss))
    assert optax.tree.get(opt_state, "best_value") == 3.0, "the mean over the four applied steps"
    _, opt_state = update(good, opt_state, params, value=jnp.float32(jnp.nan))
    assert jnp.isnan(optax.tree.get(opt_state, "avg_value")), "a non-finite loss alone causes no skip and is passed on"
    with pytest.raises(TypeError, match="value"):
        tx.update(good, opt_state, params)


@pytest.mark.full
@pytest.mark.parametrize("title", ["lookahead"])
def test_fast_and_slow_parameters_meet_after_every_fifth_applied_step(example):
    state, met = example.start, []
    for skip in [False, False, True, False, False, True, False, False]:
        before, good = state, example.scaler(state)
        state, _ = example.step(example.overflowing(state) if skip else state)
        state = example.with_scaler(state, good) if skip else state
        met.append(bool((state["params"].slow["w"] != before["params"].slow["w"]).any()))
    assert met == [False] * 6 + [True, False]


@pytest.mark.full
@pytest.mark.parametrize("title", ["schedule_free"])
def test_parameters_for_evaluation_differ_and_survive_a_skip(example):
    def evaluated(state):
        return optax.contrib.schedule_free_eval_params(state["opt_state"].inner_state, state["params"])

    assert (evaluated(example.trained)["w"] != example["params"]["w"]).any()
    testing.assert_step_is_noop(example["evaluated"], evaluated(example.trained))
    after, _ = example.step(example.overflowing(example.trained))
    testing.assert_step_is_noop(evaluated(example.trained), evaluated(after))


@pytest.mark.full
@pytest.mark.parametrize("title", ["SAM with two gradients"])
def test_the_second_loss_of_sam_would_keep_a_scale_that_is_too_large(example):
    """The loss uphill depends on the scale, so it must not be passed as `loss=`."""

    @jax.jit
    def scaler_after(scaler, params):
        value_and_grad = jmpscale.value_and_grad(example["loss_fn"])
        first, grads = value_and_grad(scaler, params, example["x"], example["y"])
        uphill = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(grads), params, grads)
        second, _ = value_and_grad(scaler, uphill, example["x"], example["y"])
        finite = jmpscale.all_finite(grads)
        return jmpscale.update(scaler, finite, loss=first), jmpscale.update(scaler, finite, loss=second)

    first, second = scaler_after(jmpscale.dynamic(2.0**32), example.start["params"])
    assert (first.loss_scale, first.last_skip) == (2.0**31, 1)
    assert (second.loss_scale, second.last_skip) == (2.0**32, 2)


@pytest.mark.full
@pytest.mark.parametrize("title", ["SAM with two gradients"])
def test_an_overflow_of_the_second_gradient_alone_skips_the_step(example):
    state = example.start

    @jax.jit
    @jax.vmap
    def finite(loss_scale):
        scaler = state["scaler"]._replace(loss_scale=loss_scale)
        value_and_grad = jmpscale.value_and_grad(example["loss_fn"])
        _, grads = value_and_grad(scaler, state["params"], example["x"], example["y"])
        uphill = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(grads), state["params"], grads)
        _, second = value_and_grad(scaler, uphill, example["x"], example["y"])
        return jmpscale.all_finite(grads), jmpscale.all_finite(second)

    scales = jnp.exp2(jnp.linspace(14, 20, 600))
    first, second = finite(scales)
    between = state["scaler"]._replace(loss_scale=scales[jnp.argmax(first & ~second)])
    assert (first & ~second).any(), "the gradient uphill is larger, so some scale is too large for it alone"
    after, _ = example.step(example.with_scaler(state, between))
    testing.assert_step_is_noop(example.without(state), example.without(after))
    assert after["scaler"].loss_scale == 0.5 * between.loss_scale


@pytest.mark.full
@pytest.mark.parametrize("title", ["SAM of optax"])
def test_a_skip_in_either_half_of_sam_repeats_that_half(example):
    def run(skips):
        state, halves = example.start, []
        for skip in skips:
            good = example.scaler(state)
            state, _ = example.step(example.overflowing(state) if skip else state)
            state = example.with_scaler(state, good) if skip else state
            halves.append(int(state["opt_state"].inner_state.steps_since_sync))
        return state, halves

    whole, halves = run([False] * 4)
    assert halves == [1, 0, 1, 0]
    broken, halves = run([True, False, True, False, False, True, True, False])
    assert halves == [0, 1, 1, 0, 1, 1, 1, 0]
    testing.assert_step_is_noop(example.without(whole), example.without(broken))


@pytest.mark.full
@pytest.mark.parametrize("title", ["SAM of optax"])
def test_sam_of_optax_does_not_accept_value_unless_it_is_a_plain_transformation(example):
    state = example.start
    bare = jmpscale.with_loss_scaling(example["sam"])
    with pytest.raises(TypeError, match="value"):
        bare.update(state["params"], bare.init(state["params"]), state["params"], value=jnp.float32(1))


@pytest.mark.full
@pytest.mark.parametrize("title", [AVERAGE])
def test_an_average_without_apply_if_advances_on_a_skip(example, monkeypatch):
    before = example.overflowing(example.trained)
    monkeypatch.setattr(jmpscale, "apply_if", lambda _, fn, ema: fn(ema))
    params, _, ema, _ = example["train_step"].__wrapped__(
        *(before[name] for name in example.fields), example["x"], example["y"]
    )
    testing.assert_step_is_noop(before["params"], params)
    assert (ema["w"] != before["ema"]["w"]).any()


@pytest.mark.full
def test_both_averages_are_the_same(monkeypatch):
    beside, functional = _namespace(AVERAGE), _namespace(FUNCTIONAL)
    monkeypatch.setitem(functional, "tx", optax.adam(5e-2))
    params = ema = jax.tree.map(jnp.zeros_like, beside["params"])
    opt_state, scaler = functional["tx"].init(params), jmpscale.dynamic()
    for _ in range(100):
        state = params, opt_state, ema, scaler
        params, opt_state, ema, scaler, _ = functional["train_step_with_average"](*state, beside["x"], beside["y"])
    np.testing.assert_allclose(ema["w"], beside["ema"]["w"], rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("title", [LINE_SEARCH])
def test_a_line_search_finds_the_same_steps_at_another_scale(example):
    """At another scale its steps are the same, because it receives the gradients in true units."""
    start = example.start
    other = example.with_scaler(start, example.scaler(start)._replace(loss_scale=jnp.float32(2.0**4)))
    for _ in range(2):
        (start, _), (other, _) = example.step(start), example.step(other)
    np.testing.assert_allclose(start["params"]["w"], other["params"]["w"], rtol=1e-2)
    assert example["loss"] < 1e-3


def test_vmap_compiles_once_under_jit_and_at_each_call_outside_it():
    """What the page says on compilation."""
    tx, params = jmpscale.with_loss_scaling(optax.sgd(1.0)), jnp.ones(3)
    opt_state = jax.vmap(tx.init)(params)
    for update, expected in ((jax.jit(jax.vmap(tx.update)), 0), (jax.vmap(tx.update), 1)):
        for _ in range(2):
            update(params, opt_state, params)
        with compilations.counted() as found:
            update(params, opt_state, params)
        assert len(found) == expected


def test_update_compiles_once_for_each_new_config():
    finite = jmpscale.all_finite(jnp.ones(2))
    for growth_interval in (987, 988):
        scaler = jmpscale.dynamic(growth_interval=growth_interval)
        for expected in (1, 0):
            with compilations.counted() as found:
                jmpscale.update(scaler, finite)
            assert len(found) == expected
