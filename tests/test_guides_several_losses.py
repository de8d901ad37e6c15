"""The page on several losses and optimizers, and apex's own cases: which optimizer skips, which scale backs off."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale import testing

import pages

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

PAGE = "guides/several_losses"
GAN, PER_LOSS, TOGETHER = "Two optimizers, one scaler", "One scaler for each loss", "All or nothing"
NORMED_GAN = "A GAN with batch normalisation: what each flag gates"
BOTH_FLAGS = list(itertools.product([True, False], repeat=2))


@functools.cache
def _names(title):
    return pages.run(PAGE, title)


@functools.cache
def _untrained(title):
    """Returns the names that a page's program has before it trains."""
    names = {"__name__": title}
    exec(pages.examples(PAGE)[title].split("\nfor ")[0], names)
    return names


# Two optimizers, one scaler


def _batch(key=0):
    real, noise = jax.random.normal(jax.random.key(key), (2, 64, 2))
    return {"real": real + jnp.array([[2.0, -2.0]]), "noise": noise}


@functools.cache
def _gan_step():
    """Returns the page's own step, with each loss multiplied by a factor; 2^40 overflows in float16."""
    names = _untrained.__wrapped__(GAN)  # not the cached one, because its losses are replaced
    losses = {name: names[name] for name in ("d_loss_fn", "g_loss_fn")}

    @jax.jit
    def step(d, g, scaler, real, noise, factors):
        for name, factor in zip(losses, factors, strict=True):
            names[name] = lambda *args, name=name, factor=factor: factor * losses[name](*args)
        return names["train_step"].__wrapped__(d, g, scaler, real, noise)

    return step


@pytest.mark.full
def test_the_generator_moves_to_the_data():
    names = _names(GAN)
    noise, key = jax.random.normal(jax.random.key(99), (1000, 2)), jax.random.key(2)
    at_first = {"in": jax.random.normal(key, (2, 16)), "out": 0.2 * jax.random.normal(key, (16, 2))}

    def distance(params):
        return np.linalg.norm(names["network"](params, noise).mean(0) - np.array([2.0, -2.0]))

    assert distance(names["g"][0]) < 0.5 * distance(at_first)
    assert names["scaler"].consecutive_skips == 0


@pytest.mark.parametrize(("d_finite", "g_finite"), BOTH_FLAGS)
def test_each_network_skips_alone_and_the_scale_backs_off_once_if_either_overflowed(d_finite, g_finite):
    names = _untrained(GAN) | _batch()
    before = names["d"], names["g"]
    factors = jnp.where(jnp.array([d_finite, g_finite]), 1.0, 2.0**40)
    d, g, scaler, losses = _gan_step()(*before, jmpscale.dynamic(1024.0), names["real"], names["noise"], factors)
    assert jnp.isfinite(jnp.array(losses)).all()
    for (params, opt_state), after, finite in zip(before, (d, g), (d_finite, g_finite), strict=True):
        if finite:
            assert (after[0]["out"] != params["out"]).any()
            assert after[1][0].count == opt_state[0].count + 1
        else:
            testing.assert_step_is_noop((params, opt_state), after)
    expected = (1024.0, 1, 0) if d_finite and g_finite else (512.0, 0, 1)
    assert (scaler.loss_scale, scaler.finite_steps, scaler.skipped) == expected


@pytest.mark.full
def test_a_loss_that_is_not_finite_in_one_network_keeps_the_scale():
    names = _untrained(GAN) | _batch()
    d, g, scaler, losses = _gan_step()(
        names["d"], names["g"], jmpscale.dynamic(1024.0), names["real"] * jnp.nan, names["noise"], jnp.ones(2)
    )
    assert [bool(jnp.isfinite(loss)) for loss in losses] == [False, True]
    testing.assert_step_is_noop(names["d"], d)
    assert (g[0]["out"] != names["g"][0]["out"]).any()
    assert (scaler.loss_scale, scaler.last_skip) == (1024.0, 2)


# A GAN with batch normalisation


@functools.cache
def _normed_gan():
    """Returns the page's own step, with each loss multiplied by a factor; 2^40 overflows in float16."""
    names = _names(NORMED_GAN)
    losses = {name: names[name] for name in ("d_loss_fn", "g_loss_fn")}

    def scaled(name, factor):
        def loss_fn(*args):
            loss, new_stats = losses[name](*args)
            return factor * loss, new_stats

        return loss_fn

    @jax.jit
    def step(d, g, stats, scaler, real, noise, factors):
        for name, factor in zip(losses, factors, strict=True):
            names[name] = scaled(name, factor)
        return names["train_step"].__wrapped__(d, g, stats, scaler, real, noise)

    def new_stats(name, *args):
        return jax.jit(losses[name])(*args)[1]

    return names, step, new_stats


@pytest.mark.full
@pytest.mark.parametrize(("d_finite", "g_finite"), BOTH_FLAGS)
def test_a_flag_gates_the_statistics_of_both_networks_that_its_pass_would_change(d_finite, g_finite):
    names, step, stats_after = _normed_gan()
    d, g, stats, real, noise = (names[name] for name in ("d", "g", "stats", "real", "noise"))
    factors = jnp.where(jnp.array([d_finite, g_finite]), 1.0, 2.0**40)
    new_d, new_g, new_stats, scaler, losses = step(d, g, stats, jmpscale.dynamic(1024.0), real, noise, factors)
    assert jnp.isfinite(jnp.array(losses)).all()
    for before, after, finite in ((d, new_d, d_finite), (g, new_g, g_finite)):
        if finite:
            assert after[1][0].count == before[1][0].count + 1
        else:
            testing.assert_step_is_noop(before, after)
    expected = stats_after("d_loss_fn", d[0], g[0], stats, real, noise) if d_finite else stats
    expected = stats_after("g_loss_fn", g[0], new_d[0], expected, real, noise) if g_finite else expected
    if d_finite or g_finite:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), new_stats, expected)
        with pytest.raises(AssertionError, match="the step changed"):
            testing.assert_step_is_noop(stats, new_stats)
    else:
        testing.assert_step_is_noop(stats, new_stats)
    assert scaler.loss_scale == (1024.0 if d_finite and g_finite else 512.0)


@pytest.mark.full
def test_a_forward_pass_that_fails_spoils_no_statistics():
    names, step, _ = _normed_gan()
    d, g, stats, real, noise = (names[name] for name in ("d", "g", "stats", "real", "noise"))
    *after, scaler, losses = step(d, g, stats, jmpscale.dynamic(1024.0), real * jnp.nan, noise, jnp.ones(2))
    assert not any(bool(jnp.isfinite(loss)) for loss in losses), "both passes see the bad batch"
    testing.assert_step_is_noop((d, g, stats), tuple(after))
    assert (scaler.loss_scale, scaler.last_skip) == (1024.0, 2)


@pytest.mark.full
def test_the_generator_with_batch_normalisation_moves_to_the_data():
    names = _names(NORMED_GAN)
    fake, _ = names["run"](names["g_net"], names["g"][0], names["stats"]["g"], names["noise"])
    assert np.linalg.norm(fake.mean(0) - np.array([2.0, -2.0])) < 0.5 * np.linalg.norm([2.0, -2.0])


# One scaler for each loss


def _gradients(params, x, targets):
    """Returns the gradient of the sum of both losses, in float64."""
    params, x, targets = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x, targets))
    hidden = np.tanh(x @ params["trunk"])
    grads = {"trunk": 0.0}
    for head, weight in (("large", 1e3), ("small", 1e-9)):
        error = 2 * weight / len(x) * (hidden @ params[head] - targets[head])
        grads[head] = hidden.T @ error
        grads["trunk"] = grads["trunk"] + x.T @ (error @ params[head].T * (1 - hidden**2))
    return grads


def _scalers(large, small):
    return {"large": jmpscale.dynamic(large), "small": jmpscale.dynamic(small)}


def _step_of_both_losses(scalers):
    """Returns the parameters and the optimizer state before and after a step, and the scalers after it."""
    names = _untrained(PER_LOSS)
    head = jnp.linspace(-0.2, 0.2, 16)[:, None]
    params = names["params"] | {"large": head, "small": -head}
    before = params, names["tx"].init(params)
    *after, scalers, _ = names["train_step"](*before, scalers, names["x"], names["targets"])
    return before, tuple(after), scalers


@pytest.mark.full
def test_both_heads_train():
    names = _names(PER_LOSS)
    at_first = jax.tree.map(lambda target: jnp.mean(target**2), names["targets"])
    assert names["values"]["large"] < 0.1 * 1e3 * at_first["large"]
    assert names["values"]["small"] < 0.1 * 1e-9 * at_first["small"]


@pytest.mark.full
def test_the_gradients_are_those_of_the_sum_of_the_losses():
    (params, _), (_, opt_state), _ = _step_of_both_losses(_scalers(64.0, 2.0**32))
    expected = _gradients(params, _untrained(PER_LOSS)["x"], _untrained(PER_LOSS)["targets"])
    for name, grad in optax.tree.get(opt_state, "mu").items():
        np.testing.assert_allclose(grad / 0.1, expected[name], atol=5e-3 * np.abs(expected[name]).max(), err_msg=name)


@pytest.mark.full
def test_with_one_scale_for_both_the_small_loss_would_underflow():
    _, (_, opt_state), scalers = _step_of_both_losses(_scalers(64.0, 64.0))
    assert scalers["large"].skipped == 0
    assert (optax.tree.get(opt_state, "mu")["small"] == 0).all()
    _, _, scalers = _step_of_both_losses(_scalers(2.0**32, 2.0**32))
    assert [scaler.skipped.item() for scaler in scalers.values()] == [1, 0], "and the large one overflows"


@pytest.mark.parametrize("bad", [["large"], ["small"], ["large", "small"]])
def test_an_overflow_of_either_loss_skips_the_step_and_only_its_own_scale_backs_off(bad):
    good = {"large": 64.0, "small": 2.0**32}
    scalers = {name: jmpscale.dynamic(scale) for name, scale in good.items()}
    for name in bad:
        scalers[name] = scalers[name]._replace(loss_scale=jnp.float32(2.0**80))
    before, after, scalers = _step_of_both_losses(scalers)
    testing.assert_step_is_noop(before, after)
    for name, scaler in scalers.items():
        expected = (2.0**79, 0, 1) if name in bad else (good[name], 1, 0)
        assert (scaler.loss_scale, scaler.finite_steps, scaler.skipped) == expected


# All or nothing


@pytest.mark.full
def test_encoder_and_decoder_train():
    names = _names(TOGETHER)
    assert names["loss"] < 0.05 * jnp.mean(names["x"] ** 2)


@pytest.mark.full
def test_an_overflow_in_the_decoder_alone_skips_the_encoder_too():
    names = _names(TOGETHER)
    params = names["params"] | {"decoder": 1e-3 * names["params"]["decoder"]}

    @jax.jit
    @jax.vmap
    def finite(loss_scale):
        scaler = jmpscale.dynamic()._replace(loss_scale=loss_scale)
        _, grads = jmpscale.value_and_grad(names["loss_fn"])(scaler, params, names["x"])
        return {part: jmpscale.all_finite(grad) for part, grad in grads.items()}

    scales = jnp.exp2(jnp.arange(10.0, 30.0))
    only_decoder = finite(scales)["encoder"] & ~finite(scales)["decoder"]
    assert only_decoder.any()
    scaler = jmpscale.dynamic()._replace(loss_scale=scales[jnp.argmax(only_decoder)])
    *after, new, _ = names["train_step"](params, names["opt_state"], scaler, names["x"])
    testing.assert_step_is_noop((params, names["opt_state"]), tuple(after))
    assert new.loss_scale == 0.5 * scaler.loss_scale


# apex: two and three models, two losses, one and two optimizers, one scaler or one for each loss. The models, the
# settings, the scales of 4 and 16 and the places of the inf are taken from `test_multiple_models_optimizers_losses.py`
# in NVIDIA/apex, the last version with amp (2025). Every value is a dyadic fraction of a few bits, so the results are
# compared with a float64 run bit for bit. apex backs a shared scale off in the middle of a step, jmpscale at its end.


class _Apex(NamedTuple):
    """One of apex's arrangements.

    Attributes:
      losses: for each loss, the models whose outputs it adds.
      optimizers: for each optimizer, its models, their learning rates, and its momentum.
      gates: for each optimizer, the losses whose overflow makes it skip.
    """

    losses: tuple
    optimizers: tuple
    gates: tuple

    @property
    def models(self):
        return sorted({model for loss in self.losses for model in loss})


APEX = {
    "2 models, 1 optimizer": _Apex(((0,), (1,)), (((0, 1), (0.25, 0.5), 0.125),), ((0, 1),)),
    "3 models, 1 optimizer": _Apex(((0, 2), (1, 2)), (((0, 1, 2), (0.25, 0.5, 0.125), 0.125),), ((0, 1),)),
    "2 models, 2 optimizers": _Apex(((0,), (1,)), (((0,), (0.25,), 0.125), ((1,), (0.5,), 0.25)), ((0,), (1,))),
    "3 models, 2 optimizers": _Apex(
        ((0, 1), (2, 1)), (((0, 1), (0.25, 1.0), 0.5), ((2,), (0.5,), 0.25)), ((0, 1), (1,))
    ),
}
NO_FAULT = (-1, -1, -1, "w0")


def _faults(case):
    """Yields the iteration, the loss, the model and the weight in whose gradient the inf is injected."""
    yield NO_FAULT
    for iteration, loss, weight in itertools.product((0, 1), (0, 1), ("w0", "w1")):
        for model in case.losses[loss]:
            yield iteration, loss, model, weight


def _apex_models(case):
    """Returns models of two weights each, in float32 and in float16."""
    return [
        {
            "w0": jnp.float32(1 + m) + jnp.arange(2, dtype=jnp.float32),
            "w1": jnp.float16(2 + m) + jnp.arange(2, dtype=jnp.float16),
        }
        for m in case.models
    ]


def _apex_loss(models, loss):
    x = jnp.ones(2)
    return sum(jnp.sum(x * models[m]["w0"] * models[m]["w1"].astype(jnp.float32)) for m in loss)


def _apex_optimizer(models, rates, momentum):
    groups = {str(m): optax.sgd(rate, momentum) for m, rate in zip(models, rates, strict=True)}
    return optax.partition(groups, {str(m): str(m) for m in models})


@functools.cache
def _apex_step(name, shared):
    case = APEX[name]
    optimizers = [_apex_optimizer(*optimizer) for optimizer in case.optimizers]
    paths = [(m, w) for m in case.models for w in ("w0", "w1")]

    def apply_optimizer(j, total, finite, models, opt_state):
        mine = case.optimizers[j][0]
        step = jmpscale.optax_step(optimizers[j], {str(m): total[m] for m in mine})
        return jmpscale.apply_if(finite, step, {str(m): models[m] for m in mine}, opt_state)

    @jax.jit
    def step(models, opt_states, scalers, bad_loss, bad_place):
        total, flags = None, []
        for i, loss in enumerate(case.losses):
            scaler = scalers[0 if shared else i]
            grads = jax.grad(lambda models, loss=loss, scaler=scaler: jmpscale.scale(scaler, _apex_loss(models, loss)))(
                models
            )
            for n, (m, w) in enumerate(paths):
                grads = testing.inject(grads, jnp.inf, path=f"[{m}]['{w}']", when=(bad_loss == i) & (bad_place == n))
            grads, finite = jmpscale.unscale_and_check(scaler, grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            flags.append(finite)
        models, opt_states = list(models), list(opt_states)
        for j, gates in enumerate(case.gates):
            finite = jnp.array([flags[i] for i in gates]).all()
            mine, opt_states[j] = apply_optimizer(j, total, finite, models, opt_states[j])
            models = [mine.get(str(m), model) for m, model in zip(case.models, models, strict=True)]
        if shared:
            scalers = [jmpscale.update(scalers[0], flags[0] & flags[1])]
        else:
            scalers = [jmpscale.update(scaler, finite) for scaler, finite in zip(scalers, flags, strict=True)]
        return models, opt_states, scalers, total

    def start():
        models = _apex_models(case)
        wide = [{str(m): jax.tree.map(jnp.float32, models[m]) for m in ms} for ms, _, _ in case.optimizers]
        return models, [tx.init(w) for tx, w in zip(optimizers, wide, strict=True)]

    return start, step


def _apex_reference(case, fault):
    """Yields the sum of the gradients and the models of each iteration, in float64, without scaling."""
    bad_iteration, bad_loss, _, _ = fault
    models = [jax.tree.map(lambda w: np.asarray(w, np.float64), model) for model in _apex_models(case)]
    traces = [{"w0": 0.0, "w1": 0.0} for _ in models]
    for iteration in itertools.count():
        uses = [sum(m in loss for loss in case.losses) for m in case.models]
        grads = [{"w0": n * model["w1"], "w1": n * model["w0"]} for n, model in zip(uses, models, strict=True)]
        for (mine, rates, momentum), gates in zip(case.optimizers, case.gates, strict=True):
            if iteration == bad_iteration and bad_loss in gates:
                continue
            for m, rate in zip(mine, rates, strict=True):
                traces[m] = {w: momentum * traces[m][w] + grads[m][w] for w in grads[m]}
                models[m] = {w: models[m][w] - rate * traces[m][w] for w in grads[m]}
        yield grads, models


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True], ids=["a scaler for each loss", "one scaler"])
@pytest.mark.parametrize("name", APEX)
def test_two_losses_in_the_arrangements_of_apex(name, shared):
    case = APEX[name]
    start, step = _apex_step(name, shared)
    for fault in _faults(case):
        bad_iteration, bad_loss, bad_model, bad_weight = fault
        models, opt_states = start()
        scalers = [jmpscale.dynamic(4.0)] if shared else [jmpscale.dynamic(4.0), jmpscale.dynamic(16.0)]
        reference = _apex_reference(case, fault)
        for iteration in range(3 if bad_iteration >= 0 else 2):
            bad = bad_loss if iteration == bad_iteration else -1
            place = 2 * bad_model + (bad_weight == "w1")
            models, opt_states, scalers, grads = step(models, opt_states, scalers, jnp.int32(bad), jnp.int32(place))
            expected_grads, expected = next(reference)
            if iteration != bad_iteration:
                jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)
            jax.tree.map(np.testing.assert_array_equal, models, expected)
        scales = [4.0] if shared else [4.0, 16.0]
        if bad_iteration >= 0:
            scales[0 if shared else bad_loss] /= 2
        assert [scaler.loss_scale.item() for scaler in scalers] == scales
        assert [model["w1"].dtype for model in models] == [jnp.float16] * len(models)
