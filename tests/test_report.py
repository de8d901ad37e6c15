"""metrics and raise_if_stuck."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jmpscale


def _after(word, state, loss=None):
    for letter in word:
        state = jmpscale.update(state, letter == "G", loss=loss)
    return state


def test_metrics_have_stable_names_and_stay_on_the_device(variant):
    state = _after("GGB", jmpscale.dynamic(1024.0))
    logged = variant(jmpscale.metrics)(state)
    assert {name: np.asarray(value).item() for name, value in logged.items()} == {
        "loss_scale": 512.0,
        "finite_steps": 0,
        "hysteresis_left": 0,
        "skipped": 1,
        "consecutive_skips": 1,
        "last_skip": jmpscale.SkipReason.GRADIENTS,
    }
    assert all(isinstance(value, jax.Array) for value in logged.values())


def test_metrics_of_a_batch_of_scalers_are_batches():
    batch = jax.tree.map(lambda x: np.stack([x] * 3), jmpscale.dynamic(8.0))
    assert jmpscale.metrics(batch)["loss_scale"].tolist() == [8.0] * 3


def test_raise_if_stuck_accepts_as_many_skips_as_the_limit():
    state = _after("BBB", jmpscale.dynamic())
    jmpscale.raise_if_stuck(state, max_consecutive_skips=3)
    with pytest.raises(FloatingPointError, match=r"^3 consecutive steps were skipped"):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=np.int64(2))
    jmpscale.raise_if_stuck(_after("G", state), max_consecutive_skips=1)


STUCK = pytest.mark.parametrize(
    ("state", "word", "loss", "message"),
    [
        (
            jmpscale.dynamic,
            "BBB",
            None,
            r"\(3 in total\); the loss scale is 8192\. .*not finite, while.*backing off from its initial value",
        ),
        (jmpscale.dynamic, "BGBBB", None, r"\(4 in total\); the loss scale is 4096\. .*still backing off\. Allow"),
        (
            lambda: jmpscale.dynamic(2.0),
            "GBBB",
            None,
            r"the loss scale is 1\. .*cannot back off any further.*decrease min_scale",
        ),
        (
            lambda: jmpscale.dynamic(0.5, min_scale=0.3),
            "GBBB",
            None,
            r"the loss scale is 0\.3\. .*cannot back off any further",
        ),
        (lambda: jmpscale.static(8.0), "BBB", None, "the loss scale is 8.*cannot back off any further"),
        (jmpscale.dynamic, "BBB", np.nan, r"65536\. .*loss itself was not finite.*No loss scale prevents that"),
    ],
)


@STUCK
@pytest.mark.parametrize("leaf", [jnp.asarray, np.asarray, lambda x: x.item()], ids=["jax", "numpy", "Python"])
def test_raise_if_stuck_names_scale_skips_cause_and_remedy(state, word, loss, message, leaf):
    stuck = jax.tree.map(leaf, _after(word, state(), None if loss is None else jnp.float32(loss)))
    with pytest.raises(FloatingPointError, match=message):
        jmpscale.raise_if_stuck(stuck, max_consecutive_skips=2)
    jmpscale.raise_if_stuck(stuck, max_consecutive_skips=3)


@pytest.mark.parametrize("scale", [np.nan, 0.0, -1.0, np.inf, 2.0**127])
@pytest.mark.parametrize("leaf", [jnp.float32, np.float32, float])
def test_raise_if_stuck_calls_an_impossible_scale_damaged(scale, leaf):
    state = _after("BBB", jmpscale.dynamic())._replace(loss_scale=leaf(scale))
    with pytest.raises(FloatingPointError, match="The loss scale is invalid: the state was damaged"):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)


@STUCK
def test_raise_if_stuck_raises_the_same_error_under_checkify(state, word, loss, message):
    def step(state, finite):
        state = jmpscale.update(state, finite, loss=None if loss is None else jnp.float32(loss))
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)
        return state

    def run(state, word):
        return jax.lax.scan(lambda s, finite: (step(s, finite), None), state, word)[0]

    checked = jax.jit(checkify.checkify(run))
    error, _ = checked(state(), jnp.array([letter == "G" for letter in word]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"^3 consecutive steps were skipped .*" + message):
        error.throw()
    error, _ = checked(state(), jnp.array([letter == "G" for letter in word[:-1] + "G"]))
    error.throw()
