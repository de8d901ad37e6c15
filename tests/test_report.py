"""metrics and raise_if_stuck."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jmpscale


def _after(word, state, loss=None):
    for finite in word:
        state = jmpscale.update(state, finite == "G", loss=loss)
    return state


def test_metrics_have_stable_names_and_stay_on_the_device(variant):
    state = _after("GGB", jmpscale.dynamic(1024.0))
    logged = variant(jmpscale.metrics)(state)
    assert {name: np.asarray(value).item() for name, value in logged.items()} == {
        "loss_scale": 512.0,
        "good_steps": 0,
        "hysteresis_left": 0,
        "skipped": 1,
        "skipped_in_a_row": 1,
        "last_skip": 1,
    }
    assert all(isinstance(value, jax.Array) for value in logged.values())
    with pytest.raises(TypeError, match="state must be a ScalerState, got dict"):
        jmpscale.metrics(logged)


def test_nothing_is_raised_up_to_the_limit():
    state = _after("BBB", jmpscale.dynamic())
    jmpscale.raise_if_stuck(state, max_skips_in_a_row=3)
    with pytest.raises(FloatingPointError, match=r"^3 steps in a row were skipped"):
        jmpscale.raise_if_stuck(state, max_skips_in_a_row=np.int64(2))
    jmpscale.raise_if_stuck(_after("G", state), max_skips_in_a_row=1)


STUCK = pytest.mark.parametrize(
    ("state", "word", "loss", "message"),
    [
        (
            jmpscale.dynamic,
            "BBB",
            None,
            r"\(3 in all\); the loss scale is 8192\. .*not finite while.*still being sought",
        ),
        (jmpscale.dynamic, "BGBBB", None, r"\(4 in all\); the loss scale is 4096\. .*still falling"),
        (
            lambda: jmpscale.dynamic(2.0),
            "GBBB",
            None,
            r"the loss scale is 1\. .*cannot fall any further.*allow a smaller scale",
        ),
        (
            lambda: jmpscale.dynamic(0.5, min_scale=0.3),
            "GBBB",
            None,
            r"the loss scale is 0\.3\. .*cannot fall any further",
        ),
        (lambda: jmpscale.static(8.0), "BBB", None, "the loss scale is 8.*cannot fall any further"),
        (jmpscale.dynamic, "BBB", np.nan, r"65536\. .*loss itself was not finite.*No loss scale cures that"),
    ],
)


@STUCK
@pytest.mark.parametrize("leaf", [jnp.asarray, np.asarray, lambda x: x.item()], ids=["jax", "numpy", "Python"])
def test_the_message_names_scale_run_cause_and_action(state, word, loss, message, leaf):
    stuck = jax.tree.map(leaf, _after(word, state(), None if loss is None else jnp.float32(loss)))
    with pytest.raises(FloatingPointError, match=message):
        jmpscale.raise_if_stuck(stuck, max_skips_in_a_row=2)
    jmpscale.raise_if_stuck(stuck, max_skips_in_a_row=3)


@pytest.mark.parametrize("scale", [np.nan, 0.0, -1.0, np.inf])
@pytest.mark.parametrize("leaf", [jnp.float32, float])
def test_what_is_no_scale_is_told_from_an_overflow(scale, leaf):
    state = _after("BBB", jmpscale.dynamic())._replace(loss_scale=leaf(scale))
    with pytest.raises(FloatingPointError, match="That is no loss scale: the state was damaged"):
        jmpscale.raise_if_stuck(state, max_skips_in_a_row=2)


@STUCK
def test_a_compiled_program_says_the_same_under_checkify(state, word, loss, message):
    def step(state, finite):
        state = jmpscale.update(state, finite, loss=None if loss is None else jnp.float32(loss))
        jmpscale.raise_if_stuck(state, max_skips_in_a_row=2)
        return state

    def run(state, word):
        return jax.lax.scan(lambda s, finite: (step(s, finite), None), state, word)[0]

    checked = jax.jit(checkify.checkify(run))
    error, _ = checked(state(), jnp.array([finite == "G" for finite in word]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"^3 steps in a row were skipped .*" + message):
        error.throw()
    error, _ = checked(state(), jnp.array([finite == "G" for finite in word[:-1] + "G"]))
    error.throw()


def test_raise_if_stuck_refuses_wrong_use():
    state = jmpscale.dynamic()
    with pytest.raises(TypeError, match=r"max_skips_in_a_row must be an integer, got 2\.5"):
        jmpscale.raise_if_stuck(state, max_skips_in_a_row=2.5)
    with pytest.raises(ValueError, match="max_skips_in_a_row must be between 1 and 2147483647, got 0"):
        jmpscale.raise_if_stuck(state, max_skips_in_a_row=0)
    with pytest.raises(ValueError, match=r"not functionalized.*checkify\.checkify"):
        jax.jit(lambda s: jmpscale.raise_if_stuck(s, max_skips_in_a_row=2))(state)
