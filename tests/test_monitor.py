"""metrics returns the state; raise_if_stuck names the cause of skips in one state, RunMonitor in the states of a run.

warn_after_skips reports skips from inside a program.
"""

import collections
import functools
import os
import pathlib
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
import reference
from tables import rows

INF, NAN = np.inf, np.nan

# --- metrics are the arrays of the state ---


def test_metrics_are_the_arrays_of_the_state(variant):
    state = jmpscale.update(jmpscale.dynamic(1024.0), False)
    logged = variant(jmpscale.metrics)(state)
    expected = reference.step(state.config, reference.INITIAL | {"loss_scale": 1024.0}, finite=False)
    assert {name: value.item() for name, value in logged.items()} == expected
    assert all(isinstance(value, jax.Array) for value in logged.values())


def test_metrics_of_an_optimizer_state_contain_the_norm():
    opt_state = jmpscale.WithLossScalingState(jmpscale.dynamic(), (), jnp.float32(5.0))
    for state in ([opt_state], jax.tree.map(nnx.Variable, opt_state)):
        logged = jmpscale.metrics(state)
        assert (logged["grad_norm"], logged["loss_scale"]) == (5.0, 2.0**16)
    assert "grad_norm" not in jmpscale.metrics(opt_state._replace(grad_norm=None))


# --- raise_if_stuck names the cause ---

DYNAMIC = jmpscale.dynamic(8.0)


def _is_scaler(x):
    return isinstance(x, jmpscale.ScalerState)


def _stuck(**fields):
    fields = {"finite_steps": 0, "total_skips": 5, "consecutive_skips": 3, "last_skip_reason": 1} | fields
    return DYNAMIC._replace(**{name: np.asarray(x, getattr(DYNAMIC, name).dtype) for name, x in fields.items()})


STUCK = _stuck()
ROUNDED_LIMIT = _stuck(loss_scale=0.3)._replace(config=jmpscale.ScalerConfig(min_scale=0.3))
DIAGNOSES = {  # the tree, and the words of the diagnosis; if several apply, the first is given
    "scale-nan": (_stuck(loss_scale=NAN, last_skip_reason=2), "the loss scale is nan.*The loss scale is invalid"),
    "scale-zero": (_stuck(loss_scale=0.0), "the loss scale is 0.*The loss scale is invalid"),
    "scale-large": (_stuck(loss_scale=2.0**126 * 1.5), "The loss scale is invalid"),
    "scale-largest": (_stuck(loss_scale=2.0**126), "The scale is still backing off"),
    "loss": (_stuck(last_skip_reason=2), "the loss that was passed was not finite.*diagnose with the same batch names"),
    "limit": (
        _stuck(loss_scale=1.0, total_skips=3),
        "cannot back off any further.*by a different scaler.*inverted.*diagnose with such a.*decrease min_scale",
    ),
    "rounded-limit": (ROUNDED_LIMIT, r"the loss scale is 0\.3\. .*cannot back off any further"),
    "static": (
        STUCK._replace(config=jmpscale.static(8.0).config),
        "static and does not back off.*diagnose with the same batch prints the scales.*to scaled_backward",
    ),
    "start": (_stuck(total_skips=3), r"\(3 in total\).*the first skips of this run.*scales that fit, for init_scale"),
    "backing-off": (STUCK, r"\(5 in total\); the loss scale is 8\. .*is still backing off\. Allow.*diagnose names"),
}


# Skips at the lower limit, none of them consecutive: the fields, and whether a limit of 2 skips is exceeded.
AT_LIMIT = {"loss_scale": 1.0, "total_skips": 3, "consecutive_skips": 0, "last_skip_reason": 3}
ISOLATED_SKIPS = {
    "at the limit": (AT_LIMIT, True),
    "at the limit, one of them consecutive": (AT_LIMIT | {"consecutive_skips": 1}, True),
    "above the limit after growth": (AT_LIMIT | {"loss_scale": 2.0}, False),
    "reached the limit": (AT_LIMIT | {"last_skip_reason": 1}, False),
    "at the limit because of the loss": (AT_LIMIT | {"last_skip_reason": 2}, False),
    "few in total": (AT_LIMIT | {"total_skips": 2}, False),
}


@pytest.mark.parametrize("leaf", [jnp.asarray, np.asarray, np.ndarray.item], ids=["jax", "numpy", "python"])
@pytest.mark.parametrize("name", DIAGNOSES)
def test_raise_if_stuck_names_the_cause(name, leaf):
    tree, words = DIAGNOSES[name]
    tree = jax.tree.map(lambda x: jax.tree.map(leaf, x) if _is_scaler(x) else x, tree, is_leaf=_is_scaler)
    with pytest.raises(FloatingPointError, match=f"^3 consecutive steps were skipped .*{words}"):
        jmpscale.raise_if_stuck(tree, max_consecutive_skips=2)
    jmpscale.raise_if_stuck(tree, max_consecutive_skips=3)


@pytest.mark.parametrize("name", ISOLATED_SKIPS)
def test_raise_if_stuck_finds_isolated_skips_at_the_lowest_scale(name):
    fields, stuck = ISOLATED_SKIPS[name]
    state = _stuck(**fields)
    if not stuck:
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)
        return
    words = r"^steps are still skipped at the smallest .* \(3 in total\); .* some batches .*a mask hides.*step_applied"
    with pytest.raises(FloatingPointError, match=words):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)


# --- RunMonitor compares the states of a run ---


def _update(scaler, outcome):
    """Returns the scaler after an applied step ("."), or after a skip because of the gradients or of the loss."""
    return jmpscale.update(scaler, outcome == ".", loss=np.float32(NAN if outcome == "L" else 1.0))


def _watch(scaler, outcomes, every=10, limit=10, update=_update):
    """Calls a monitor in a training loop, and returns its error, if there is one, and its warnings."""
    monitor = jmpscale.RunMonitor(max_consecutive_skips=limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step, outcome in enumerate(outcomes):
                scaler = update(scaler, outcome)
                if step % every == 0:
                    monitor.raise_if_stuck(scaler, step=step)
        except FloatingPointError as error:
            return str(error), [str(warning.message) for warning in caught]
    return None, [str(warning.message) for warning in caught]


RESET_BY_EACH_STEP = jmpscale.dynamic(hysteresis=4, hysteresis_reset="finite")
LOSS, NO_BACKOFF = "the loss that was passed was not finite", "The scale is static and does not back off"
MOSTLY_SKIPPED = {  # the scaler, the outcomes of the steps, the start of the message, and the cause
    "losses": (
        jmpscale.dynamic(),
        ".LLLL" * 8,
        "16 of the 20 steps since step 0 were skipped (16 in total); the",
        LOSS,
    ),
    "losses, late": (
        jmpscale.dynamic(growth_interval=200),
        "." * 1000 + ".LL" * 20,
        "14 of the 20 steps since step 1000 were skipped (14 in total)",
        LOSS,
    ),
    "some overflows": (jmpscale.dynamic(), ".LLLG" * 8, "16 of the 20 steps since step 0 were skipped (16 in", LOSS),
    "static": (jmpscale.static(8.0), ".GG" * 8, "14 of the 20 steps since step 0 were skipped (14 in", NO_BACKOFF),
    "hysteresis": (RESET_BY_EACH_STEP, ".GGG" * 8, "15 of the 20 steps since step 0 were skipped (15 in", "The scale"),
}
MOSTLY_APPLIED = {
    "backoff": (jmpscale.dynamic(2.0**32), "GG." * 16 + "." * 50),
    "backoff with hysteresis": (jmpscale.dynamic(hysteresis=2), "GGGG." * 3 + "." * 50),
    "one loss in two": (jmpscale.dynamic(), ".L" * 50),
    "few losses": (jmpscale.dynamic(), "." + "L" * 10 + "." * 50),
    "growth in each step": (jmpscale.dynamic(growth_interval=1), "..G" + ".G" * 50),
    "growth by 16": (jmpscale.dynamic(growth_interval=2, growth_factor=16.0), "..GGGG" * 20),
    "static": (jmpscale.static(8.0), "...G" * 30),
    "disabled": (jmpscale.disabled(), "LG" * 50),
}


@pytest.mark.parametrize("name", MOSTLY_SKIPPED)
def test_run_monitor_raises_if_most_steps_were_skipped(name):
    scaler, outcomes, start, words = MOSTLY_SKIPPED[name]
    error, messages = _watch(scaler, outcomes)
    assert error.startswith(start)
    assert "read step_applied of the scaler after each step" in error
    assert words in error
    assert messages == []


@pytest.mark.parametrize("name", MOSTLY_APPLIED)
def test_run_monitor_accepts_a_run_that_applies_most_steps(name):
    assert _watch(*MOSTLY_APPLIED[name]) == (None, [])


def test_run_monitor_accepts_an_empty_batch():
    batch = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), jmpscale.dynamic())
    assert _watch(batch, [1.0] * 50, update=lambda batch, _: batch) == (None, [])


def test_run_monitor_raises_the_errors_of_raise_if_stuck():
    monitor = jmpscale.RunMonitor(max_consecutive_skips=2)
    with pytest.raises(FloatingPointError, match=r"^3 consecutive steps were skipped"):
        monitor.raise_if_stuck(STUCK, step=0)


def test_run_monitor_judges_each_member_of_a_batch():
    batch = jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic())
    update = jax.jit(jax.vmap(functools.partial(jmpscale.update)))

    def step(batch, loss_of_last):
        losses = jnp.array([1.0, 1.0, loss_of_last])
        return update(batch, jnp.isfinite(losses), loss=losses)

    assert _watch(batch, [1.0] * 50, update=step) == (None, [])
    error, _ = _watch(batch, ([1.0] + [NAN] * 3) * 10, update=step)
    assert error.startswith("15 of the 20 steps since step 0 were skipped")


# --- RunMonitor accepts any count of steps that increases ---


def _calls(outcomes, count, scaler=None, every=10):
    """Yields the count and the scaler of each call in a run without mistakes."""
    scaler = jmpscale.dynamic(growth_interval=100) if scaler is None else scaler
    for step, outcome in enumerate(outcomes):
        scaler = _update(scaler, outcome)
        if step % every == 0:
            yield count(step), scaler


RARE_LOSSES = ("." * 40 + "L") * 15
SATURATED = jmpscale.static(8.0)._replace(total_skips=np.int32(2**31 - 1), finite_steps=np.int32(2**31 - 1))
RESTORED = jmpscale.dynamic()._replace(total_skips=np.int32(500), last_skip_reason=np.int32(2))
COUNTS = {
    "from zero": lambda: _calls(RARE_LOSSES, lambda step: step),
    "of the whole run": lambda: _calls(RARE_LOSSES, lambda step: step + 10_000),
    "NumPy": lambda: _calls(RARE_LOSSES, np.int64),
    "JAX": lambda: _calls(RARE_LOSSES[:100], jnp.int32),
    "of micro-batches": lambda: _calls(RARE_LOSSES, lambda step: 8 * step),
    "of iterations with 16 updates": lambda: _calls(RARE_LOSSES, lambda step: step // 16, every=16),
    "of iterations with 16 updates, and an overflow": lambda: _calls(
        (".........L" * 63 + "........LG" + ".........L" * 40), lambda step: step // 16, jmpscale.dynamic(), every=16
    ),
    "three hooks in each step": lambda: [call for call in _calls(RARE_LOSSES, lambda step: step) for _ in range(3)],
    "at the end, repeatedly": lambda: [list(_calls(RARE_LOSSES, lambda step: step))[-1]] * 5,
    "a new run": lambda: [*_calls("." * 91, int), *_calls("....L" * 22 + "G" + "." * 50, int)],
    "invalid scales": lambda: [(0, _stuck(loss_scale=8.0)), (50, _stuck(loss_scale=0.0)), (99, _stuck(loss_scale=NAN))],
    "a new scaler": lambda: [*_calls("." * 101, int), *_calls("." * 101, lambda step: step + 101)],
    "a new scaler at max_scale": lambda: [
        *_calls("." * 31, int, jmpscale.dynamic()),
        *_calls("." * 60, lambda step: step + 31, jmpscale.dynamic(2.0**32)),
    ],
    "a restored scaler": lambda: _calls("." * 101, int, RESTORED),
    "counters at their limit": lambda: _calls("." * 101, int, SATURATED),
    "at max_scale": lambda: _calls("." * 200, int, jmpscale.dynamic(2.0**32, growth_interval=10)),
    "other settings": lambda: [
        *_calls("." * 101, int),
        *_calls("." * 101, lambda step: step + 101, jmpscale.static(8.0)),
        *_calls("." * 101, lambda step: step + 202),
    ],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "count",
    rows(COUNTS, {"from zero", "of the whole run", "NumPy", "of micro-batches", "of iterations with 16 updates"}),
)
def test_run_monitor_accepts_each_count_of_steps(count):
    monitor = jmpscale.RunMonitor(max_consecutive_skips=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, scaler in count():
            monitor.raise_if_stuck(scaler, step=step)
    assert caught == []


def test_run_monitor_finds_losses_in_iterations_of_several_updates():
    monitor = jmpscale.RunMonitor(max_consecutive_skips=10)
    calls = list(_calls(".LLL" * 90, lambda step: step // 16, every=16))
    for step, scaler in calls[:20]:
        monitor.raise_if_stuck(scaler, step=step)
    with pytest.raises(FloatingPointError, match=r"^240 of the 320 steps since step 0 were skipped"):
        monitor.raise_if_stuck(calls[20][1], step=20)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wraps_multi_steps", [True, False])
def test_run_monitor_accepts_gradient_accumulation(wraps_multi_steps):
    """The wrapper updates its scaler with each micro-batch; a loop that sums gradients itself does so after four."""
    inner = optax.MultiSteps(optax.sgd(0.1), 4) if wraps_multi_steps else optax.sgd(0.1)
    tx = jmpscale.with_loss_scaling(inner)
    update = jax.jit(lambda grads, opt_state: tx.update(grads, opt_state, 1.0, value=grads)[1])
    opt_state, monitor = tx.init(1.0), jmpscale.RunMonitor(max_consecutive_skips=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for micro_batch in range(60):
            if wraps_multi_steps or micro_batch % 4 == 3:
                opt_state = update(jnp.float32(1.0), opt_state)
            monitor.raise_if_stuck(opt_state, step=micro_batch)
    assert caught == []
    assert opt_state.scaler.finite_steps == (60 if wraps_multi_steps else 15)


# --- RunMonitor warns of a scaler that counts no step ---


def _put_back_by_step(tx):
    """Flax's ImageNet example selects the old state after an overflow, which with the wrapper keeps the scale."""

    def step(opt_state, grads):
        new, finite = tx.update(grads, opt_state)[1], jmpscale.all_finite(grads)
        return jax.tree.map(functools.partial(jnp.where, finite), new, opt_state)

    return step


def _skipped_by_loop(tx):
    """coix skips non-finite steps itself, and does not call the optimizer."""

    def step(opt_state, grads):
        return jax.lax.cond(jnp.isfinite(grads), lambda: tx.update(grads, opt_state)[1], lambda: opt_state)

    return step


def _lost_by_step(tx):
    return lambda opt_state, grads: (tx.update(grads, opt_state), opt_state)[1]


GROWS = jmpscale.dynamic(8.0, growth_interval=20)
UNCHANGED = {  # the step, the scaler, the number of finite steps at first, and the steps in the message
    "lost": (_lost_by_step, jmpscale.dynamic(), 0, (0, 40)),
    "lost, static": (_lost_by_step, jmpscale.static(8.0), 100, (0, 40)),
    "lost, from max_scale": (_lost_by_step, jmpscale.dynamic(2.0**32), 0, (0, 40)),
    "put back": (_put_back_by_step, GROWS, 20, (20, 60)),
    "put back, later": (_put_back_by_step, GROWS, 75, (80, 120)),
    "skipped by the loop": (_skipped_by_loop, GROWS, 90, (100, 140)),
    "skipped by the loop, static": (_skipped_by_loop, jmpscale.static(8.0), 30, (40, 80)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_run_monitor_warns_of_a_scaler_that_counts_no_step(name):
    create, scaler, finite_steps, steps = UNCHANGED[name]
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), scaler)
    step, outcomes = jax.jit(create(tx)), np.where(np.arange(200) < finite_steps, np.float32(1.0), np.float32(INF))
    error, messages = _watch(tx.init(1.0), outcomes, update=step)
    assert error is None
    [message] = messages
    assert message.startswith("From step {} to step {} the scaler has counted no step".format(*steps))
    assert "Do not put back the old state" in message
    assert "warn_if_not_finite=True" in message


def test_run_monitor_warns_of_a_batch_of_scalers_that_counts_no_step():
    batch = jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic())
    assert len(_watch(batch, [1.0] * 50, update=lambda batch, _: batch)[1]) == 1
    trained = np.array([1, 1, 0], np.int32)  # the third member of a population is not trained

    def train(batch, _):
        return batch._replace(finite_steps=batch.finite_steps + trained)

    assert _watch(batch, [1.0] * 50, update=train) == (None, [])


@pytest.mark.parametrize("interval", [7, 10, *(pytest.param(n, marks=pytest.mark.full) for n in (5, 20, 50))])
def test_run_monitor_warns_of_a_scaler_that_each_epoch_creates(interval):
    def watch(steps, skips, epochs):
        outcomes = [(i % steps, "." if i % steps >= skips else "G") for i in range(epochs * steps)]

        def update(scaler, step_and_outcome):
            step, outcome = step_and_outcome
            return _update(jmpscale.dynamic() if step == 0 else scaler, outcome)

        return _watch(jmpscale.dynamic(), outcomes, every=interval, limit=6, update=update)

    assert watch(steps=10, skips=3, epochs=1) == (None, [])
    assert watch(steps=100, skips=6, epochs=3) == (None, [])
    _, messages = watch(steps=10, skips=6, epochs=30)
    assert "Create it once, not in each epoch" in messages[0]


def test_run_monitor_warns_of_a_scale_that_grows_to_its_limit_without_a_skip():
    def watch(init_scale, outcomes, **settings):
        return _watch(jmpscale.dynamic(init_scale, **settings), outcomes, every=2, limit=2)

    for right in (watch(2.0**32, "." * 99, growth_interval=9), watch(2.0**30, "G" + "." * 99, growth_interval=9)):
        assert right == (None, [])
    assert watch(4.0, "." * 99, growth_interval=9, max_scale=8.0) == (None, [])
    for interval in (1, 9):
        error, [message] = watch(2.0**28, "." * 99, growth_interval=interval)
        assert error is None
        assert re.match(r"The loss scale has grown to its limit, 2\^32, without.*the loss is not scaled", message)
        assert "jmpscale.scaled_backward(loss_fn, 2.0**60)" in message


# --- warn_after_skips reports from the program, once per streak ---

# Three skips, a finite step, four skips, and two finite steps.
FINITE = [False] * 3 + [True] + [False] * 4 + [True] * 2
GRADS = np.where(FINITE, np.float32(1.0), np.float32(np.inf))
TX = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20), warn_after_skips=3)


def _step(opt_state, grad):
    return TX.update(grad, opt_state)[1]


def _loop(step, opt_state, grads):
    for grad in grads:
        opt_state = step(opt_state, grad)
    return opt_state


def _scan(opt_state, grads):
    return jax.lax.scan(lambda state, grad: (_step(state, grad), None), opt_state, grads)[0]


def _replicated(opt_state, grads):
    return jax.device_put((opt_state, grads), jax.NamedSharding(meshes.make_mesh(d=8), P()))


def _scan_on_each_device(*args):
    return jax.jit(jax.shard_map(_scan, mesh=meshes.make_mesh(d=8), in_specs=P(), out_specs=P()))(*args)


PROGRAMS = {  # a training loop, and the number of times that it reports each of the two streaks
    "outside jit": (functools.partial(_loop, _step), 1),
    "jit": (functools.partial(_loop, jax.jit(_step)), 1),
    "donated": (functools.partial(_loop, jax.jit(_step, donate_argnums=0)), 1),
    "scan": (jax.jit(_scan), 1),
    "replicated": (lambda *args: jax.jit(_scan)(*_replicated(*args)), 1),
    "shard_map": (_scan_on_each_device, 8),
}


def _warnings_of(run, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = jax.block_until_ready(run(*args))
    return state, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("program", rows(PROGRAMS, {"outside jit", "donated", "replicated"}))
def test_wrapper_warns_once_per_streak(program):
    run, reports = program
    state, messages = _warnings_of(run, TX.init(1.0), GRADS)
    first = "3 consecutive steps were skipped (3 in total); the loss scale is 2^17. In the most recent skip"
    second = "3 consecutive steps were skipped (6 in total); the loss scale is 2^14. In the most recent skip"
    starts = [message[: len(first)] for message in sorted(messages)]  # devices report in any order
    assert starts == [first] * reports + [second] * reports
    assert sum("the first skips of this run" in message for message in messages) == reports
    expected, _ = _warnings_of(_loop, lambda state, grad: PLAIN.update(grad, state)[1], TX.init(1.0), GRADS)
    assert jax.tree.map(float, state) == jax.tree.map(float, expected)


PLAIN = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20))


@pytest.mark.full
def test_wrapper_warns_of_each_member_of_an_ensemble():
    grads = np.stack([GRADS, np.ones_like(GRADS)], axis=1)
    run = jax.jit(lambda grads: _loop(jax.vmap(_step), jax.vmap(TX.init)(jnp.ones(2)), grads))
    state, messages = _warnings_of(run, grads)
    assert [message[:32] for message in messages] == ["3 consecutive steps were skipped"] * 2
    assert state.scaler.total_skips.tolist() == [7, 0]


# --- warn_after_skips notices skips that are not consecutive, and a scale that only grows ---

STATIC = jmpscale.static(8.0)
GROWING = jmpscale.dynamic(2.0**31, growth_interval=4)
MANY = "3 of the last 15 steps were skipped"
SERIES = {  # the scaler, whether each step is finite, and how the warnings start, which count 3 skips
    "one in five": (STATIC, ([True] * 4 + [False]) * 5, [rf"{MANY} \(3 in total\); the loss scale is 8\. "]),
    "two in five": (STATIC, [True, False, True, True, False] * 4, [rf"{MANY} \(3 in total\)"]),
    "a pause of 15 steps": (
        STATIC,
        ([True, False] * 4 + [True] * 15) * 2,
        [rf"{MANY} \({n} in total\)" for n in (3, 7)],
    ),
    "after consecutive ones": (STATIC, [False] * 3 + [True, False] * 3, [r"3 consecutive steps were skipped \(3 in"]),
    "one in eight": (STATIC, ([True] * 7 + [False]) * 6, []),
    "backing off": (jmpscale.dynamic(2.0**20), [False, True] * 3, [rf"{MANY} \(3 in total\); the loss scale is 2\^17"]),
    "after each growth": (jmpscale.dynamic(2.0**20, growth_interval=4), ([True] * 4 + [False]) * 5, []),
    "limit": (GROWING, [True] * 12, [r"The loss scale has grown to its limit, 2\^32, without a skip\. "]),
    "limit after a skip": (GROWING, [False] + [True] * 16, []),
    "limit of the user": (jmpscale.dynamic(2.0, growth_interval=1, max_scale=4.0), [True] * 3, []),
    "limit from the start": (jmpscale.dynamic(2.0**32, growth_interval=1), [True] * 3, []),
    "static": (STATIC, FINITE, ["3 consecutive .*The scale is static and does not back off"] * 2),
    "at min_scale": (jmpscale.dynamic(2.0), FINITE, ["3 consecutive .*The scale cannot back off any further"] * 2),
    "disabled": (jmpscale.disabled(), FINITE, []),
}


def _loop_on_devices(step, opt_state, grads):
    """Three devices take the same steps, each a random number of steps ahead of the others."""
    states, remaining = [opt_state] * 3, [iter(grads) for _ in range(3)]
    for device in np.random.default_rng(0).permutation([0, 1, 2] * len(grads)):
        states[device] = step(states[device], next(remaining[device]))


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("devices", [3, pytest.param("jit", marks=pytest.mark.full)])
def test_wrapper_warns_of_many_skips_and_of_none(name, devices):
    scaler, finite, expected = SERIES[name]
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), scaler, warn_after_skips=3)
    grads = np.where(finite, np.float32(1.0), np.float32(np.inf))

    def step(state, grad):
        return tx.update(grad, state)[1]

    step = jax.jit(step) if devices == "jit" else step
    _, messages = _warnings_of(_loop_on_devices if devices == 3 else _loop, step, tx.init(1.0), grads)
    reports = collections.Counter(messages)
    assert set(reports.values()) <= {3 if devices == 3 else 1}
    assert all(re.match(words, message) for words, message in zip(expected, reports, strict=True)), messages


def test_wrapper_counts_the_skips_of_each_run():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), STATIC, warn_after_skips=3)
    for _ in range(3):
        _, messages = _warnings_of(_loop, lambda state, grad: tx.update(grad, state)[1], tx.init(1.0), GRADS[3:6])
        assert messages == []


def test_wrapper_counts_skips_because_of_the_loss():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(growth_interval=100), warn_after_skips=3)
    losses = np.where(([True] * 7 + [False]) * 3, np.float32(1.0), np.float32(np.nan))
    sparse, dense = losses, np.append([1.0] * 20, losses[6:8].tolist() * 4)

    def step(state, loss):
        return tx.update(loss, state, value=loss)[1]

    assert _warnings_of(_loop, step, tx.init(1.0), sparse)[1] == []
    [message] = _warnings_of(_loop, step, tx.init(1.0), dense)[1]
    assert message.startswith(MANY)
    assert "the loss that was passed was not finite" in message


# --- reports from a program never raise ---


def test_wrapper_with_warn_after_skips_is_pickled_by_value():
    """Programs that run functions in other processes, such as Ray and joblib, use cloudpickle."""
    cloudpickle = pytest.importorskip("cloudpickle")
    tx = cloudpickle.loads(cloudpickle.dumps(TX))
    _, messages = _warnings_of(_loop, lambda state, grad: tx.update(grad, state)[1], tx.init(1.0), GRADS)
    assert len(messages) == 2


# All devices need the loss of the others, so a device that raised would leave them waiting for ever.
WARNINGS_AS_ERRORS = """
import warnings

import jax
import jax.numpy as jnp
import jmpscale
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20), warn_after_skips=3)
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
loss_fn = jmpscale.scaled_backward(lambda w, x: jnp.mean(w * x), 2.0**8, warn_if_not_finite=WATCH)


@jax.jit
def step(w, opt_state, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    updates, opt_state = tx.update(grad, opt_state, w, value=loss)
    return w + updates, opt_state


warnings.simplefilter("error", UserWarning)
w, x = put(jnp.float32(1.0), P()), put(jnp.ones(64).at[3].set(jnp.inf), P("d"))
opt_state = put(tx.init(w), P())
for _ in range(6):
    w, opt_state = step(w, opt_state, x)
print(int(opt_state.scaler.total_skips))
"""


@pytest.mark.parametrize("watch", [False, pytest.param(True, marks=pytest.mark.full)])
def test_warnings_from_a_program_do_not_raise_on_one_of_its_devices(watch):
    command = [sys.executable, "-c", WARNINGS_AS_ERRORS.replace("WATCH", str(watch))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = pathlib.Path(jmpscale.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100, cwd=root)
    assert done.stdout == "6\n", done.stderr
    assert "3 consecutive steps were skipped (3 in total)" in done.stderr
    assert ("are not finite. If the training loop" in done.stderr) == watch


@pytest.mark.parametrize("compile", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_wrapper_logs_a_warning_that_a_filter_makes_an_error(compile, caplog):
    step = compile(_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if compile is jax.jit:
            jax.block_until_ready(_loop(step, TX.init(1.0), GRADS))
        else:  # no other device waits
            with pytest.raises(UserWarning, match=r"^3 consecutive steps"):
                _loop(step, TX.init(1.0), GRADS)
    assert [record.name for record in caplog.records] == ["jmpscale"] * 2 * (compile is jax.jit)
    assert all(record.message.startswith("3 consecutive steps") for record in caplog.records)


def test_step_without_warn_after_skips_has_no_callback():
    text = jax.jit(lambda state, grad: PLAIN.update(grad, state)).lower(PLAIN.init(1.0), 1.0).as_text()
    assert "callback" not in text
    assert "callback" in jax.jit(_step).lower(TX.init(1.0), 1.0).as_text()
