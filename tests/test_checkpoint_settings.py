"""Whose settings count after a restore, and what changes when a setting or the scale is set by hand."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmpscale

import reference
from cases import some
from checkpointing import FORMATS, example, orbax, same

pytestmark = pytest.mark.usefixtures("standard_promotion")


# Whose settings count


RESTORED = {
    "orbax": orbax,
    "msgpack": FORMATS["msgpack"],
    "state dict": FORMATS["state dict"],
    "orbax, no template": lambda folder, state, template: (
        example("Orbax, no template")["save"](folder, 1, {"scaler": state}),
        example("Orbax, no template")["load"](folder, 1, template.config)["scaler"],
    )[1],
}


@pytest.mark.parametrize("name", RESTORED)
def test_the_restoring_programs_settings_win(name, tmp_path):
    saved = jmpscale.update(jmpscale.dynamic(1024.0, growth_interval=2000), False)
    template = jmpscale.dynamic(4096.0, growth_interval=2, growth_factor=4.0, min_scale=256.0)
    restored = RESTORED[name](tmp_path, saved, template)
    assert restored.config == template.config
    scales = []
    for finite in (True, True, False, False, False, False):
        restored = jmpscale.update(restored, finite)
        scales.append(float(restored.loss_scale))
    assert scales == [512.0, 2048.0, 1024.0, 512.0, 256.0, 256.0]


@pytest.mark.full
def test_the_settings_of_an_nnx_optimizer_are_those_of_the_restoring_program(tmp_path):
    page = example("Flax NNX")
    eager = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(growth_interval=1))
    saved, again = page["start"](seed=0), page["start"](seed=0, tx=eager)
    nnx.update(again, orbax(tmp_path, nnx.state(saved), nnx.state(again)))
    page["train_step"](*again, jnp.ones((4, 8)) * 1e-3)
    assert jmpscale.get_scaler(again[1].opt_state).loss_scale == 2.0**16


def test_a_pickle_brings_its_own_settings_until_they_are_replaced():
    page = example("Pickle")
    assert page["saved"].config.growth_interval == 2000
    assert page["scaler"].config.growth_interval == 100
    assert page["scaler"].loss_scale == page["saved"].loss_scale == 512.0


def test_an_exported_step_repeats_the_original_with_its_own_settings():
    page = example("jax.export")
    rng = np.random.default_rng(0)
    params = {"w": jnp.ones((8, 1))}
    state = (params, page["tx"].init(params))
    leaves, step, scales = jax.tree.leaves(state), jax.jit(page["train_step"]), []
    for _ in range(12):
        x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float16)
        state, leaves = step(*state, x), page["program"].call(leaves, x)
        assert same(leaves, jax.tree.leaves(state))
        scales.append(float(jmpscale.get_scaler(state).loss_scale))
    assert set(np.sign(np.diff(scales))) == {-1, 0, 1}, "it backs off, stays and grows"
    with pytest.raises(ValueError, match="structure"):
        page["program"].call(leaves[1:], x)


# By hand


def _hard_times(scaler, config, steps=40):
    """Updates a scaler and the reference, which start alike; they have to stay so."""
    expected = {name: np.asarray(getattr(scaler, name)).item() for name in reference.FIELDS}
    expected["loss_scale"] = np.float32(expected["loss_scale"])
    for finite in np.random.default_rng(0).random(steps) < 0.7:
        scaler = _update(scaler, jnp.asarray(finite))
        expected = reference.step(config, expected, bool(finite))
        assert {name: np.asarray(getattr(scaler, name)).item() for name in reference.FIELDS} == expected
    return scaler


_update = jax.jit(jmpscale.update)


@pytest.fixture
def used():
    """A scaler in the middle of a run: it has grown, skipped, and counts with a hysteresis of 3."""
    scaler = jmpscale.dynamic(2.0**12, growth_interval=3, hysteresis=3)
    for finite in (True, True, True, False, False, True, True):
        scaler = _update(scaler, jnp.asarray(finite))
    assert (float(scaler.loss_scale), int(scaler.finite_steps), int(scaler.hysteresis_left)) == (2.0**13, 2, 1)
    return scaler


def test_a_scale_set_by_hand_counts_from_there_and_compiles_nothing(used):
    compiled = _update._cache_size()
    scaler = example("By hand")["set_scale"](used, 256.0)
    assert (float(scaler.loss_scale), int(scaler.finite_steps)) == (256.0, 0)
    assert scaler._replace(loss_scale=used.loss_scale, finite_steps=used.finite_steps) == used
    _hard_times(scaler, used.config)
    assert _update._cache_size() == compiled


@pytest.mark.parametrize(
    ("settings", "loss_scale", "left"),
    [
        ({"growth_interval": 2, "growth_factor": 4.0}, 2.0**13, 1),
        ({"max_scale": 2.0**10}, 2.0**10, 1),
        ({"min_scale": 2.0**20, "hysteresis_reset": "finite"}, 2.0**20, 1),
        ({"hysteresis": 1, "backoff_factor": 0.25}, 2.0**13, 1),
    ],
)
def test_a_setting_changed_in_the_middle_of_a_run_counts_from_there(settings, loss_scale, left, used):
    compiled = _update._cache_size()
    scaler = example("By hand")["change"](used, **settings)
    assert (float(scaler.loss_scale), int(scaler.hysteresis_left)) == (loss_scale, left)
    assert int(scaler.finite_steps) == 2
    assert all(getattr(scaler.config, name) == value for name, value in settings.items())
    after = _hard_times(scaler, scaler.config)
    assert after.config.min_scale <= float(after.loss_scale) <= after.config.max_scale
    assert _update._cache_size() == compiled + 1


def test_a_reduced_hysteresis_limits_hysteresis_left():
    scaler = example("By hand")["change"](jmpscale.dynamic(hysteresis=3), hysteresis=1)
    assert _update(scaler, jnp.array(False)).loss_scale == 2.0**15


def test_a_restored_scaler_is_brought_within_the_restoring_programs_limits(used):
    template = jmpscale.dynamic(2.0**8, max_scale=2.0**10, growth_interval=3)
    restored = flax.serialization.from_bytes(template, flax.serialization.to_bytes(used))
    scaler = example("By hand")["change"](restored)
    assert scaler.config == template.config
    assert (float(scaler.loss_scale), int(scaler.hysteresis_left)) == (2.0**10, 1)
    _hard_times(scaler, template.config)


def test_a_changed_setting_is_checked(used):
    change = example("By hand")["change"]
    with pytest.raises(ValueError, match="growth_interval must be between 1 and"):
        change(used, growth_interval=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'interval'"):
        change(used, interval=5)


def test_a_reset_scaler_equals_a_new_one_and_compiles_nothing(used):
    compiled = _update._cache_size()
    scaler = example("By hand")["reset"](used, 2.0**12)
    assert same(scaler, jmpscale.dynamic(2.0**12, growth_interval=3, hysteresis=3))
    _hard_times(scaler, used.config)
    assert _update._cache_size() == compiled


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [("set_scale", {"loss_scale": 64.0}), ("reset", {}), ("change", {"growth_interval": 4})],
)
def test_the_recipes_keep_a_scaler_where_it_was_on_a_mesh(recipe, arguments):
    page, by_hand = example("Orbax, sharded"), example("By hand")[recipe]
    state = page["start"](page["mesh"])
    old = jmpscale.get_scaler(state)
    new = by_hand(old, **arguments)
    assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(old)]
    compiled = page["train_step"]._cache_size()
    with jax.set_mesh(page["mesh"]):
        state, _ = page["train_step"](jmpscale.replace_scaler(state, new), page["x"])
    assert page["train_step"]._cache_size() == compiled
    assert jmpscale.get_scaler(state).loss_scale == new.loss_scale


@pytest.mark.parametrize("kind", some(["chain", "TrainState", "nnx.Optimizer"], default=["chain"]))
def test_replace_scaler_puts_a_scaler_into_every_kind_of_state(kind, used):
    if kind == "chain":
        tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-2)))
        state, params = tx.init(jnp.ones(3)), jnp.ones(3)
        state = jmpscale.replace_scaler(state, used)
        scaler = jmpscale.get_scaler(tx.update(jnp.ones(3), state, params)[1])
    elif kind == "TrainState":
        page = example("Flax")
        state = jmpscale.replace_scaler(page["state"], used)
        state, _ = page["train_step"](state, jnp.ones((4, 8), jnp.float16), jnp.zeros((4, 1)))
        scaler = jmpscale.get_scaler(state)
    else:
        page = example("Flax NNX")
        model, optimizer = page["start"](seed=0)
        optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, used)
        page["train_step"](model, optimizer, jnp.ones((4, 8)) * 1e-3)
        scaler = jmpscale.get_scaler(optimizer.opt_state)
    assert same(scaler, _update(used, jnp.array(True)))
