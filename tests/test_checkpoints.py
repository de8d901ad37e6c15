"""Save, stop, restore, continue: nothing distinguishes the run from one that never stopped."""

import functools
import itertools
import re
import sys
import types

import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop

import pages
from checkpointing import FORMATS, example, huge_scale, of_another_layout, orbax, same
from children import end, start

pytestmark = pytest.mark.usefixtures("standard_promotion")
FULL = functools.partial(pytest.param, marks=pytest.mark.full)


# A whole training state: the functional API with its scaler, and the optax wrapper with its own, side by side.

TX = jmpscale.with_loss_scaling(optax.adamw(1e-2), jmpscale.dynamic(2.0**14, growth_interval=3))
STEPS = 14


def _start():
    page = example("Orbax")
    params = {"w": jnp.full((8, 1), 0.1), "b": jnp.zeros((1, 1))}
    return {"functional": page["start"](), "params": params, "opt_state": TX.init(params)}


@jax.jit
def _step(state, x, y):
    def loss_fn(params):
        h = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16) + params["b"].astype(jnp.float16))
        return jnp.mean((h.astype(jnp.float32) - y) ** 2)

    functional, _ = example("Orbax")["train_step"](state["functional"], x, y)
    loss, grads = jmpscale.value_and_grad(loss_fn)(state["opt_state"], state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"], value=loss)
    return {"functional": functional, "params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def _continue(state, first):
    for number in range(first, STEPS):
        state = _step(state, *example("Orbax")["make_batch"](number))
    return state


@pytest.fixture(scope="module")
def states():
    """The state before each step of the uninterrupted run, and after the last."""
    with jax.numpy_dtype_promotion("standard"):
        states = [_start()]
        for number in range(STEPS):
            states.append(_step(states[-1], *example("Orbax")["make_batch"](number)))
    for scaler_of in (lambda state: state["functional"]["scaler"], lambda state: state["opt_state"].scaler):
        scales = np.asarray([scaler_of(state).loss_scale for state in states])
        assert set(np.sign(np.diff(scales))) == {-1, 0, 1}, "it backs off, stays and grows"
    return states


@pytest.mark.parametrize(
    ("name", "apart"), [*((name, 1) for name in FORMATS if name != "orbax"), ("orbax", 7), FULL("orbax", 1)]
)
def test_resumed_at_any_step_a_run_equals_the_uninterrupted_one(name, apart, states, tmp_path):
    for number, state in list(enumerate(states))[::apart]:
        (folder := tmp_path / str(number)).mkdir()
        restored = FORMATS[name](folder, state, _start())
        assert same(restored, state)
        assert same(_continue(restored, number), states[-1]), f"resumed before step {number}"


def test_a_train_state_resumes_from_its_file_at_any_step(tmp_path):
    page = example("Flax")
    x, y = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float16), jnp.full((4, 1), 30.0)
    states = [page["state"]]
    template = TrainState.create(apply_fn=page["apply_fn"], params={"w": jnp.zeros((8, 1))}, tx=page["tx"])
    for _ in range(12):
        states.append(page["train_step"](states[-1], x, y)[0])
    scalers = [jmpscale.get_scaler(state) for state in states]
    assert int(scalers[-1].skipped) > 0
    assert any(b.loss_scale > a.loss_scale for a, b in itertools.pairwise(scalers))
    for number, state in enumerate(states):
        page["save"](tmp_path / "state", state)
        state = page["load"](tmp_path / "state", template)
        for _ in range(number, 12):
            state = page["train_step"](state, x, y)[0]
        assert same(state, states[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_skipped_step_of_a_train_state_changes_only_its_step_and_its_scaler():
    page = example("Flax")
    before = huge_scale(page["state"])
    after, _ = page["train_step"](before, jnp.ones((4, 8), jnp.float16), jnp.zeros((4, 1)))
    assert_step_is_noop((before.params, before.opt_state.inner_state), (after.params, after.opt_state.inner_state))
    assert int(after.step) == int(before.step) + 1
    assert jmpscale.get_scaler(after).loss_scale == 2.0**21


def test_the_skipped_steps_of_the_guides_loop_change_only_the_scaler(states):
    skips = 0
    for before, after in itertools.pairwise(state["functional"] for state in states):
        if after["scaler"].skipped > before["scaler"].skipped:
            skips += 1
            assert_step_is_noop({**before, "scaler": None}, {**after, "scaler": None})
    assert skips


@pytest.mark.parametrize("stops", [FULL((4,)), (7, 13), FULL((2, 3, 9))])
def test_the_loop_of_the_guide_resumes_wherever_it_was_stopped(stops, tmp_path):
    train = example("Orbax")["train"]
    for stop in stops:
        train(tmp_path / "stopped", stop)
    assert same(train(tmp_path / "stopped", 16), train(tmp_path / "whole", 16))
    assert same(train(tmp_path / "whole", 16), train(tmp_path / "again", 16))


# Sharded, without a template, from a run without a scaler, inside NNX


def test_a_sharded_run_resumes_on_its_mesh_with_equal_bits_and_one_compilation(tmp_path):
    page = example("Orbax, sharded")
    mesh, step = page["mesh"], page["train_step"]
    state = huge_scale(page["state"])
    with jax.set_mesh(mesh):
        state, _ = step(state, page["x"])  # skipped
        restored = orbax(tmp_path, state, page["start"](mesh))
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert a.sharding == b.sharding
        for _ in range(12):
            # One after the other: simulated devices can wait for each other for ever in two programs at a time.
            state, _ = jax.block_until_ready(step(state, page["x"]))
            restored, _ = jax.block_until_ready(step(restored, page["x"]))
    assert step._cache_size() == 1
    assert same(restored, state)
    scaler = jmpscale.get_scaler(state)
    assert 1 < int(scaler.skipped) < 9
    assert state["params"]["w"].sharding.spec[1] == "model"
    assert_replicated(jmpscale.get_scaler(restored))


@pytest.mark.parametrize("devices", [FULL(1), 2, FULL(8)])
def test_a_sharded_checkpoint_is_restored_on_another_mesh(devices, tmp_path):
    page = example("Orbax, sharded")
    mesh = page["make_mesh"](jax.devices()[-devices:])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), page["start"](mesh))
    for template in (page["start"](mesh), abstract):
        (folder := tmp_path / str(template is abstract)).mkdir()
        restored = orbax(folder, page["state"], template)
        assert same(restored, page["state"])
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
            assert a.sharding == b.sharding
        assert len(restored["params"]["w"].sharding.device_set) == devices


def test_a_skipped_sharded_step_changes_only_the_scaler():
    page = example("Orbax, sharded")
    before = huge_scale(page["state"])
    with jax.set_mesh(page["mesh"]):
        after, _ = page["train_step"](before, page["x"])
    assert_step_is_noop(
        (before["params"], before["opt_state"].inner_state), (after["params"], after["opt_state"].inner_state)
    )
    assert jmpscale.get_scaler(after).loss_scale == 2.0**21


def test_without_a_template_the_scaler_is_rebuilt_field_by_field(tmp_path):
    page = example("Orbax, no template")
    scaler = jmpscale.dynamic(1024.0, growth_interval=7, hysteresis=2)
    for finite in (True, False, True, False, False, True):
        scaler = jmpscale.update(scaler, finite)
    page["save"](tmp_path, 3, {"params": {"w": jnp.arange(3.0)}, "scaler": scaler})
    state = page["load"](tmp_path, 3, scaler.config)
    assert same(state["scaler"], scaler)
    for _ in range(7):
        scaler, state["scaler"] = (jmpscale.update(s, True) for s in (scaler, state["scaler"]))
    assert same(state["scaler"], scaler)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (of_another_layout("last_skip"), "missing 1 required positional argument: 'last_skip'"),
        (of_another_layout(scale=jnp.float32(1)), "unexpected keyword argument 'scale'"),
        (of_another_layout(*jmpscale.ScalerState._fields, nothing=jnp.int32(0)), "argument 'nothing'"),
    ],
)
def test_without_a_template_a_missing_or_foreign_field_is_refused(saved, message, tmp_path):
    page = example("Orbax, no template")
    page["save"](tmp_path, 1, {"scaler": saved})
    with pytest.raises(TypeError, match=message):
        page["load"](tmp_path, 1, jmpscale.ScalerConfig())


def test_a_run_without_a_scaler_continues_with_one(tmp_path):
    page = example("Orbax, from a run without jmpscale")
    adam, params = page["adam"], {"w": jnp.full((8, 1), 0.5)}
    tx = jmpscale.with_loss_scaling(adam)
    grads, opt_state = {"w": jnp.full((8, 1), 0.25)}, adam.init(params)
    _, opt_state = adam.update(grads, opt_state, params)
    restored = {"params": params, "opt_state": orbax(tmp_path, opt_state, adam.init(params))}
    assert same(page["functional"](restored)["opt_state"], opt_state)
    ours = page["wrapped"](restored, tx)["opt_state"]
    expected, _ = adam.update({"w": -grads["w"]}, opt_state, params)
    updates, ours = tx.update({"w": -grads["w"]}, ours, params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert abs(updates["w"]).max() < 0.001, "the first moments were there: they cancel"
    assert int(jmpscale.get_scaler(ours).finite_steps) == 1


@pytest.mark.parametrize("apart", [4, FULL(1)])
def test_nnx_model_and_optimizer_resume_at_any_step(apart, tmp_path):
    page = example("Flax NNX")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)) * 4, jnp.float32)
    run, arrays = page["start"](seed=0), []
    for number in range(9):
        arrays.append(jax.tree.map(jnp.copy, nnx.state(run)))
        if number < 8:
            page["train_step"](*run, x)
    scaler = jmpscale.get_scaler(run[1].opt_state)
    assert 0 < int(scaler.skipped) < 8
    for number in range(0, 9, apart):
        (folder := tmp_path / str(number)).mkdir()
        again = page["start"](seed=7)
        nnx.update(again, orbax(folder, arrays[number], nnx.state(again)))
        for _ in range(number, 8):
            page["train_step"](*again, x)
        assert same(nnx.state(again), nnx.state(run))


def test_a_skipped_step_of_nnx_changes_only_its_step_and_its_scaler():
    page = example("Flax NNX")
    model, optimizer = page["start"](seed=0)
    optimizer.opt_state = huge_scale(optimizer.opt_state)
    parts = nnx.state(model), nnx.state(optimizer.opt_state.inner_state)
    before = jax.tree.map(jnp.copy, parts)
    assert len(jax.tree.leaves(before)) == 2 + 5
    page["train_step"](model, optimizer, page["x"])
    assert_step_is_noop(before, (nnx.state(model), nnx.state(optimizer.opt_state.inner_state)))
    assert int(optimizer.step[...]) == 1
    assert jmpscale.get_scaler(optimizer.opt_state).loss_scale == 2.0**21


# Optimizer states with and without a norm, new states, parts of states, and trainers that list the fields of a state


WRAPPED = {"max_norm": {"max_norm": 1.0}, "no max_norm": {}}


def _state_of(options):
    if options is None:
        return jmpscale.dynamic(8.0)
    return jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(8.0), **options).init({"w": jnp.ones(3)})


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _pytree_checkpointer(folder, state, template):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        return checkpointer.restore(folder / "state", item=template)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    "roundtrip",
    [orbax, _pytree_checkpointer, FORMATS["msgpack"]],
    ids=["StandardCheckpointer", "PyTreeCheckpointer", "flax.serialization"],
)
@pytest.mark.parametrize("options", [None, *WRAPPED.values()], ids=["scaler", *WRAPPED])
def test_a_new_state_is_saved_and_restored(roundtrip, options, tmp_path):
    """A scaler that is not used yet consists of NumPy arrays."""
    state = _state_of(options)
    assert all(isinstance(x, np.ndarray) == (options is None) for x in jax.tree.leaves(state))
    template = jax.tree.map(np.zeros_like, state)
    (tmp_path / "abstract").mkdir()
    assert same(roundtrip(tmp_path, state, template), state)
    if roundtrip is not FORMATS["msgpack"]:
        assert same(roundtrip(tmp_path / "abstract", state, _abstract(state)), state)


def test_orbax_restores_a_part_that_contains_a_scaler(tmp_path):
    state = {"params": jnp.ones(3), "scaler": jmpscale.dynamic(8.0)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        part = ocp.args.PyTreeRestore({"scaler": jmpscale.dynamic(4.0)}, partial_restore=True)
        restored = checkpointer.restore(tmp_path / "state", args=part)
    assert same(restored, {"scaler": state["scaler"]})


def _leaf_names(tree, prefix=""):
    """Names leaves by going through named tuples field by field, as Levanter's `leaf_key_paths` does."""
    if tree is None:
        return None
    if type(tree).__bases__ == (tuple,):  # a named tuple
        return type(tree)(**{name: _leaf_names(value, f"{prefix}.{name}") for name, value in tree._asdict().items()})
    if isinstance(tree, tuple):
        return tuple(_leaf_names(value, f"{prefix}.{number}") for number, value in enumerate(tree))
    if isinstance(tree, dict):
        return {name: _leaf_names(value, f"{prefix}.{name}") for name, value in tree.items()}
    return prefix


@pytest.mark.parametrize("options", [None, *WRAPPED.values()], ids=["scaler", *WRAPPED])
def test_a_tree_built_field_by_field_has_a_name_for_each_leaf(options):
    state = _state_of(options)
    names = jax.tree.leaves(_leaf_names(state))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert names == ["." + jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


MAX_NORM = "A run whose max_norm is added or removed"


@pytest.mark.parametrize("saved", WRAPPED)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pickle"])
def test_a_run_continues_after_max_norm_was_added_or_removed(name, saved, tmp_path):
    page = example(MAX_NORM)
    params, grads = page["params"], {"w": jnp.full((8, 1), 0.25)}  # of norm 0.7, so that nothing is clipped
    old, new = (page["before"], page["after"]) if saved == "no max_norm" else (page["after"], page["before"])
    _, state = old.update(grads, old.init(params), params)
    template = new.init(params)
    restored = FORMATS[name](tmp_path, state, template)
    assert (restored.grad_norm is None) == (name == "orbax" or saved == "no max_norm"), "what the guide says"
    restored = restored._replace(grad_norm=template.grad_norm)
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    assert same((restored.scaler, restored.inner_state), (state.scaler, state.inner_state))
    updates, _ = old.update(grads, state, params)
    ours, after = jax.jit(new.update)(grads, restored, params)
    np.testing.assert_allclose(ours["w"], updates["w"], rtol=1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(template)


def test_the_guides_program_adds_max_norm():
    page = example(MAX_NORM)
    np.testing.assert_allclose(page["opt_state"].grad_norm, 8**0.5, rtol=1e-6)
    assert int(page["opt_state"].scaler.finite_steps) == 2
    assert int(optax.tree.get(page["opt_state"], "count")) == 2


# Flax imported after the state was created, or not yet completely


CALLS = {
    "dynamic": lambda state: jmpscale.dynamic(),
    "static": lambda state: jmpscale.static(1.0),
    "disabled": lambda state: jmpscale.disabled(),
    "tx.init": lambda state: TX.init(jnp.ones(3)),
    "tx.update": lambda state: TX.update(jnp.ones(3), state, jnp.ones(3)),
    "get_scaler": jmpscale.get_scaler,
    "replace_scaler": lambda state: jmpscale.replace_scaler(state, state.scaler),
    "metrics": jmpscale.metrics,
    "value_and_grad": lambda state: jmpscale.value_and_grad(jnp.square)(state, 3.0),
    "scale": lambda state: jmpscale.scale(state.scaler, jnp.float32(1.0)),
    "unscale": lambda state: jmpscale.unscale(state.scaler, jnp.float32(1.0)),
    "update": lambda state: jmpscale.update(state.scaler, True),
    "grad_report": lambda state: jmpscale.grad_report(jnp.ones(3), scaler=state.scaler),
    "raise_if_stuck": lambda state: jmpscale.raise_if_stuck(state.scaler, max_consecutive_skips=1),
    "to_torch_state_dict": lambda state: jmpscale.to_torch_state_dict(state.scaler),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_with_a_scaler_registers_its_settings_with_flax(name, monkeypatch):
    state, registered = TX.init(jnp.ones(3)), []
    register = flax.serialization.register_serialization_state

    def record(kind, *args, **options):
        registered.append(kind)
        register(kind, *args, **options)

    monkeypatch.setattr(flax.serialization, "register_serialization_state", record)
    CALLS[name](state)
    assert jmpscale.ScalerConfig in registered


LAZY = """
import sys
import jax.numpy as jnp, jmpscale, optax
state = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**10)).init({"w": jnp.ones(3)})
assert not any(name.startswith("flax") for name in sys.modules), "Flax is imported after the state is created"
exec(sys.argv[1])
print(len(save_lazily(state)))
"""


def test_the_guides_function_saves_although_flax_is_imported_late():
    text = (pages.DOCS / "guides/checkpoints.md").read_text()
    (function,) = re.findall(r"^```py\n(def save_lazily.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    without, _ = re.subn(r"    jmpscale\.get_scaler.*\n", "", function)
    children = [start("-c", LAZY, code) for code in (function, without)]
    try:
        (out, errors), (_, refusal) = (end(child) for child in children)
    finally:
        for child in children:
            end(child)
    assert int(out) > 0, errors
    assert "can not serialize 'ScalerConfig' object" in refusal, "what the guide says of the first use of Flax"


@pytest.mark.parametrize("name", ["flax.serialization", "flax.nnx", "equinox"])
@pytest.mark.parametrize(
    "call",
    [
        lambda: jmpscale.dynamic(),
        lambda: TX.init(jnp.ones(3)),
        lambda: jmpscale.apply_if(True, lambda w: w + 1, jnp.ones(3)),
        lambda: jmpscale.value_and_grad(jnp.square)(jmpscale.dynamic(), 3.0),
    ],
    ids=["dynamic", "tx.init", "apply_if", "value_and_grad"],
)
def test_a_module_that_another_thread_is_still_importing_is_ignored(name, call, monkeypatch):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    call()
