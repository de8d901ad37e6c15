"""Save, stop, restore, go on: nothing may tell the run from one that never stopped, or a clear error says why not."""

import collections
import errno
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys

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
import reference

pytestmark = pytest.mark.usefixtures("standard_promotion")

PAGE = "guides/checkpoints"
HERE = pathlib.Path(__file__).parent
TORCH = json.loads((HERE / "data" / "torch_state_dicts.json").read_text())


@functools.cache
def _example(heading):
    """Runs an example once for all tests that use it."""
    return pages.run(PAGE, heading)


def _same(one, other):
    """Whether two trees are the same in structure, shapes, dtypes and bits, whatever holds the numbers."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
        for a, b in ((np.asarray(a), np.asarray(b)) for a, b in pairs)
    )


def _orbax(folder, state, template):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", template)


# A whole training state: a functional step with its scaler, and an optimizer with one inside, side by side.

TX = jmpscale.with_loss_scaling(optax.adamw(1e-2), jmpscale.dynamic(2.0**14, growth_interval=3))
STEPS = 14


def _start():
    page = _example("Orbax")
    params = {"w": jnp.full((8, 1), 0.1), "b": jnp.zeros((1, 1))}
    return {"functional": page["start"](), "params": params, "opt_state": TX.init(params)}


@jax.jit
def _step(state, x, y):
    def scaled(params):
        h = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16) + params["b"].astype(jnp.float16))
        loss = jnp.mean((h.astype(jnp.float32) - y) ** 2)
        return jmpscale.scale(jmpscale.get_scaler(state["opt_state"]), loss), loss

    functional, _ = _example("Orbax")["train_step"](state["functional"], x, y)
    grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"], value=loss)
    return {"functional": functional, "params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def _go_on(state, first):
    for number in range(first, STEPS):
        state = _step(state, *_example("Orbax")["make_batch"](number))
    return state


@pytest.fixture(scope="module")
def states():
    """The state before each step of the uninterrupted run, and after the last."""
    with jax.numpy_dtype_promotion("standard"):
        states = [_start()]
        for number in range(STEPS):
            states.append(_step(states[-1], *_example("Orbax")["make_batch"](number)))
    for scaler_of in (lambda state: state["functional"]["scaler"], lambda state: state["opt_state"].scaler):
        scales = np.asarray([scaler_of(state).loss_scale for state in states])
        assert set(np.sign(np.diff(scales))) == {-1, 0, 1}, "it backs off, stays and grows"
    return states


FORMATS = {
    "orbax": _orbax,
    "msgpack": lambda _, state, template: flax.serialization.from_bytes(template, flax.serialization.to_bytes(state)),
    "state dict": lambda _, state, template: flax.serialization.from_state_dict(
        template, flax.serialization.to_state_dict(state)
    ),
    "pickle": lambda _, state, template: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_resumed_at_any_step_a_run_equals_the_uninterrupted_one(name, states, tmp_path):
    for number, state in enumerate(states):
        (folder := tmp_path / str(number)).mkdir()
        restored = FORMATS[name](folder, state, _start())
        assert _same(restored, state)
        assert _same(_go_on(restored, number), states[-1]), f"resumed before step {number}"


def test_a_train_state_resumes_from_its_file_at_any_step(tmp_path):
    page = _example("Flax")
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
        assert _same(state, states[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_skipped_step_of_a_train_state_moves_its_step_and_its_scaler_only():
    page = _example("Flax")
    before = _huge_scale(page["state"])
    after, _ = page["train_step"](before, jnp.ones((4, 8), jnp.float16), jnp.zeros((4, 1)))
    assert_step_is_noop((before.params, before.opt_state.inner_state), (after.params, after.opt_state.inner_state))
    assert int(after.step) == int(before.step) + 1
    assert jmpscale.get_scaler(after).loss_scale == 2.0**21


def test_the_skipped_steps_of_the_guides_loop_move_the_scaler_only(states):
    skips = 0
    for before, after in itertools.pairwise(state["functional"] for state in states):
        if after["scaler"].skipped > before["scaler"].skipped:
            skips += 1
            assert_step_is_noop({**before, "scaler": None}, {**after, "scaler": None})
    assert skips


@pytest.mark.parametrize("stops", [(4,), (7, 13), (2, 3, 9)])
def test_the_loop_of_the_guide_resumes_wherever_it_was_stopped(stops, tmp_path):
    train = _example("Orbax")["train"]
    for stop in stops:
        train(tmp_path / "stopped", stop)
    assert _same(train(tmp_path / "stopped", 16), train(tmp_path / "whole", 16))
    assert _same(train(tmp_path / "whole", 16), train(tmp_path / "again", 16))


# A process that is killed

CHILD = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(100, exit=True)  # never hang
sys.path.insert(0, sys.argv[1])
import pages
definitions, _ = pages.examples("guides/checkpoints")["Orbax"].split("folder = ")
exec(definitions, page := {})

def make_batch(step):
    print(step, flush=True)
    if step == 8:
        sys.stdin.readline()  # until killed
    return page["make_batch"](step)

if sys.argv[3] == "while saving":
    for name in ("rename", "replace"):
        def and_die(source, target, *args, rename=getattr(os, name), **kwargs):
            if os.path.basename(target) == "6":
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(source, target, *args, **kwargs)
        setattr(os, name, and_die)
page["train"](sys.argv[2], 14, make_batch)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folders of two runs that were killed, side by side, since each takes seconds to start."""
    folders = {when: tmp_path_factory.mktemp("killed") / "run" for when in ("between two steps", "while saving")}
    children = {
        when: subprocess.Popen(
            [sys.executable, "-c", CHILD, str(HERE), folder, when],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for when, folder in folders.items()
    }
    try:
        for when, child in children.items():
            for line in child.stdout:
                if line == "8\n" and when == "between two steps":
                    child.kill()
            _, errors = child.communicate(timeout=120)
            assert child.returncode == -signal.SIGKILL, errors
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return folders


@pytest.mark.parametrize("when", ["between two steps", "while saving"])
def test_a_killed_run_resumes_as_though_it_had_never_stopped(when, killed, tmp_path):
    train = _example("Orbax")["train"]
    whole = train(tmp_path / "whole", 14)
    with ocp.CheckpointManager(killed[when]) as manager:
        steps = manager.all_steps()
    assert steps in ([3], [3, 6]) if when == "between two steps" else steps == [3]
    seen = []

    def make_batch(step):
        seen.append(step)
        return _example("Orbax")["make_batch"](step)

    assert _same(train(killed[when], 14, make_batch), whole)
    assert seen[0] == max(steps)


# Sharded, without a template, from a run without a scaler, inside NNX


def _huge_scale(tree):
    scaler = jmpscale.get_scaler(tree)
    return jmpscale.replace_scaler(tree, scaler._replace(loss_scale=jnp.full_like(scaler.loss_scale, 2.0**22)))


def test_a_sharded_run_resumes_on_its_mesh_with_equal_bits_and_one_compilation(tmp_path):
    page = _example("Orbax, sharded")
    mesh, step = page["mesh"], page["train_step"]
    state = _huge_scale(page["state"])
    with jax.set_mesh(mesh):
        state, _ = step(state, page["x"])  # skipped
        restored = _orbax(tmp_path, state, page["start"](mesh))
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert a.sharding == b.sharding
        for _ in range(12):
            # One after the other: simulated devices can wait for each other for ever in two programs at a time.
            state, _ = jax.block_until_ready(step(state, page["x"]))
            restored, _ = jax.block_until_ready(step(restored, page["x"]))
    assert step._cache_size() == 1
    assert _same(restored, state)
    scaler = jmpscale.get_scaler(state)
    assert 1 < int(scaler.skipped) < 9
    assert state["params"]["w"].sharding.spec[1] == "model"
    assert_replicated(jmpscale.get_scaler(restored))


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_sharded_checkpoint_is_restored_on_another_mesh(devices, tmp_path):
    page = _example("Orbax, sharded")
    mesh = page["make_mesh"](jax.devices()[-devices:])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), page["start"](mesh))
    for template in (page["start"](mesh), abstract):
        (folder := tmp_path / str(template is abstract)).mkdir()
        restored = _orbax(folder, page["state"], template)
        assert _same(restored, page["state"])
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
            assert a.sharding == b.sharding
        assert len(restored["params"]["w"].sharding.device_set) == devices


def test_a_skipped_sharded_step_moves_the_scaler_only():
    page = _example("Orbax, sharded")
    before = _huge_scale(page["state"])
    with jax.set_mesh(page["mesh"]):
        after, _ = page["train_step"](before, page["x"])
    assert_step_is_noop(
        (before["params"], before["opt_state"].inner_state), (after["params"], after["opt_state"].inner_state)
    )
    assert jmpscale.get_scaler(after).loss_scale == 2.0**21


def test_without_a_template_the_scaler_is_rebuilt_field_by_field(tmp_path):
    page = _example("Orbax, no template")
    scaler = jmpscale.dynamic(1024.0, growth_interval=7, hysteresis=2)
    for finite in (True, False, True, False, False, True):
        scaler = jmpscale.update(scaler, finite)
    page["save"](tmp_path, 3, {"params": {"w": jnp.arange(3.0)}, "scaler": scaler})
    state = page["load"](tmp_path, 3, scaler.config)
    assert _same(state["scaler"], scaler)
    for _ in range(7):
        scaler, state["scaler"] = (jmpscale.update(s, True) for s in (scaler, state["scaler"]))
    assert _same(state["scaler"], scaler)


def _of_another_layout(*without, **with_):
    """A scaler as a dictionary, which is how it lies in a checkpoint, of another version's or library's layout."""
    fields = {**jmpscale.dynamic(8.0)._asdict(), "config": None, **with_}
    return {name: value for name, value in fields.items() if name not in without}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (_of_another_layout("last_skip"), "missing 1 required positional argument: 'last_skip'"),
        (_of_another_layout(scale=jnp.float32(1)), "unexpected keyword argument 'scale'"),
        (_of_another_layout(*jmpscale.ScalerState._fields, nothing=jnp.int32(0)), "argument 'nothing'"),
    ],
)
def test_without_a_template_a_missing_or_foreign_field_is_refused(saved, message, tmp_path):
    page = _example("Orbax, no template")
    page["save"](tmp_path, 1, {"scaler": saved})
    with pytest.raises(TypeError, match=message):
        page["load"](tmp_path, 1, jmpscale.ScalerConfig())


def test_a_run_without_a_scaler_goes_on_with_one(tmp_path):
    page = _example("Orbax, from a run without jmpscale")
    adam, params = page["adam"], {"w": jnp.full((8, 1), 0.5)}
    tx = jmpscale.with_loss_scaling(adam)
    grads, opt_state = {"w": jnp.full((8, 1), 0.25)}, adam.init(params)
    _, opt_state = adam.update(grads, opt_state, params)
    restored = {"params": params, "opt_state": _orbax(tmp_path, opt_state, adam.init(params))}
    assert _same(page["functional"](restored)["opt_state"], opt_state)
    ours = page["inside_optax"](restored, tx)["opt_state"]
    expected, _ = adam.update({"w": -grads["w"]}, opt_state, params)
    updates, ours = tx.update({"w": -grads["w"] * 2.0**16}, ours, params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert abs(updates["w"]).max() < 0.001, "the first moments were there: they cancel"
    assert int(jmpscale.get_scaler(ours).good_steps) == 1


def test_nnx_model_and_optimizer_resume_at_any_step(tmp_path):
    page = _example("Flax NNX")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)) * 4, jnp.float32)
    run, arrays = page["start"](seed=0), []
    for number in range(9):
        arrays.append(jax.tree.map(jnp.copy, nnx.state(run)))
        if number < 8:
            page["train_step"](*run, x)
    scaler = jmpscale.get_scaler(run[1].opt_state)
    assert 0 < int(scaler.skipped) < 8
    for number in range(0, 9, 2):
        (folder := tmp_path / str(number)).mkdir()
        again = page["start"](seed=7)
        nnx.update(again, _orbax(folder, arrays[number], nnx.state(again)))
        for _ in range(number, 8):
            page["train_step"](*again, x)
        assert _same(nnx.state(again), nnx.state(run))


def test_a_skipped_step_of_nnx_moves_its_step_and_its_scaler_only():
    page = _example("Flax NNX")
    model, optimizer = page["start"](seed=0)
    optimizer.opt_state = _huge_scale(optimizer.opt_state)
    parts = nnx.state(model), nnx.state(optimizer.opt_state.inner_state)
    before = jax.tree.map(jnp.copy, parts)
    assert len(jax.tree.leaves(before)) == 2 + 5
    page["train_step"](model, optimizer, page["x"])
    assert_step_is_noop(before, (nnx.state(model), nnx.state(optimizer.opt_state.inner_state)))
    assert int(optimizer.step[...]) == 1
    assert jmpscale.get_scaler(optimizer.opt_state).loss_scale == 2.0**21


# Whose settings count


RESTORED = {
    "orbax": _orbax,
    "msgpack": FORMATS["msgpack"],
    "state dict": FORMATS["state dict"],
    "orbax, no template": lambda folder, state, template: (
        _example("Orbax, no template")["save"](folder, 1, {"scaler": state}),
        _example("Orbax, no template")["load"](folder, 1, template.config)["scaler"],
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


def test_the_settings_of_an_nnx_optimizer_are_those_of_the_restoring_program(tmp_path):
    page = _example("Flax NNX")
    eager = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(growth_interval=1))
    saved, again = page["start"](seed=0), page["start"](seed=0, tx=eager)
    nnx.update(again, _orbax(tmp_path, nnx.state(saved), nnx.state(again)))
    page["train_step"](*again, jnp.ones((4, 8)) * 1e-3)
    assert jmpscale.get_scaler(again[1].opt_state).loss_scale == 2.0**16


def test_a_pickle_brings_its_own_settings_until_they_are_replaced():
    page = _example("Pickle")
    assert page["saved"].config.growth_interval == 2000
    assert page["scaler"].config.growth_interval == 100
    assert page["scaler"].loss_scale == page["saved"].loss_scale == 512.0


def test_an_exported_step_repeats_the_original_with_its_own_settings():
    page = _example("jax.export")
    rng = np.random.default_rng(0)
    params = {"w": jnp.ones((8, 1))}
    state = (params, page["tx"].init(params))
    leaves, step, scales = jax.tree.leaves(state), jax.jit(page["train_step"]), []
    for _ in range(12):
        x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float16)
        state, leaves = step(*state, x), page["program"].call(leaves, x)
        assert _same(leaves, jax.tree.leaves(state))
        scales.append(float(jmpscale.get_scaler(state).loss_scale))
    assert set(np.sign(np.diff(scales))) == {-1, 0, 1}, "it backs off, stays and grows"
    with pytest.raises(ValueError, match="structure"):
        page["program"].call(leaves[1:], x)


# Older, empty and foreign checkpoints


WRONG = {
    "a field too few": ({"scaler": _of_another_layout("last_skip")}, "last_skip"),
    "a field too many": ({"scaler": _of_another_layout(grown=jnp.float32(1))}, "grown"),
    "another library's": ({"scaler": {"fin_steps": jnp.int32(0), "scale": jnp.float32(8.0)}}, "fin_steps"),
    "no scaler": ({"params": {"w": jnp.ones(3)}}, "scaler"),
    "an empty scaler": ({"scaler": {}}, "scaler"),
}


@pytest.mark.parametrize("name", WRONG)
def test_orbax_names_what_is_wrong_and_restores_nothing(name, tmp_path):
    saved, message = WRONG[name]
    template = {"params": {"w": jnp.zeros(3)}, "scaler": jmpscale.dynamic(8.0)}
    with pytest.raises(ValueError, match=rf"do not match(.|\n)*{message}"):
        _orbax(tmp_path, {"params": {"w": jnp.ones(3)}, **saved}, template)


def test_orbax_refuses_an_empty_state(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        _orbax(tmp_path, {}, {"scaler": jmpscale.dynamic()})


@pytest.mark.parametrize("name", [name for name in WRONG if name != "no scaler"])
@pytest.mark.parametrize("where", ["alone", "in a train state"])
def test_flax_names_what_is_wrong_and_restores_nothing(name, where):
    page = _example("Flax")
    saved, message = WRONG[name][0]["scaler"], "field names of the state dict and the named tuple do not match"
    if where == "alone":
        template, state_dict = jmpscale.dynamic(), saved
    else:
        template, state_dict = page["state"], flax.serialization.to_state_dict(page["state"])
        state_dict = {**state_dict, "opt_state": {**state_dict["opt_state"], "scaler": saved}}
        message += ".*opt_state/scaler"
    for restore in (
        lambda: flax.serialization.from_state_dict(template, state_dict),
        lambda: flax.serialization.from_bytes(template, flax.serialization.msgpack_serialize(state_dict)),
    ):
        with pytest.raises(ValueError, match=message):
            restore()


def test_a_train_state_of_the_bare_optimizer_is_refused():
    page = _example("Flax")
    bare = TrainState.create(apply_fn=page["apply_fn"], params=page["state"].params, tx=optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"do not match.*opt_state"):
        flax.serialization.from_bytes(page["state"], flax.serialization.to_bytes(bare))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("good_steps", np.float32(3.7), r"good_steps is float32\(\)"),
        ("loss_scale", np.ones(2, np.float32), r"loss_scale is float32\(2,\)"),
    ],
)
def test_a_file_of_wrong_shapes_or_dtypes_passes_flax_and_is_refused_by_the_guide(field, value, message, tmp_path):
    page = _example("Flax")
    scaler = jmpscale.get_scaler(page["state"])._replace(**{field: value})
    page["save"](tmp_path / "state", page["state"].replace(opt_state=page["state"].opt_state._replace(scaler=scaler)))
    flax.serialization.from_bytes(page["state"], (tmp_path / "state").read_bytes()[32:])
    with pytest.raises(ValueError, match=message):
        page["load"](tmp_path / "state", page["state"])


# Truncated files, flipped bits, a full disk


def test_a_file_cut_anywhere_or_with_any_bit_flipped_is_refused(tmp_path):
    page = _example("Flax")
    path, template = tmp_path / "state", page["state"]
    page["save"](path, template)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"state is damaged: {length} bytes"):
            page["load"](path, template)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="state is damaged"):
            page["load"](path, template)
    path.write_bytes(whole)
    assert _same(page["load"](path, template), template)


def test_flax_alone_does_not_notice_a_flipped_bit():
    page = _example("Flax")
    data = bytearray(flax.serialization.to_bytes(page["state"]))
    place = data.index(np.asarray(page["state"].params["w"]).tobytes())
    data[place] ^= 1
    assert not _same(flax.serialization.from_bytes(page["state"], bytes(data)), page["state"])


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    page = _example("Flax")
    page["save"](tmp_path / "state", page["state"])

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        page["save"](tmp_path / "state", page["state"].replace(step=99))
    assert _same(page["load"](tmp_path / "state", page["state"]), page["state"])


@pytest.fixture
def damaged(tmp_path):
    """A manager with one checkpoint made with checksums, its state, and its files from small to large."""
    rng = np.random.default_rng(0)
    w = {"w": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), "half": jnp.ones(3, jnp.float16)}
    state = {"params": w, "opt_state": TX.init(w), "done": jnp.array([True, False])}
    manager = ocp.CheckpointManager(tmp_path)
    _example("Damage")["save"](manager, 1, state)
    manager.wait_until_finished()
    files = sorted((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    yield manager, state, files
    manager.close()


def test_a_flipped_bit_passes_orbax_and_is_refused_by_the_checksums(damaged):
    manager, state, files = damaged
    template = jax.tree.map(jnp.zeros_like, state)
    load = _example("Damage")["load"]
    assert _same(load(manager, 1, template), state)
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 16
    files[-1].write_bytes(data)
    like = {"state": template, "checksums": _example("Damage")["checksums"](template)}
    alone = manager.restore(1, args=ocp.args.StandardRestore(like))["state"]
    assert not _same(alone, state)
    with pytest.raises(ValueError, match=r"checkpoint 1 is damaged at \['(params|opt_state)'\]"):
        load(manager, 1, template)


def test_the_checksums_notice_every_single_bit():
    checksums = _example("Damage")["checksums"]
    for x in [jnp.asarray([[1.5, 0.0, 3.0]], dtype) for dtype in (jnp.float32, jnp.float16, jnp.uint8)]:
        size = x.dtype.itemsize
        flipped = []
        for bit in range(8 * x.size * size):
            data = bytearray(np.asarray(x).tobytes())
            data[bit // 8] ^= 1 << bit % 8
            flipped.append(np.frombuffer(data, x.dtype).reshape(x.shape))
        sums = jax.vmap(lambda x: checksums([x]))(jnp.asarray(np.stack(flipped)))
        assert len(flipped) == 24 * size
        assert (sums != checksums([x])[None]).all()
    assert checksums([jnp.array(True), jnp.array(False), jnp.float32(1.0)]).tolist() == [1, 0, 0x3F800000]


@pytest.mark.usefixtures("x64")
def test_the_checksums_notice_every_single_bit_of_64():
    checksums = _example("Damage")["checksums"]
    for x in (np.float64(1.5), np.int64(-3), np.complex64(1 - 2j)):
        for bit in range(64):
            data = bytearray(x.tobytes())
            data[bit // 8] ^= 1 << bit % 8
            assert checksums([jnp.asarray(np.frombuffer(data, x.dtype)[0])]) != checksums([jnp.asarray(x)])


def test_the_checksums_notice_a_dtype_that_orbax_converted(tmp_path):
    page = _example("Damage")
    scaler = jmpscale.dynamic()
    with ocp.CheckpointManager(tmp_path) as manager:
        page["save"](manager, 1, scaler._replace(good_steps=jnp.float32(3.7)))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"damaged at \.good_steps: restore"):
            page["load"](manager, 1, scaler)


TRUNCATE = """
import logging, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, jmpscale, numpy as np, orbax.checkpoint as ocp, pages
logging.disable()
page, folder = pages.run("guides/checkpoints", "Damage"), pathlib.Path(sys.argv[2])
w = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
state = {"params": w, "scaler": jmpscale.dynamic()}
batch = {"params": w, "scaler": jax.tree.map(lambda x: jnp.stack([x, x]), jmpscale.dynamic())}

def attempt(what, template):
    try:
        page["load"](manager, 1, template)
        print(what, "restored", flush=True)
    except Exception as error:
        print(what, "raised", type(error).__name__, str(error).splitlines()[0][:100], flush=True)

with ocp.CheckpointManager(folder) as manager:
    page["save"](manager, 1, state)
    manager.wait_until_finished()
    files = [path for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (len(path.parts), path.name))
    metadata = next(path for path in files if path.name == "_METADATA")
    manifest = next(path for path in files if path.name == "manifest.ocdbt")
    largest = max(files, key=lambda path: path.stat().st_size)
    for path in (metadata, manifest, largest):
        whole = path.read_bytes()
        for length in (0, len(whole) // 2):
            path.write_bytes(whole[:length])
            attempt(f"{path.name}, {length} bytes:", state)
        path.write_bytes(whole)
    attempt("batch:", batch)
    attempt("whole:", state)
    os._exit(0)  # past the reads that Orbax has begun and left behind
"""


def test_orbax_raises_on_a_truncated_checkpoint_and_on_one_scaler_for_a_batch(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATE, HERE, tmp_path], capture_output=True, text=True, timeout=120, check=True
    )
    lines = ended.stdout.splitlines()
    assert sum("bytes: raised" in line for line in lines) == 6, ended.stdout
    assert any(line.startswith("batch: raised ValueError Requested shape: (2,) is not compatible") for line in lines)
    assert lines[-1] == "whole: restored"


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
    assert (float(scaler.loss_scale), int(scaler.good_steps), int(scaler.hysteresis_left)) == (2.0**13, 2, 1)
    return scaler


def test_a_scale_set_by_hand_counts_from_there_and_compiles_nothing(used):
    compiled = _update._cache_size()
    scaler = _example("By hand")["set_scale"](used, 256.0)
    assert (float(scaler.loss_scale), int(scaler.good_steps)) == (256.0, 0)
    assert scaler._replace(loss_scale=used.loss_scale, good_steps=used.good_steps) == used
    _hard_times(scaler, used.config)
    assert _update._cache_size() == compiled


@pytest.mark.parametrize(
    ("settings", "loss_scale", "left"),
    [
        ({"growth_interval": 2, "growth_factor": 4.0}, 2.0**13, 1),
        ({"max_scale": 2.0**10}, 2.0**10, 1),
        ({"min_scale": 2.0**20, "refill": "finite"}, 2.0**20, 1),
        ({"hysteresis": 1, "backoff_factor": 0.25}, 2.0**13, 1),
    ],
)
def test_a_setting_changed_in_the_middle_of_a_run_counts_from_there(settings, loss_scale, left, used):
    compiled = _update._cache_size()
    scaler = _example("By hand")["change"](used, **settings)
    assert (float(scaler.loss_scale), int(scaler.hysteresis_left)) == (loss_scale, left)
    assert int(scaler.good_steps) == 2
    assert all(getattr(scaler.config, name) == value for name, value in settings.items())
    after = _hard_times(scaler, scaler.config)
    assert after.config.min_scale <= float(after.loss_scale) <= after.config.max_scale
    assert _update._cache_size() == compiled + 1


def test_a_hysteresis_made_smaller_does_not_keep_the_old_ones_patience():
    scaler = _example("By hand")["change"](jmpscale.dynamic(hysteresis=3), hysteresis=1)
    assert _update(scaler, jnp.array(False)).loss_scale == 2.0**15


def test_a_restored_scaler_is_brought_within_the_restoring_programs_limits(used):
    template = jmpscale.dynamic(2.0**8, max_scale=2.0**10, growth_interval=3)
    restored = flax.serialization.from_bytes(template, flax.serialization.to_bytes(used))
    scaler = _example("By hand")["change"](restored)
    assert scaler.config == template.config
    assert (float(scaler.loss_scale), int(scaler.hysteresis_left)) == (2.0**10, 1)
    _hard_times(scaler, template.config)


def test_a_changed_setting_is_checked(used):
    change = _example("By hand")["change"]
    with pytest.raises(ValueError, match="growth_interval must be between 1 and"):
        change(used, growth_interval=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'interval'"):
        change(used, interval=5)


def test_a_reset_scaler_equals_a_new_one_and_compiles_nothing(used):
    compiled = _update._cache_size()
    scaler = _example("By hand")["reset"](used, 2.0**12)
    assert _same(scaler, jmpscale.dynamic(2.0**12, growth_interval=3, hysteresis=3))
    _hard_times(scaler, used.config)
    assert _update._cache_size() == compiled


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [("set_scale", {"loss_scale": 64.0}), ("reset", {}), ("change", {"growth_interval": 4})],
)
def test_the_recipes_keep_a_scaler_where_it_was_on_a_mesh(recipe, arguments):
    page, by_hand = _example("Orbax, sharded"), _example("By hand")[recipe]
    state = page["start"](page["mesh"])
    old = jmpscale.get_scaler(state)
    new = by_hand(old, **arguments)
    assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(old)]
    compiled = page["train_step"]._cache_size()
    with jax.set_mesh(page["mesh"]):
        state, _ = page["train_step"](jmpscale.replace_scaler(state, new), page["x"])
    assert page["train_step"]._cache_size() == compiled
    assert jmpscale.get_scaler(state).loss_scale == new.loss_scale


@pytest.mark.parametrize("kind", ["chain", "TrainState", "nnx.Optimizer"])
def test_a_new_scaler_takes_the_old_ones_place(kind, used):
    if kind == "chain":
        tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-2)))
        state, params = tx.init(jnp.ones(3)), jnp.ones(3)
        state = jmpscale.replace_scaler(state, used)
        scaler = jmpscale.get_scaler(tx.update(jnp.ones(3), state, params)[1])
    elif kind == "TrainState":
        page = _example("Flax")
        state = jmpscale.replace_scaler(page["state"], used)
        state, _ = page["train_step"](state, jnp.ones((4, 8), jnp.float16), jnp.zeros((4, 1)))
        scaler = jmpscale.get_scaler(state)
    else:
        page = _example("Flax NNX")
        model, optimizer = page["start"](seed=0)
        optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, used)
        page["train_step"](model, optimizer, jnp.ones((4, 8)) * 1e-3)
        scaler = jmpscale.get_scaler(optimizer.opt_state)
    assert _same(scaler, _update(used, jnp.array(True)))


# PyTorch


@pytest.mark.parametrize("name", TORCH["runs"])
def test_a_checkpoint_of_torch_goes_on_with_the_scales_that_torch_had(name):
    run = TORCH["runs"][name]
    scaler, scales = jmpscale.from_torch_state_dict(run["state_dict"]), []
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict"]
    for found_inf in run["found_inf"]:
        scaler = _update(scaler, jnp.array(not found_inf))
        scales.append(float(scaler.loss_scale))
    assert len(scales) == 100
    assert scales == run["scales"]
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict_after"]


def test_what_torch_recorded_covers_growth_backoff_and_odd_factors():
    ups, downs = 0, 0
    for run in TORCH["runs"].values():
        signs = np.sign(np.diff([run["state_dict"]["scale"], *run["scales"]])).tolist()
        ups, downs = ups + (1 in signs), downs + (-1 in signs)
    assert (ups, downs) == (6, 6)
    assert {run["state_dict"]["growth_factor"] for run in TORCH["runs"].values()} == {2.0, 1.5, 4.0, 1.25}


def test_a_state_dict_of_torch_survives_the_other_formats_on_its_way(tmp_path):
    run = TORCH["runs"]["growth 1.5, backoff 0.75"]
    scaler = jmpscale.from_torch_state_dict(run["state_dict"])
    for found_inf in run["found_inf"][:50]:
        scaler = _update(scaler, jnp.array(not found_inf))
    scaler = _orbax(tmp_path, scaler, jmpscale.from_torch_state_dict(run["state_dict"]))
    for found_inf in run["found_inf"][50:]:
        scaler = _update(scaler, jnp.array(not found_inf))
    assert jmpscale.to_torch_state_dict(scaler) == run["state_dict_after"]


def test_the_dictionary_of_a_disabled_torch_scaler_is_refused():
    assert TORCH["disabled"] == {}
    with pytest.raises(ValueError, match="saved by a disabled scaler"):
        jmpscale.from_torch_state_dict(TORCH["disabled"])


def test_an_interval_lowered_below_the_count_is_where_torch_differs():
    run = TORCH["lowered_interval"]
    tracker, interval = run["state_dict"]["_growth_tracker"], run["state_dict"]["growth_interval"]
    assert tracker >= interval
    before_the_overflow = run["found_inf"].index(1)
    assert set(run["scales"][:before_the_overflow]) == {run["state_dict"]["scale"]}
    scaler = jmpscale.update(jmpscale.from_torch_state_dict(run["state_dict"]), True)
    assert scaler.loss_scale == 2 * run["state_dict"]["scale"]


@pytest.fixture
def recorder():
    """The script that has recorded torch, with torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    spec = importlib.util.spec_from_file_location("recorder", HERE / "data" / "record_torch_state_dicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = torch
    return module


@pytest.mark.parametrize("name", TORCH["runs"])
def test_torch_still_does_what_it_did_when_it_was_recorded(name, recorder):
    seed = list(recorder.RUNS).index(name)
    assert recorder.record(*recorder.RUNS[name], seed) == TORCH["runs"][name]


@pytest.mark.parametrize("name", TORCH["runs"])
def test_torch_goes_on_with_a_checkpoint_of_ours(name, recorder):
    run = TORCH["runs"][name]
    settings = {name: run["state_dict"][name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    scaler = jmpscale.dynamic(2.0**10, **settings, min_scale=2.0**-126, max_scale=2.0**126)
    for found_inf in run["found_inf"][:13]:
        scaler = _update(scaler, jnp.array(not found_inf))
    theirs = recorder.torch.amp.GradScaler("cpu")
    theirs.load_state_dict(jmpscale.to_torch_state_dict(scaler))
    assert theirs.state_dict() == jmpscale.to_torch_state_dict(scaler)
    scales = []
    for found_inf in run["found_inf"]:
        scaler = _update(scaler, jnp.array(not found_inf))
        scales.append(float(scaler.loss_scale))
    assert recorder.follow(theirs, run["found_inf"]) == scales
    assert theirs.state_dict() == jmpscale.to_torch_state_dict(scaler)


def test_torchs_disabled_scaler_saves_nothing_and_takes_anything(recorder):
    disabled = recorder.torch.amp.GradScaler("cpu", enabled=False)
    assert disabled.state_dict() == TORCH["disabled"]
    disabled.load_state_dict(jmpscale.to_torch_state_dict(jmpscale.dynamic()))
    assert disabled.state_dict() == {}


# Trust


@pytest.fixture(scope="module")
def unpickled():
    """The classes and functions that Python has unpickled last."""
    names = collections.deque(maxlen=100)
    sys.addaudithook(lambda event, args: names.append(args) if event == "pickle.find_class" else None)
    return names


def test_loading_never_unpickles(unpickled, tmp_path):
    data = pickle.dumps(jmpscale.dynamic())
    unpickled.clear()
    pickle.loads(data)
    assert ("jmpscale._state", "ScalerState") in unpickled, "the watch can see one"
    page, scaler = _example("Flax"), jmpscale.dynamic(8.0)
    program = jax.export.export(jax.jit(lambda s: jmpscale.update(s, jnp.array(True))))(scaler).serialize()
    page["save"](tmp_path / "file", page["state"])
    _example("Orbax, no template")["save"](tmp_path / "orbax", 1, {"scaler": scaler})
    unpickled.clear()
    page["load"](tmp_path / "file", page["state"])
    _orbax(tmp_path, {"scaler": scaler}, {"scaler": scaler})
    _example("Orbax, no template")["load"](tmp_path / "orbax", 1, scaler.config)
    jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(scaler))
    jax.export.deserialize(program).call(scaler)
    assert not unpickled
