"""Older, foreign, truncated and damaged checkpoints: a clear error, or one value changed, and never an unpickling."""

import collections
import errno
import json
import os
import pathlib
import pickle
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
from flax.training.train_state import TrainState

import jmpscale

from checkpointing import example, of_another_layout, orbax, same

pytestmark = pytest.mark.usefixtures("standard_promotion")
HERE = pathlib.Path(__file__).parent
TX = jmpscale.with_loss_scaling(optax.adamw(1e-2))


# Older, empty and foreign checkpoints


WRONG = {
    "a field too few": ({"scaler": of_another_layout("last_skip")}, "last_skip"),
    "a field too many": ({"scaler": of_another_layout(grown=jnp.float32(1))}, "grown"),
    "another library's": ({"scaler": {"fin_steps": jnp.int32(0), "scale": jnp.float32(8.0)}}, "fin_steps"),
    "no scaler": ({"params": {"w": jnp.ones(3)}}, "scaler"),
    "an empty scaler": ({"scaler": {}}, "scaler"),
}


@pytest.mark.parametrize("name", WRONG)
def test_orbax_names_what_is_wrong_and_restores_nothing(name, tmp_path):
    saved, message = WRONG[name]
    template = {"params": {"w": jnp.zeros(3)}, "scaler": jmpscale.dynamic(8.0)}
    with pytest.raises(ValueError, match=rf"do not match(.|\n)*{message}"):
        orbax(tmp_path, {"params": {"w": jnp.ones(3)}, **saved}, template)


def test_orbax_refuses_an_empty_state(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        orbax(tmp_path, {}, {"scaler": jmpscale.dynamic()})


@pytest.mark.parametrize("name", [name for name in WRONG if name != "no scaler"])
@pytest.mark.parametrize("where", ["alone", "in a train state"])
def test_flax_names_what_is_wrong_and_restores_nothing(name, where):
    page = example("Flax")
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
    page = example("Flax")
    bare = TrainState.create(apply_fn=page["apply_fn"], params=page["state"].params, tx=optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"do not match.*opt_state"):
        flax.serialization.from_bytes(page["state"], flax.serialization.to_bytes(bare))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("finite_steps", np.float32(3.7), r"finite_steps is float32\(\)"),
        ("loss_scale", np.ones(2, np.float32), r"loss_scale is float32\(2,\)"),
    ],
)
def test_a_file_of_wrong_shapes_or_dtypes_passes_flax_and_is_refused_by_the_guide(field, value, message, tmp_path):
    page = example("Flax")
    scaler = jmpscale.get_scaler(page["state"])._replace(**{field: value})
    page["save"](tmp_path / "state", page["state"].replace(opt_state=page["state"].opt_state._replace(scaler=scaler)))
    flax.serialization.from_bytes(page["state"], (tmp_path / "state").read_bytes()[32:])
    with pytest.raises(ValueError, match=message):
        page["load"](tmp_path / "state", page["state"])


# Truncated files, flipped bits, a full disk


def test_a_file_cut_anywhere_or_with_any_bit_flipped_is_refused(tmp_path):
    page = example("Flax")
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
    assert same(page["load"](path, template), template)


def test_flax_alone_does_not_notice_a_flipped_bit():
    page = example("Flax")
    data = bytearray(flax.serialization.to_bytes(page["state"]))
    place = data.index(np.asarray(page["state"].params["w"]).tobytes())
    data[place] ^= 1
    assert not same(flax.serialization.from_bytes(page["state"], bytes(data)), page["state"])


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    page = example("Flax")
    page["save"](tmp_path / "state", page["state"])

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        page["save"](tmp_path / "state", page["state"].replace(step=99))
    assert same(page["load"](tmp_path / "state", page["state"]), page["state"])


@pytest.fixture
def damaged(tmp_path):
    """A manager with one checkpoint made with checksums, its state, and its files from small to large."""
    rng = np.random.default_rng(0)
    w = {"w": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), "half": jnp.ones(3, jnp.float16)}
    state = {"params": w, "opt_state": TX.init(w), "done": jnp.array([True, False])}
    manager = ocp.CheckpointManager(tmp_path)
    example("Damage")["save"](manager, 1, state)
    manager.wait_until_finished()
    files = sorted((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    yield manager, state, files
    manager.close()


def test_a_flipped_bit_passes_orbax_and_is_refused_by_the_checksums(damaged):
    manager, state, files = damaged
    template = jax.tree.map(jnp.zeros_like, state)
    load = example("Damage")["load"]
    assert same(load(manager, 1, template), state)
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 16
    files[-1].write_bytes(data)
    like = {"state": template, "checksums": example("Damage")["checksums"](template)}
    alone = manager.restore(1, args=ocp.args.StandardRestore(like))["state"]
    assert not same(alone, state)
    with pytest.raises(ValueError, match=r"checkpoint 1 is damaged at \['(params|opt_state)'\]"):
        load(manager, 1, template)


def test_the_checksums_notice_every_single_bit():
    checksums = example("Damage")["checksums"]
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
    checksums = example("Damage")["checksums"]
    for x in (np.float64(1.5), np.int64(-3), np.complex64(1 - 2j)):
        for bit in range(64):
            data = bytearray(x.tobytes())
            data[bit // 8] ^= 1 << bit % 8
            assert checksums([jnp.asarray(np.frombuffer(data, x.dtype)[0])]) != checksums([jnp.asarray(x)])


def test_the_checksums_notice_a_dtype_that_orbax_converted(tmp_path):
    page = example("Damage")
    scaler = jmpscale.dynamic()
    with ocp.CheckpointManager(tmp_path) as manager:
        page["save"](manager, 1, scaler._replace(finite_steps=jnp.float32(3.7)))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"damaged at \.finite_steps: restore"):
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


@pytest.mark.full
def test_orbax_raises_on_a_truncated_checkpoint_and_on_one_scaler_for_a_batch(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATE, HERE, tmp_path], capture_output=True, text=True, timeout=120, check=True
    )
    lines = ended.stdout.splitlines()
    assert sum("bytes: raised" in line for line in lines) == 6, ended.stdout
    assert any(line.startswith("batch: raised ValueError Requested shape: (2,) is not compatible") for line in lines)
    assert lines[-1] == "whole: restored"


# The formats themselves; with the guide's checksums nothing at all gets through


def _flips(data):
    """Yields the data with each of its bits flipped, one at a time."""
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)


def _types(state):
    return [(np.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def scaler():
    """A scaler that has seen something, so that no two of its fields are alike by chance."""
    state = jmpscale.dynamic(2.0**12, growth_interval=3, hysteresis=2)
    for finite in (True, False, True, True, False, False, True):
        state = jmpscale.update(state, finite)
    return state


def test_flax_raises_on_every_truncated_scaler(scaler):
    whole = flax.serialization.to_bytes(scaler)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            flax.serialization.from_bytes(scaler, whole[:length])


def test_a_flipped_bit_that_flax_lets_through_changes_one_value_or_is_refused_when_used(scaler):
    whole = flax.serialization.to_bytes(scaler)
    values = refused = 0
    for flipped in _flips(whole):
        try:
            restored = flax.serialization.from_bytes(scaler, flipped)
        except Exception:  # what msgpack, numpy and Flax raise differs between versions
            continue
        assert restored.config == scaler.config
        differing = [not np.array_equal(a, b) for a, b in zip(restored[:6], scaler[:6], strict=True)]
        assert sum(differing) <= 1
        if _types(restored) == _types(scaler):
            values += any(differing)
        else:
            refused += 1
            with pytest.raises((TypeError, ValueError), match=r"^state\."):
                jmpscale.scale(restored, jnp.float32(1.0))
    assert values == 6 * 32, "the format guards no value: each bit of the six passes"
    assert refused > 0


def test_no_flipped_bit_of_a_loss_scale_makes_a_wrong_step():
    """Whatever the scale has become, a step is right or it is skipped; the guide's checksums tell that it has."""
    scales = np.array([2.0**n for n in (0, 10, 16, 24, 32)], np.float32)
    flipped = (scales.view(np.uint32)[:, None] ^ (np.uint32(1) << np.arange(32, dtype=np.uint32))).view(np.float32)

    def loss_fn(w):
        return jnp.sum(jnp.square(w)) / 3

    def step(loss_scale):
        state = jmpscale.dynamic()._replace(loss_scale=loss_scale)
        _, grads = jmpscale.value_and_grad(loss_fn)(state, w)
        finite = jmpscale.all_finite(grads)
        return grads, finite, jmpscale.update(state, finite)

    w = jnp.asarray(np.random.default_rng(0).standard_normal(5), jnp.float32)
    grads, finite, after = jax.jit(jax.vmap(step))(flipped.ravel())
    right = np.broadcast_to(jax.grad(loss_fn)(w), grads.shape)
    np.testing.assert_allclose(grads[finite], right[finite], rtol=1e-6)
    assert 0.9 < finite.mean() < 1
    assert after.skipped.tolist() == (~finite).astype(int).tolist()


@pytest.mark.parametrize(("scale", "recovers"), [(0.0, True), (1e-45, True), (np.inf, False), (np.nan, False)])
def test_an_invalid_loss_scale_skips_until_it_recovers_or_the_run_is_stuck(scale, recovers):
    state = jmpscale.dynamic()._replace(loss_scale=jnp.float32(scale))
    finite = []
    for _ in range(4):
        _, grad = jmpscale.value_and_grad(jnp.square)(state, 3.0)
        finite.append(bool(jmpscale.all_finite(grad)))
        state = jmpscale.update(state, finite[-1])
    assert finite == ([False, True, True, True] if recovers else [False] * 4)
    if not recovers:
        with pytest.raises(FloatingPointError, match=rf"the loss scale is {scale:g}.*damaged.*[Rr]estore"):
            jmpscale.raise_if_stuck(state, max_consecutive_skips=3)


TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}


def test_a_damaged_state_dict_of_torch_is_refused_or_still_a_legal_one():
    whole = json.dumps(TORCH).encode()
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            jmpscale.from_torch_state_dict(json.loads(whole[:length]))
    legal = 0
    for flipped in _flips(whole):
        try:
            state = jmpscale.from_torch_state_dict(json.loads(flipped))
        except (ValueError, TypeError):
            continue
        legal += 1
        assert 2.0**-126 <= state.loss_scale <= 2.0**126
        assert state.finite_steps >= 0
        assert state.config.growth_factor > 1 > state.config.backoff_factor > 0
    assert 0 < legal < len(whole), "JSON has no checksum: a digit may become another digit"


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
    page, scaler = example("Flax"), jmpscale.dynamic(8.0)
    program = jax.export.export(jax.jit(lambda s: jmpscale.update(s, jnp.array(True))))(scaler).serialize()
    page["save"](tmp_path / "file", page["state"])
    example("Orbax, no template")["save"](tmp_path / "orbax", 1, {"scaler": scaler})
    unpickled.clear()
    page["load"](tmp_path / "file", page["state"])
    orbax(tmp_path, {"scaler": scaler}, {"scaler": scaler})
    example("Orbax, no template")["load"](tmp_path / "orbax", 1, scaler.config)
    jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(scaler))
    jax.export.deserialize(program).call(scaler)
    assert not unpickled
