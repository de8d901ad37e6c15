"""The page on skipped steps: the page's functions give the right answer for each injected fault."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

import hlo
import pages
from cases import some

PAGE = "skips"


@pytest.fixture(scope="module")
def replay():
    return pages.run(PAGE, "At the floor")["replay"]


def _model(power, backward):
    """A float16 model: activations are multiplied by `power`, cotangents in the backward pass by `backward`."""

    @jax.custom_vjp
    def amplify(x):
        return x

    amplify.defvjp(lambda x: (x, None), lambda _, g: (g * backward,))

    def loss_fn(params, batch):
        x = batch["x"].astype(jnp.float16) @ params["first"].astype(jnp.float16) * jnp.float16(power)
        x = amplify(jnp.maximum(x, 0)) @ params["second"].astype(jnp.float16)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss_fn


PARAMS = {"first": jnp.full((4, 3), 0.25), "second": jnp.full((3, 1), 0.5)}
BATCH = {"x": jnp.ones((2, 4)), "label": jnp.arange(2)}


@pytest.mark.parametrize(
    ("loss_fn", "change", "answer"),
    some(
        {
            "NaN in the data": (
                _model(1, 1),
                {"x": jnp.ones((2, 4)).at[1, 2].set(jnp.nan)},
                r"^the batch hold values .* the overflow most likely began in x",
            ),
            "forward overflow": (_model(60000, 1), {}, "^the loss is inf: no loss scale helps"),
            "backward overflow": (
                _model(1, jnp.float16(60000)),
                {},
                r"^the gradients are finite at a scale of 5\.96046e-08: allow it with min_scale",
            ),
            "scale too large": (
                _model(1, jnp.float16(100)),
                {},
                r"^the gradients are finite at a scale of 1: allow it with min_scale=1",
            ),
            "infinite derivative": (
                _model(1, jnp.float16(jnp.inf)),
                {},
                "^the backward pass is not finite at any scale: 1 of 2 leaves .* in first",
            ),
        },
        default=["NaN in the data", "backward overflow"],
    ),
)
def test_replay_distinguishes_the_faults(replay, loss_fn, change, answer):
    text = replay(loss_fn, PARAMS, BATCH | change)
    assert re.search(answer, text), text


def test_replay_finds_non_finite_parameters(replay):
    assert "the parameters hold values that are not finite" in replay(
        _model(1, 1), PARAMS | {"first": jnp.full((4, 3), jnp.inf)}, BATCH
    )


def test_the_min_scale_that_replay_names_trains():
    scaler = jmpscale.dynamic(1.0, min_scale=2.0**-24)
    step = jax.jit(jmpscale.value_and_grad(_model(1, jnp.float16(60000))))
    for _ in range(30):
        loss, grads = step(scaler, PARAMS, BATCH)
        finite = jmpscale.all_finite(grads)
        scaler = jmpscale.update(scaler, finite, loss=loss)
    assert finite
    assert 0 < int(scaler.skipped) < 24


def test_non_finite_losses_leave_the_scale_unchanged():
    settings = {"init_scale": 2.0**10, "growth_interval": 20}
    with_faults = without = jmpscale.dynamic(**settings)
    overflow = np.random.default_rng(0).random(1000) < 0.01
    for step in range(1000):
        finite = not overflow[step]
        if step % 50 == 25:
            with_faults = jmpscale.update(with_faults, False, loss=jnp.float32(jnp.nan))
        with_faults = jmpscale.update(with_faults, finite, loss=jnp.float32(1.0))
        without = jmpscale.update(without, finite, loss=jnp.float32(1.0))
        assert with_faults.loss_scale == without.loss_scale
    assert int(with_faults.skipped) == int(without.skipped) + 20
    assert int(without.skipped) > 0


def test_the_report_in_a_branch_is_computed_in_the_branch():
    page = pages.run(PAGE, "Which leaf")
    arguments = page["params"], page["x"]
    assert page["look"](jmpscale.dynamic(), *arguments).describe().startswith("1 of 2 leaves are not finite")
    assert page["look"](jmpscale.dynamic(2.0**32), *arguments).describe().startswith("2 of 2 leaves are mostly not")
    report = page["look"](jmpscale.dynamic(1.0), *arguments)
    assert not report.max_abs.any(), "the report is empty, because nothing overflowed"
    assert hlo.count(hlo.compiled(page["look"], jmpscale.dynamic(), *arguments), "conditional") == 1
