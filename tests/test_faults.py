"""What goes wrong around a run: bad values anywhere, a killed process, a damaged checkpoint, a full disk, a signal."""

import contextlib
import errno
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop, inject

import pages

HERE = pathlib.Path(__file__).parent
DEVICES, STEPS = 8, 5
VALUES = [np.inf, -np.inf, np.nan]

# --- a bad value in one leaf, on one device, at one step ---

# Each device holds its part of every leaf, so that each leaf's gradient can be struck on one device alone.
RNG = np.random.default_rng(0)
PARAMS = {
    "dense": [RNG.standard_normal((16, 4)).astype(np.float32), RNG.standard_normal((8, 4)).astype(np.float32)],
    "bias": np.zeros(8, np.float32),
}
PATHS = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
BATCHES = RNG.standard_normal((STEPS, DEVICES, 2, 16)).astype(np.float32)
SGD = optax.sgd(0.1, momentum=0.9)


def _loss(params, x, whole):
    h = jnp.tanh(x @ whole(params["dense"][0])) @ whole(params["dense"][1]).T
    # In float32, where another power of two as the scale changes no bit of the gradients.
    return jnp.mean((h + jnp.broadcast_to(whole(params["bias"]), h.shape)) ** 2)


def _struck(grads, number, device, fault):
    for leaf, path in enumerate(PATHS):
        when = (fault["leaf"] == leaf) & (fault["step"] == number) & (fault["device"] == device)
        grads = inject(grads, fault["value"], path=path, when=when)
    return grads


def _functional(carry, number, x, device, whole, fault):
    params, opt_state, scaler = carry
    grads = jax.grad(lambda params: jmpscale.scale(scaler, _loss(params, x, whole)))(params)
    grads, finite = jmpscale.unscale_and_check(scaler, _struck(grads, number, device, fault))

    def step(params, opt_state):
        updates, opt_state = SGD.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return *jmpscale.apply_if(finite, step, params, opt_state), jmpscale.update(scaler, finite)


def _in_optax(carry, number, x, device, whole, fault):
    params, inner_state, scaler = carry
    grads = jax.grad(lambda params: jmpscale.scale(scaler, _loss(params, x, whole)))(params)
    tx = jmpscale.with_loss_scaling(SGD, scaler)
    opt_state = tx.init(params)._replace(scaler=scaler, inner_state=inner_state)
    updates, opt_state = tx.update(_struck(grads, number, device, fault), opt_state, params)
    return optax.apply_updates(params, updates), opt_state.inner_state, opt_state.scaler


def _specs(tree, *leading):
    return jax.tree.map(lambda x: P(*leading, "d") if jnp.ndim(x) else P(*leading), tree)


@functools.cache
def _run(route, sharded):
    """Makes `run(steps, fault) -> history`: the training state after each of the steps, of each device's own part."""

    def local(carry, numbers, batches, fault):
        device, whole = 0, lambda w: w
        if sharded:
            device, whole = jax.lax.axis_index("d"), lambda w: jax.lax.all_gather(w, "d", tiled=True)

        def step(carry, this):
            number, x = this
            carry = route(carry, number, x.reshape(-1, 16), device, whole, fault)
            return carry, carry

        return jax.lax.scan(step, carry, (numbers, batches))[1]

    start = PARAMS, SGD.init(PARAMS), jmpscale.dynamic(2.0**10)
    if sharded:
        mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
        specs = (_specs(start), P(), P(None, "d"), P())
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=_specs(start, None))
    program = jax.jit(local)

    def run(steps, leaf=-1, step=-1, device=-1, value=0.0):
        fault = {"leaf": leaf, "step": step, "device": device, "value": jnp.float32(value)}
        return jax.block_until_ready(program(start, jnp.array(steps), BATCHES[np.array(steps)], fault))

    return run


@pytest.mark.once
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("sharded", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize("route", [_functional, _in_optax], ids=["functional", "optax"])
def test_a_fault_at_any_leaf_device_and_step_is_as_if_that_step_had_never_been(route, sharded):
    run = _run(route, sharded)
    everything = list(range(STEPS))
    for step in everything:
        without = jax.device_get(run([number for number in everything if number != step]))
        for device in range(DEVICES if sharded else 1):
            for leaf in range(len(PATHS)):
                value = VALUES[(step + device + leaf) % 3]
                history = run(everything, leaf, step, device, value)
                *trained, scaler = history
                if device == leaf:
                    assert_replicated(scaler)
                *trained, scaler = jax.device_get(history)
                kept = jax.tree.map(lambda x, at=step: np.delete(x, at, axis=0), trained)
                assert_step_is_noop(list(without[:2]), kept)
                if step:
                    before, after = (jax.tree.map(lambda x, at=at: x[at], trained) for at in (step - 1, step))
                    assert_step_is_noop(before, after)
                assert scaler.skipped.tolist() == [int(number >= step) for number in everything]
                assert scaler.last_skip[-1] == 1
                assert scaler.loss_scale.tolist() == [2.0**9 if number >= step else 2.0**10 for number in everything]


# --- a process that is killed ---


def _batch(step):
    x = np.random.default_rng(step).standard_normal((4, 8)).astype(np.float16)
    return jnp.asarray(x), jnp.full((4, 1), 30.0)


def train_to_file(path, steps, at_step=lambda step: None):
    """Trains with the guide's functions for Flax, goes on from the file if there is one, and saves every third step."""
    page = pages.run("guides/checkpoints", "Flax")
    state = page["state"]
    if path.exists():
        state = page["load"](path, state)
    for step in range(int(state.step), steps):
        at_step(step)
        state, _ = page["train_step"](state, *_batch(step))
        if (step + 1) % 3 == 0:
            page["save"](path, state)
    return state


CHILD = """
import faulthandler, os, pathlib, signal, sys
faulthandler.dump_traceback_later(100, exit=True)  # never hang
sys.path.insert(0, sys.argv[1])
import test_faults

def and_die(file):
    os.ftruncate(file, os.fstat(file).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

def at_step(step):
    if step == 5:
        os.fsync = and_die  # the save after this step is the second

test_faults.train_to_file(pathlib.Path(sys.argv[2]), 12, at_step)
"""


def _start(*command, **options):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, **pipes | options)


def _end(process, timeout=100):
    """Waits for a process and returns what it wrote; leaves none behind, whatever happens."""
    try:
        return ("", "") if process.returncode is not None else process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_killed_while_it_saves_goes_on_from_its_msgpack_file_as_though_it_had_never_stopped(tmp_path):
    child = _start("-c", CHILD, HERE, tmp_path / "killed")
    try:
        whole = train_to_file(tmp_path / "whole", 12)
    finally:
        _, errors = _end(child)
    assert child.returncode == -signal.SIGKILL, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "killed.part", "whole"]
    assert int(jmpscale.get_scaler(whole).skipped) > 0
    seen = []
    resumed = train_to_file(tmp_path / "killed", 12, seen.append)
    assert seen[0] == 3, "half of the second checkpoint has not taken the place of the first"
    for part in ("step", "params", "opt_state"):
        assert_step_is_noop(getattr(whole, part), getattr(resumed, part))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"], "the next save cleans up"


# --- a damaged checkpoint, in the formats themselves; with the guide's checksums nothing at all gets through ---


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
        _, grads, finite = jmpscale.value_and_grad(loss_fn)(state, w)
        return grads, finite, jmpscale.update(state, finite)

    w = jnp.asarray(np.random.default_rng(0).standard_normal(5), jnp.float32)
    grads, finite, after = jax.jit(jax.vmap(step))(flipped.ravel())
    right = np.broadcast_to(jax.grad(loss_fn)(w), grads.shape)
    np.testing.assert_allclose(grads[finite], right[finite], rtol=1e-6)
    assert 0.9 < finite.mean() < 1
    assert after.skipped.tolist() == (~finite).astype(int).tolist()


@pytest.mark.parametrize(("scale", "cured"), [(0.0, True), (1e-45, True), (np.inf, False), (np.nan, False)])
def test_a_loss_scale_that_cannot_be_skips_until_it_is_cured_or_the_run_is_stuck(scale, cured):
    state = jmpscale.dynamic()._replace(loss_scale=jnp.float32(scale))
    finite = []
    for _ in range(4):
        _, _, ok = jmpscale.value_and_grad(jnp.square)(state, 3.0)
        state = jmpscale.update(state, ok)
        finite.append(bool(ok))
    assert finite == ([False, True, True, True] if cured else [False] * 4)
    if not cured:
        with pytest.raises(FloatingPointError, match=rf"the loss scale is {scale:g}.*damaged.*[Rr]estore"):
            jmpscale.raise_if_stuck(state, max_skips_in_a_row=3)


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
        assert state.good_steps >= 0
        assert state.config.growth_factor > 1 > state.config.backoff_factor > 0
    assert 0 < legal < len(whole), "JSON has no checksum: a digit may become another digit"


# --- the demonstration: a full disk, a closed pipe, signals ---

once = pytest.mark.once  # nothing in these depends on the version of JAX
TINY = ["--size", "4", "--steps", "1", "--output", "old.png"]


@pytest.fixture
def folder(tmp_path):
    """A folder with an earlier result."""
    (tmp_path / "old.png").write_bytes(b"an earlier result")
    return tmp_path


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def demo(monkeypatch):
    """The demonstration with a training that takes no time."""
    import jmpscale.__main__ as demo

    def fit(variant, target, steps, seed, report):
        report(variant.name, steps, steps)
        history = {name: np.stack([value] * steps) for name, value in jmpscale.metrics(jmpscale.dynamic()).items()}
        return demo.Outcome(variant, target, 40.0, 0.01, history, 0.01)

    monkeypatch.setattr(demo, "_fit", fit)
    return demo


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"a file system can be mounted by root only: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@once
def test_a_disk_that_is_really_full_keeps_the_old_picture(demo, small_disk, capsys):
    (small_disk / "old.png").write_bytes(b"an earlier result")
    before = _files(small_disk)
    assert demo.main([*TINY[:-1], str(small_disk / "old.png")]) == 2
    out, err = capsys.readouterr()
    assert "PSNR" in out
    assert (
        err.splitlines()[-1]
        == f"python -m jmpscale: error: cannot write {small_disk}/old.png: {os.strerror(errno.ENOSPC)}"
    )
    assert _files(small_disk) == before


@once
def test_what_a_killed_run_has_left_behind_does_not_stop_the_next_one(demo, folder):
    # In a container every run may have the same process number.
    demo._temporary(folder / "old.png").write_bytes(b"half a picture")
    assert demo.main([*TINY[:-1], str(folder / "old.png")]) == 0
    assert (folder / "old.png").read_bytes().startswith(b"\x89PNG")


@once
def test_a_file_that_may_not_grow_is_an_error_of_one_line(demo, folder, capsys):
    resource = pytest.importorskip("resource", reason="there are no such limits here")
    before, limits = _files(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        code = demo.main([*TINY[:-1], str(folder / "old.png")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"old.png: {os.strerror(errno.EFBIG)}")
    assert _files(folder) == before


def _full():
    try:
        return open("/dev/full", "w")
    except FileNotFoundError:
        pytest.skip("there is no /dev/full")


def _closed():
    readable, writable = os.pipe()
    os.close(readable)
    return os.fdopen(writable, "w")


def _with_stream(name, stream, call, monkeypatch):
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, stream)
            return call()
    finally:
        with contextlib.suppress(OSError):
            stream.close()  # which tries once more to write what is left


@once
@pytest.mark.parametrize("open_", [_full, _closed])
def test_a_table_that_cannot_be_printed_costs_neither_the_picture_nor_a_clear_word(
    open_, demo, folder, capsys, monkeypatch
):
    code = _with_stream("stdout", open_(), lambda: demo.main([*TINY[:-1], str(folder / "old.png")]), monkeypatch)
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m jmpscale: error: cannot print")
    assert (folder / "old.png").read_bytes().startswith(b"\x89PNG")


@once
@pytest.mark.parametrize("open_", [_full, _closed])
def test_progress_that_cannot_be_shown_costs_nothing(open_, demo, folder, capsys, monkeypatch):
    code = _with_stream("stderr", open_(), lambda: demo.main([*TINY[:-1], str(folder / "old.png")]), monkeypatch)
    assert code == 0
    assert "PSNR" in capsys.readouterr().out
    assert (folder / "old.png").read_bytes().startswith(b"\x89PNG")


# The demonstration as a process, from first to last line, but with a training that takes no time. A picture that takes
# for ever to write gives a signal its moment.
INSTANT = """
import pathlib, sys, time, jmpscale, numpy as np
from matplotlib.figure import Figure

def fit(variant, target, steps, seed, report):
    report(variant.name, steps, steps)
    history = {name: np.stack([value] * steps) for name, value in jmpscale.metrics(jmpscale.dynamic()).items()}
    return Outcome(variant, target, 40.0, 0.01, history, 0.01)

def for_ever(self, file, **options):
    file.write(b"half a picture")
    file.flush()
    print("saving", flush=True)
    while True:
        time.sleep(0.01)

if sys.argv.pop() == "saving":
    Figure.savefig = for_ever
source = pathlib.Path(jmpscale.__file__).with_name("__main__.py").read_text()
definitions, start = source.split("if __name__ ==")
exec(definitions)
_fit = fit
exec("if __name__ ==" + start)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Real runs that meet with an accident, side by side: output, errors, exit code and files of each."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    runs = {}

    def begin(name, *command, **options):
        folder = tmp_path_factory.mktemp("demo")
        (folder / "old.png").write_bytes(b"an earlier result")
        runs[name] = _start(*command, cwd=folder, **options), folder

    begin("training", "-m", "jmpscale", "--size", "4", "--steps", "400", *TINY[-2:])
    begin("saving", "-c", INSTANT, *TINY, "saving")
    with open("/dev/full", "w") as full:
        begin("full", "-c", INSTANT, *TINY, "full", stdout=full)
    watchdog = threading.Timer(100, lambda: [process.kill() for process, _ in runs.values()])
    watchdog.start()
    try:
        for name, sign in (("training", "float32: 100 of 400"), ("saving", "saving")):
            process, _ = runs[name]
            lines = process.stdout if name == "saving" else process.stderr
            assert any(line.startswith(sign) for line in lines), f"{name}: ended without a word"
            process.send_signal(signal.SIGTERM)
        return {name: (*_end(process), process.returncode, _files(folder)) for name, (process, folder) in runs.items()}
    finally:
        watchdog.cancel()
        for process, _ in runs.values():
            _end(process)


@once
@pytest.mark.parametrize("when", ["training", "saving"])
def test_sigterm_leaves_the_old_picture_and_nothing_else(when, ended):
    _, err, code, files = ended[when]
    assert code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert "Traceback" not in err
    assert files == {"old.png": b"an earlier result"}


@once
def test_a_process_whose_output_is_full_says_so_in_one_line(ended):
    _, err, code, files = ended["full"]
    assert code == 2
    *progress, last = err.splitlines()
    assert all(line.endswith("steps") for line in progress), err
    assert last.endswith(os.strerror(errno.ENOSPC))
    assert files.keys() == {"old.png"}
    assert files["old.png"].startswith(b"\x89PNG")
