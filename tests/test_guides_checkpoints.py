"""The page on checkpoints: a checkpoint from before the scaler, by the one function of Flax that raises no error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import checkpoints
from flax.training.train_state import TrainState

import jmpscale
from jmpscale.testing import assert_step_is_noop

import pages

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

PAGE, HEADING = "guides/checkpoints", "Flax: an older checkpoint, by restore_checkpoint"


@functools.cache
def _names():
    return pages.run(PAGE, HEADING)


def _trained(tx, steps=3):
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 1))}, tx=tx)
    for _ in range(steps):
        state = state.apply_gradients(grads={"w": jnp.full((8, 1), 0.25)})
    return state


def test_restored_as_it_stands_the_moments_and_the_schedules_count_are_silently_fresh(tmp_path):
    """What the page warns of; if this fails, Flax has begun to complain, and the page should say so."""
    saved = _trained(_names()["adam"])
    checkpoints.save_checkpoint(tmp_path, saved, step=3)
    template = _trained(jmpscale.with_loss_scaling(_names()["adam"]), steps=0)
    restored = checkpoints.restore_checkpoint(tmp_path, template)
    assert int(restored.step) == 3
    np.testing.assert_array_equal(restored.params["w"], saved.params["w"])
    inner = restored.opt_state.inner_state
    assert_step_is_noop(template.opt_state.inner_state, jax.tree.map(jnp.asarray, inner))
    assert optax.tree.get(saved.opt_state, "mu")["w"].all()


def test_restored_as_the_page_says_the_run_goes_on_with_its_moments(tmp_path):
    adam = _names()["adam"]
    saved = _trained(adam)
    checkpoints.save_checkpoint(tmp_path, saved, step=3)
    tx = jmpscale.with_loss_scaling(adam)
    restored = _names()["load"](tmp_path, _trained(adam, steps=0), tx)
    assert_step_is_noop(saved.opt_state, jax.tree.map(jnp.asarray, restored.opt_state.inner_state))
    grads = {"w": jnp.full((8, 1), -0.25)}
    new, plain = (state.apply_gradients(grads=grads) for state in (restored, saved))
    np.testing.assert_array_equal(new.params["w"], plain.params["w"])
    assert int(new.step) == 4
    assert jmpscale.get_scaler(new).finite_steps == 1


@pytest.mark.full
def test_a_chain_that_clips_becomes_max_norm(tmp_path):
    adam = _names()["adam"]
    chain = optax.chain(optax.clip_by_global_norm(1.0), adam)
    saved = _trained(chain)
    checkpoints.save_checkpoint(tmp_path, saved, step=3)
    state = checkpoints.restore_checkpoint(tmp_path, _trained(chain, steps=0))
    tx = jmpscale.with_loss_scaling(adam, max_norm=1.0)
    state = state.replace(tx=tx, opt_state=tx.init(state.params)._replace(inner_state=state.opt_state[1]))
    grads = {"w": jnp.full((8, 1), 3.0)}
    new = state.apply_gradients(grads=grads)
    np.testing.assert_allclose(new.params["w"], saved.apply_gradients(grads=grads).params["w"], rtol=1e-6)
