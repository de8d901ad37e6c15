"""The state: its validation, its layout, and where it can be stored."""

import copy
import dataclasses
import pickle
import socket
import subprocess
import sys

import chex
import flax.serialization
import flax.struct
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jmpscale

MAKERS = [jmpscale.dynamic, lambda: jmpscale.static(8.0), jmpscale.disabled]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"growth_factor": 1.0}, ValueError, r"growth_factor must be above 1 .*got 1\.0.*default"),
        ({"growth_factor": 1 + 1e-9}, ValueError, "growth_factor must be above 1 in float32"),
        ({"growth_factor": 1 + 2.0**-24}, ValueError, "growth_factor must be above 1 in float32"),
        ({"growth_factor": 2.0**126 * 1.5}, ValueError, r"growth_factor must be .* at most 2\^126"),
        ({"growth_factor": 0.5}, ValueError, "growth_factor"),
        ({"growth_factor": float("inf")}, ValueError, r"growth_factor must be above 1 .*got inf"),
        ({"growth_factor": float("nan")}, ValueError, "growth_factor must be a number, got nan"),
        ({"growth_factor": jnp.array(2.0)}, TypeError, "growth_factor must be a Python number.*float()"),
        ({"growth_factor": np.array(2.0)}, TypeError, "growth_factor must be a Python number"),
        ({"growth_factor": "2"}, TypeError, "growth_factor must be a Python number, got '2' of type str"),
        ({"growth_factor": True}, TypeError, "growth_factor must be a Python number, got True of type bool"),
        ({"backoff_factor": 0.0}, ValueError, r"backoff_factor must be below 1 .*got 0\.0.*default"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be below 1"),
        ({"backoff_factor": 1 - 1e-12}, ValueError, "backoff_factor must be below 1 in float32"),
        ({"backoff_factor": 1 - 2.0**-25}, ValueError, "backoff_factor must be below 1 in float32"),
        ({"backoff_factor": 2.0**-127}, ValueError, r"backoff_factor must be .* at least 2\^-126"),
        ({"backoff_factor": -0.5}, ValueError, "backoff_factor"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be between 1 and 2147483647, got 0"),
        ({"growth_interval": 2**31}, ValueError, "growth_interval must be between 1 and 2147483647"),
        ({"growth_interval": 100.0}, TypeError, r"growth_interval must be an integer, got 100\.0 of type float.*int"),
        ({"growth_interval": False}, TypeError, "growth_interval must be an integer"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be between 1 and"),
        ({"hysteresis": 1.5}, TypeError, "hysteresis must be an integer"),
        ({"hysteresis_reset": "never"}, ValueError, "hysteresis_reset must be one of 'growth', 'finite', got 'never'"),
        ({"hysteresis_reset": None}, ValueError, "hysteresis_reset must be one of"),
        ({"min_scale": 2.0**-127}, ValueError, r"min_scale must be between 1\.17549e-38 and 8\.50706e\+37.*2\^-126"),
        ({"max_scale": 2.0**127}, ValueError, "max_scale must be between"),
        ({"max_scale": 10**400}, ValueError, "max_scale must be between .*got inf"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "min_scale must not exceed max_scale, got 4 and 2"),
        ({"init_scale": 0.5}, ValueError, r"init_scale must be between 1 and 4\.29497e\+09, got 0\.5.*min_scale"),
        ({"init_scale": 2.0**33}, ValueError, "init_scale must be between"),
        ({"init_scale": float("nan")}, ValueError, "init_scale must be a number"),
        ({"init_scale": jnp.float32(4)}, TypeError, "init_scale must be a Python number"),
    ],
)
def test_a_bad_setting_is_refused_with_argument_rule_value_and_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        jmpscale.dynamic(**arguments)


def test_a_message_shows_a_value_in_full_up_to_sixty_characters():
    for length, shown in ((58, repr("x" * 58)), (59, "'" + "x" * 56 + "...")):
        with pytest.raises(TypeError, match=f"must be an integer, got {shown} of type str") as error:
            jmpscale.dynamic(growth_interval="x" * length)
        assert f"got {shown} of" in str(error.value)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-127, 2.0**127, float("inf"), float("nan")])
def test_static_refuses_scales_that_are_not_exact(scale):
    with pytest.raises(ValueError, match="scale must be"):
        jmpscale.static(scale)


def test_config_refuses_an_unknown_mode_and_positional_arguments():
    with pytest.raises(ValueError, match="mode must be one of 'dynamic', 'static', 'disabled', got 'off'"):
        jmpscale.ScalerConfig(mode="off")
    with pytest.raises(TypeError):
        jmpscale.ScalerConfig("dynamic")


def test_settings_cannot_be_traced():
    with pytest.raises(TypeError, match="growth_factor must be a Python number"):
        jax.jit(lambda g: jmpscale.dynamic(growth_factor=g))(2.0)


def test_the_limits_themselves_are_allowed():
    state = jmpscale.dynamic(2.0**-126, min_scale=2.0**-126, max_scale=2.0**126)
    assert float(state.loss_scale) == 2.0**-126
    assert float(jmpscale.static(2.0**126).loss_scale) == 2.0**126
    jmpscale.ScalerConfig(growth_factor=1 + 2**-23, backoff_factor=1 - 2**-24, min_scale=3, max_scale=3)
    jmpscale.ScalerConfig(growth_factor=2.0**126, backoff_factor=2.0**-126, growth_interval=2**31 - 1)


def test_numpy_numbers_are_accepted_and_equal_settings_are_equal():
    config = jmpscale.ScalerConfig(growth_factor=np.float32(2), growth_interval=np.int64(2000), min_scale=1)
    assert config == jmpscale.ScalerConfig()
    assert hash(config) == hash(jmpscale.ScalerConfig())
    assert type(config.growth_factor) is float
    assert type(config.growth_interval) is int


def test_the_layout_is_frozen():
    assert jmpscale.ScalerState._fields == (
        "loss_scale",
        "finite_steps",
        "hysteresis_left",
        "skipped",
        "consecutive_skips",
        "last_skip",
        "config",
    )
    fields = {f.name: f.default for f in dataclasses.fields(jmpscale.ScalerConfig)}
    assert fields == {
        "mode": "dynamic",
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 1,
        "hysteresis_reset": "growth",
        "min_scale": 1.0,
        "max_scale": 2.0**32,
    }


@pytest.mark.parametrize("make", MAKERS)
def test_leaves_are_six_strongly_typed_scalars_with_buffers_of_their_own(make):
    """NumPy arrays from the constructors, and JAX arrays from a jitted function and from tx.init."""
    state = make()
    leaves = jax.tree.leaves(state)
    assert [(type(x), x.shape, x.dtype) for x in leaves] == [(np.ndarray, (), np.float32)] + [
        (np.ndarray, (), np.int32)
    ] * 5
    assert len({x.ctypes.data for x in leaves}) == 6
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), state)
    for converted in (jax.jit(lambda s: s)(state), tx.init(jnp.ones(2)).scaler):
        leaves = jax.tree.leaves(converted)
        assert [str(jax.typeof(x)) for x in leaves] == ["float32[]"] + ["int32[]"] * 5
        assert not any(x.weak_type for x in leaves)
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == 6


def test_initial_values():
    state = jmpscale.dynamic(hysteresis=3)
    assert [x.item() for x in jax.tree.leaves(state)] == [65536.0, 0, 3, 0, 0, 0]
    assert jmpscale.dynamic().config == jmpscale.ScalerConfig()
    assert [x.item() for x in jax.tree.leaves(jmpscale.static(128))] == [128.0, 0, 1, 0, 0, 0]
    assert [x.item() for x in jax.tree.leaves(jmpscale.disabled())] == [1.0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("make", MAKERS)
def test_donating_one_state_keeps_the_others(make):
    first, second = (jax.tree.map(jnp.asarray, make()) for _ in range(2))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), first)
    before, replaced = tx.init(jnp.ones(2)).scaler, jmpscale.replace_scaler({"scaler": make()}, first)["scaler"]
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(first)
    assert first.loss_scale.is_deleted()
    for state in (second, before, replaced, tx.init(jnp.ones(2)).scaler):
        chex.assert_trees_all_equal(state, make())


@pytest.mark.parametrize("make", MAKERS)
def test_the_state_survives_transformations_flattening_and_pickling(make):
    state = make()
    for same in (
        jax.jit(lambda s: s)(state),
        jax.tree.map(lambda x: x, state),
        jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state)),
        jax.lax.scan(lambda s, _: (s, None), state, length=2)[0],
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
        copy.copy(state),
    ):
        assert type(same) is jmpscale.ScalerState
        assert same.config == state.config
        chex.assert_trees_all_equal(same, state)
    assert jax.tree.map(lambda _: None, state).config == state.config
    jax.jit(lambda s: s.loss_scale).lower(state)


def test_states_of_different_settings_do_not_mix():
    with pytest.raises(ValueError, match=r"ScalerConfig|[Mm]ismatch"):
        jax.tree.map(lambda x, y: x, jmpscale.dynamic(), jmpscale.dynamic(growth_interval=5))


def _trained():
    state = jmpscale.dynamic(1024.0, min_scale=0.25, hysteresis=2)
    for finite in (False, False, True):
        state = jmpscale.update(state, finite)
    return state


def test_orbax_restores_it_into_a_template_and_the_templates_settings_win(tmp_path):
    state = _trained()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"scaler": state})
        checkpointer.wait_until_finished()
        template = {"scaler": jmpscale.dynamic(min_scale=0.5)}
        restored = checkpointer.restore(tmp_path / "state", template)["scaler"]
    chex.assert_trees_all_equal(jax.tree.leaves(restored), jax.tree.leaves(state))
    assert restored.config.min_scale == 0.5


@flax.struct.dataclass
class _Holder:
    scaler: jmpscale.ScalerState
    step: int


def test_flax_serialization_stores_it_alone_and_inside_other_states():
    holder = _Holder(_trained(), 7)
    data = flax.serialization.to_bytes(holder)
    restored = flax.serialization.from_bytes(_Holder(jmpscale.dynamic(min_scale=0.5), 0), data)
    chex.assert_trees_all_equal(jax.tree.leaves(restored), jax.tree.leaves(holder))
    assert restored.scaler.config.min_scale == 0.5
    state_dict = flax.serialization.to_state_dict(holder.scaler)
    assert float(state_dict["loss_scale"]) == 512.0
    assert state_dict["config"] == {}, "a checkpoint contains no settings"


def test_the_settings_are_auxiliary_data():
    """As a child without leaves they would be counted by trainers that enumerate the children of a state."""
    opt_state = jmpscale.with_loss_scaling(optax.adam(1e-3), max_norm=1.0).init({"w": jnp.ones(2)})
    assert jax.tree.structure(jmpscale.dynamic()).num_nodes == 7
    for tree in (jmpscale.dynamic(), opt_state.scaler):
        children = jax.tree_util.default_registry.flatten_one_level(tree)[0]
        assert len(list(children)) == 6
        assert all(jax.tree.leaves(child) for child in children)
        paths = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        assert paths == list(jmpscale.ScalerState._fields[:-1])


def test_optax_gets_and_sets_the_fields_of_a_scaler_by_name():
    tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0)))
    opt_state = tx.init(jnp.ones(2))
    assert optax.tree.get(opt_state, "loss_scale") == 8.0
    changed = optax.tree.set(opt_state, loss_scale=jnp.float32(4.0), skipped=jnp.int32(3))
    scaler = jmpscale.get_scaler(changed)
    assert (float(scaler.loss_scale), int(scaler.skipped)) == (4.0, 3)
    assert scaler.config == jmpscale.get_scaler(opt_state).config
    assert jax.tree.structure(changed) == jax.tree.structure(opt_state)


def _run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_flax_may_be_imported_after_jmpscale():
    program = (
        "import jmpscale, sys\n"
        "assert not any(m.split('.')[0] in ('flax', 'chex', 'matplotlib') for m in sys.modules), 'imported too much'\n"
        "import flax.serialization\n"
        "state = jmpscale.dynamic(8.0)\n"
        "print(flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)).loss_scale)\n"
    )
    out = _run(program)
    assert out.stdout.strip() == "8.0", out.stderr


def test_flax_stores_a_state_in_a_program_that_has_made_none():
    program = (
        "import flax.serialization, jmpscale, pickle\n"
        f"state = pickle.loads({pickle.dumps(jmpscale.dynamic(8.0))!r})\n"
        "print(flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)).loss_scale)\n"
    )
    out = _run(program)
    assert out.stdout.strip() == "8.0", out.stderr


def test_creating_a_scaler_does_not_start_the_backend():
    """So a scaler and an optimizer may be created at module level, before jax.distributed.initialize."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = (
        "import jax, jmpscale, optax\n"
        "jmpscale.ScalerConfig(), jmpscale.static(1.0), jmpscale.disabled()\n"
        "state_dict = jmpscale.to_torch_state_dict(jmpscale.dynamic())\n"
        "jmpscale.from_torch_state_dict(state_dict)\n"
        "tx = jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0), max_norm=1.0)\n"
        "jmpscale.value_and_grad(lambda w: w)\n"
        f"jax.distributed.initialize({address!r}, num_processes=1, process_id=0)\n"
        "print(tx.init(1.0).scaler.loss_scale)\n"
    )
    out = _run(program)
    assert out.stdout.strip() == "8.0", out.stderr


def test_jax_export_stores_a_program_that_takes_and_returns_a_state():
    state = jmpscale.dynamic(1024.0, growth_interval=1)
    exported = jax.export.export(jax.jit(lambda s: jmpscale.update(s, jnp.array(True))))(state)
    loaded = jax.export.deserialize(exported.serialize())
    out = loaded.call(state)
    assert out.config == state.config
    assert float(out.loss_scale) == 2048.0


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_jax_export_stores_a_program_that_takes_and_returns_an_optimizer_state(max_norm):
    # An inner state of its own, because optax does not register its states with jax.export.
    inner = optax.GradientTransformation(lambda _: {}, lambda grads, state, params=None: (grads, state))
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(8.0), max_norm=max_norm)
    grads = jnp.array([3.0, jnp.inf])
    state = tx.init(grads)
    loaded = jax.export.deserialize(jax.export.export(jax.jit(tx.update))(grads, state).serialize())
    _, after = loaded.call(grads, state)
    assert type(after) is jmpscale.LossScalingState
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert (float(after.scaler.loss_scale), after.scaler.config) == (4.0, state.scaler.config)
