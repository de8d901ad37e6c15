"""metrics returns the state, raise_if_stuck names the cause of skips, and warn_after_skips reports from a program."""

import collections
import functools
import re
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
    "loss": (_stuck(last_skip_reason=2), "the loss that was passed was not finite.*diagnose names the line"),
    "limit": (
        _stuck(loss_scale=1.0, total_skips=3),
        "cannot back off any further.*by a different scaler.*inverted.*diagnose with such a.*decrease min_scale",
    ),
    "rounded-limit": (ROUNDED_LIMIT, r"the loss scale is 0\.3\. .*cannot back off any further"),
    "static": (
        STUCK._replace(config=jmpscale.static(8.0).config),
        "static and does not back off.*diagnose with the same batch prints the scales.*to loss_scaled",
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
    words = r"^steps are still skipped at the smallest allowed scale \(3 in total\); .* some batches .*a mask hides"
    with pytest.raises(FloatingPointError, match=words):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)


@pytest.mark.parametrize("scaler", [jmpscale.dynamic(8.0), jmpscale.static(8.0)], ids=["dynamic", "static"])
def test_raise_if_stuck_warns_of_a_scaler_that_no_step_changes(scaler):
    check = functools.partial(jmpscale.raise_if_stuck, max_consecutive_skips=2)
    changed = jax.jit(jmpscale.update)(scaler, True)
    for right in [jmpscale.disabled()] * 3 + [scaler, scaler, changed, scaler, changed, changed]:
        check(right)
    with pytest.warns(UserWarning, match="In three calls of raise_if_stuck.*return it from the training step"):
        check(changed)
    check(changed)


def test_raise_if_stuck_accepts_two_calls_in_each_skipped_step():
    check, scaler = functools.partial(jmpscale.raise_if_stuck, max_consecutive_skips=9), jmpscale.dynamic()
    for _ in range(4):
        scaler = jax.jit(jmpscale.update)(scaler, False)
        check(scaler)
        check(scaler)


def test_raise_if_stuck_warns_of_a_state_that_the_step_puts_back():
    """Flax's ImageNet example selects the old state after an overflow, which with the wrapper keeps the scale."""
    check = functools.partial(jmpscale.raise_if_stuck, max_consecutive_skips=2)
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(8.0, growth_interval=2))

    @functools.partial(jax.jit, static_argnames="puts_back")
    def step(opt_state, grads, puts_back):
        new = tx.update(grads, opt_state)[1]
        finite = jmpscale.all_finite(grads) | (not puts_back)
        return jax.tree.map(functools.partial(jnp.where, finite), new, opt_state)

    for puts_back in (False, True):
        opt_state = tx.init(1.0)
        for grads in (1.0, 1.0, jnp.inf, jnp.inf):  # the scale grows, and then overflows
            check(opt_state)
            opt_state = step(opt_state, grads, puts_back)
        if not puts_back:
            check(opt_state)
    with pytest.warns(UserWarning, match="In three calls of raise_if_stuck the scaler.*Do not put back the old state"):
        check(opt_state)
    runs = [step(step(tx.init(1.0), 1.0, False), 1.0, False) for _ in range(4)]
    for run in runs:  # equal, and all of them exist
        check(run)


@pytest.mark.parametrize("interval", [3, 5, 7, 10, 20, 50])
def test_raise_if_stuck_warns_of_a_scaler_that_each_epoch_creates(interval):
    check = functools.partial(jmpscale.raise_if_stuck, max_consecutive_skips=20)
    update = jax.jit(jmpscale.update)

    def train(epochs, skips, steps):
        scaler = None
        for i in range(epochs * steps):
            scaler = update(jmpscale.dynamic() if i % steps == 0 else scaler, i % steps >= skips)
            if (i + 1) % interval == 0:
                check(scaler)

    growing = jmpscale.dynamic(growth_interval=interval)
    for i in range(3 * interval):
        growing = update(growing, True)
        if (i + 1) % interval == 0:
            check(growing)  # the scale has just grown
    train(epochs=50, skips=3, steps=10)  # runs of their own, most of whose steps are applied
    with pytest.warns(UserWarning, match="or a new one although .*Create it once, not in each epoch") as caught:
        train(epochs=15, skips=6, steps=10)
    assert len(caught) == 1


def test_raise_if_stuck_warns_of_a_scale_that_grows_to_its_limit_without_a_skip():
    check = functools.partial(jmpscale.raise_if_stuck, max_consecutive_skips=2)
    scaler = jmpscale.dynamic(2.0**32, growth_interval=1)
    skipped = jmpscale.update(scaler, False)
    for right in (scaler, skipped, jmpscale.update(skipped, True), jmpscale.dynamic(2.0**31, growth_interval=1)):
        check(right)
    with pytest.warns(UserWarning, match="has grown to its limit.*the loss is not scaled"):
        check(jmpscale.update(jmpscale.dynamic(2.0**31, growth_interval=1), True))


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


def test_step_without_warn_after_skips_has_no_callback():
    text = jax.jit(lambda state, grad: PLAIN.update(grad, state)).lower(PLAIN.init(1.0), 1.0).as_text()
    assert "callback" not in text
    assert "callback" in jax.jit(_step).lower(TX.init(1.0), 1.0).as_text()
