"""Settings have their documented defaults, new scalers have their initial values, and `ScalerState` is a pytree."""

import copy
import dataclasses
import inspect
import pickle
import socket
import subprocess
import sys
import types

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

import reference
from compiling import FAST

SETTINGS = {  # the default, and another value
    "growth_factor": (2.0, 3.0),
    "backoff_factor": (0.5, 0.25),
    "growth_interval": (2000, 7),
    "hysteresis": (1, 3),
    "hysteresis_reset": ("growth", "finite"),
    "min_scale": (1.0, 0.5),
    "max_scale": (2.0**32, 2.0**20),
}
DEFAULTS = {name: default for name, (default, _) in SETTINGS.items()}
OTHERS = {name: other for name, (_, other) in SETTINGS.items()}
MODES = {"dynamic": jmpscale.dynamic(**OTHERS), "static": jmpscale.static(8.0), "disabled": jmpscale.disabled()}
each_mode = pytest.mark.parametrize("state", MODES.values(), ids=MODES)


# Settings are kept


def _keyword_defaults(fn):
    parameters = inspect.signature(fn).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_dynamic_has_the_documented_defaults():
    assert _keyword_defaults(jmpscale.dynamic) == DEFAULTS
    assert _keyword_defaults(jmpscale.ScalerConfig) == {"mode": "dynamic"} | DEFAULTS
    assert jmpscale.dynamic().config == jmpscale.ScalerConfig()


def test_dynamic_passes_every_setting_to_its_config():
    config = jmpscale.dynamic(**OTHERS).config
    assert config == jmpscale.ScalerConfig(**OTHERS)
    assert dataclasses.asdict(config) == {"mode": "dynamic"} | OTHERS
    assert all(OTHERS[name] != DEFAULTS[name] for name in SETTINGS), "a setting that is dropped keeps its default"


def test_scaler_config_normalizes_numbers():
    config = jmpscale.ScalerConfig(growth_factor=np.float32(2), growth_interval=np.int64(2000), min_scale=1)
    assert config == jmpscale.ScalerConfig()
    assert hash(config) == hash(jmpscale.ScalerConfig())
    assert [type(x) for x in (config.growth_factor, config.growth_interval, config.min_scale)] == [float, int, float]


# A new scaler has its initial values


@pytest.mark.parametrize(
    ("state", "mode", "changed"),
    [
        pytest.param(jmpscale.dynamic(), "dynamic", {}, id="dynamic"),
        pytest.param(
            jmpscale.dynamic(8, hysteresis=3), "dynamic", {"loss_scale": 8.0, "hysteresis_left": 3}, id="hysteresis"
        ),
        pytest.param(jmpscale.static(128), "static", {"loss_scale": 128.0}, id="static"),
        pytest.param(jmpscale.disabled(), "disabled", {"loss_scale": 1.0}, id="disabled"),
    ],
)
def test_new_scaler_has_its_initial_values(state, mode, changed):
    assert state.config.mode == mode
    assert {name: getattr(state, name).item() for name in reference.FIELDS} == reference.INITIAL | changed
    assert state.step_applied


@each_mode
def test_new_scaler_consists_of_separate_numpy_arrays(state):
    arrays = {name: getattr(state, name) for name in reference.FIELDS}
    assert {(type(x), x.shape) for x in arrays.values()} == {(np.ndarray, ())}  # Orbax does not save np.generic
    assert {name: x.dtype for name, x in arrays.items()} == dict.fromkeys(arrays, np.int32) | {"loss_scale": np.float32}
    assert len({x.ctypes.data for x in arrays.values()}) == len(arrays)


def test_skip_reasons_are_the_values_of_last_skip_reason():
    assert dict(jmpscale.SkipReason.__members__) == {"NONE": 0, "GRADIENTS": 1, "LOSS": 2, "MIN_SCALE": 3}


def test_step_applied_is_false_after_a_skip():
    state = jmpscale.dynamic()
    assert not state._replace(consecutive_skips=np.int32(2)).step_applied
    assert state._replace(total_skips=np.int32(2)).step_applied


def _run_python(program):
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


@pytest.mark.full  # it imports JAX in a new process
def test_new_scaler_does_not_start_the_backend_and_import_loads_no_framework():
    """A scaler and an optimizer may be created before `jax.distributed.initialize`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    _run_python(
        "import sys, jax, jmpscale, optax\n"
        "jmpscale.static(1.0), jmpscale.disabled()\n"
        "jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(jmpscale.dynamic()))\n"
        "tx = jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0), max_norm=1.0)\n"
        "jmpscale.value_and_grad(lambda w: w)\n"
        f"jax.distributed.initialize({address!r}, num_processes=1, process_id=0)\n"
        "assert tx.init(1.0).scaler.loss_scale == 8.0\n"
        "jmpscale.update(jmpscale.dynamic(), True)\n"
        "optional = {'flax', 'chex', 'equinox', 'matplotlib', 'torch', 'orbax', 'jax.experimental.jet'}\n"
        "assert not optional & set(sys.modules)\n"
    )


# The state is a pytree


@each_mode
def test_scaler_state_survives_transformations_and_copies(state):
    for same in (
        jax.jit(lambda s: s)(state),
        jax.tree.map(lambda x: x, state),
        jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state)),
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
    ):
        assert type(same) is jmpscale.ScalerState
        assert same.config == state.config
        chex.assert_trees_all_equal(same, state)


def test_each_child_of_a_scaler_is_a_leaf_and_the_settings_are_auxiliary_data():
    """Trainers that enumerate the children of a state would count a child without leaves."""
    state, registry = MODES["dynamic"], jax.tree_util.default_registry
    assert state._fields == (*reference.FIELDS, "config")
    assert list(map(id, registry.flatten_one_level(state)[0])) == list(map(id, state[:-1]))
    assert list(map(id, jax.tree.leaves(state))) == list(map(id, state[:-1]))
    keys = [(str(key), id(child)) for key, child in registry.flatten_one_level_with_keys(state)[0]]
    assert keys == [(f".{name}", id(getattr(state, name))) for name in reference.FIELDS]
    assert jax.tree.structure(state) != jax.tree.structure(jmpscale.dynamic(growth_interval=5))


def _paths_by_fields(tree, path=""):
    """Rebuilds a tree as Levanter's checkpointer does: each leaf becomes its path, and a field without leaves None."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = tree._asdict().items()
        return type(tree)(**{name: _paths_by_fields(value, f"{path}.{name}") for name, value in fields})
    if isinstance(tree, tuple):
        return tuple(_paths_by_fields(value, f"{path}.{i}") for i, value in enumerate(tree))
    return path if jax.tree.leaves(tree) else None


def test_state_rebuilt_by_its_fields_is_mapped_beside_the_original():
    state = MODES["dynamic"]
    original = jmpscale.with_loss_scaling(optax.sgd(0.1, momentum=0.9), state).init(jnp.ones(2))
    paths = _paths_by_fields(original)
    pairs = []
    jax.tree.map(lambda path, leaf: pairs.append((path, id(leaf))), paths, original)
    expected = [*(f".scaler.{name}" for name in state._fields[:-1]), ".inner_state.0.trace"]
    assert pairs == list(zip(expected, map(id, jax.tree.leaves(original)), strict=True))
    kept = jax.tree.map(lambda leaf, path: leaf, original, paths)
    assert kept.scaler.config == state.config
    assert list(map(id, jax.tree.leaves(kept))) == list(map(id, jax.tree.leaves(original)))


@pytest.mark.guards
@pytest.mark.parametrize("factors", [(2.0, 8.0), (8.0, 2.0)])
def test_state_without_settings_raises_whatever_was_compiled_before(factors):
    """Such a state, as from a damaged checkpoint, must not run the program of a state with settings."""
    update = jax.jit(jmpscale.update, **FAST)
    states = [jmpscale.dynamic(8.0, growth_factor=factor, growth_interval=1) for factor in factors]
    for state, factor in zip(states, factors, strict=True):
        assert update(state, np.array(True)).loss_scale == 8.0 * factor
    without = states[0]._replace(config=None)
    with pytest.raises(TypeError, match=r"config must be a ScalerConfig, got NoneType"):
        update(without, np.array(True))
    structures = [jax.tree.structure(state) for state in (*states, without)]
    assert [[a == b for b in structures] for a in structures] == np.eye(3, dtype=bool).tolist()
    assert jax.tree.unflatten(structures[2], range(7)) == (*range(7), None)


def test_optax_gets_and_sets_fields_of_a_scaler_by_name():
    opt_state = (jmpscale.dynamic(8.0), optax.EmptyState())
    assert optax.tree.get(opt_state, "loss_scale") == 8.0
    changed = optax.tree.set(opt_state, loss_scale=np.float32(4.0), total_skips=np.int32(3))
    assert changed[0] == jmpscale.dynamic(4.0)._replace(total_skips=3)
    assert jax.tree.structure(changed) == jax.tree.structure(opt_state)


# The settings are registered with Flax and with jax.export


CALLS = {
    "dynamic": jmpscale.dynamic,
    "update": lambda: jmpscale.update(MODES["disabled"], True),
    "get_scaler": lambda: jmpscale.get_scaler(MODES["static"]),
    "tx.init": lambda: jmpscale.with_loss_scaling(optax.trace(0.9)).init(1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_scaler_config_is_registered_when_flax_is_imported_late(name, monkeypatch):
    def register(kind, to_state_dict, from_state_dict, override):
        config = jmpscale.ScalerConfig()
        registered.append((kind, to_state_dict(config), from_state_dict(config, {}) is config, override))

    registered = []
    monkeypatch.setitem(sys.modules, "flax.serialization", types.ModuleType("flax.serialization"))
    CALLS[name]()  # while Flax is being imported, its module is still empty
    sys.modules["flax.serialization"].register_serialization_state = register
    CALLS[name]()
    assert registered
    assert all(entry == (jmpscale.ScalerConfig, {}, True, True) for entry in registered)


@pytest.mark.full  # it imports Flax in a new process
def test_scaler_config_is_registered_when_flax_is_imported_first():
    _run_python(
        "import flax.serialization, jmpscale, pickle\n"
        f"state = pickle.loads({pickle.dumps(jmpscale.dynamic(8.0))!r})\n"
        "assert flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)).loss_scale == 8.0\n"
    )


def test_jax_export_keeps_states_and_settings():
    state = jmpscale.WithLossScalingState(jmpscale.dynamic(1024.0, **OTHERS), {"count": jnp.int32(3)}, jnp.float32(2.0))
    exported = jax.export.export(jax.jit(lambda s: s))(state)
    restored = jax.export.deserialize(exported.serialize()).call(state)
    assert type(restored) is jmpscale.WithLossScalingState
    assert type(restored.scaler) is jmpscale.ScalerState
    assert restored.scaler.config == state.scaler.config
    chex.assert_trees_all_equal(restored, state)
