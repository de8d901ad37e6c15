"""The demonstration: that it shows what it says, what it prints, and that it leaves nothing behind when it fails."""

import contextlib
import errno
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jmpscale.__main__ as demo

import instant
from children import end, start

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("lenient")]

NAMES = list(demo.VARIANTS)
ROW = re.compile(r"^(\w.*?)  +([\d.]+|nan) +([\d.]+) +(2\^\d+|-) +(\d+|-) +([\d.]+)%$")
TINY = {"SEQUENCES": 4, "LENGTH": 16, "SHARE": 64, "WIDTH": 16, "HEADS": 2, "LAYERS": 1}
STRANGE = "Ein 20-$ Schein_{x}^2 \x1b[2J\x07 漢字かな交じり文 \t\u202e"  # for terminals, for matplotlib, for its font


@contextlib.contextmanager
def _lenient():
    # optax relies on silent promotion, and so does the model.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def lenient():
    with _lenient():
        yield


@contextlib.contextmanager
def _tiny():
    """Makes the model small enough for a test, and its compilation short."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (TINY | {"GROWTH_INTERVAL": 5, "WRITTEN": 100}).items():
            patch.setattr(demo, name, value)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def tiny():
    with _tiny():
        yield


def _rows(text):
    """Reads the table back: {run: (loss, seconds, scale, skipped, zeros)}."""
    found = [ROW.match(line) for line in text.splitlines()]
    return {m[1]: (float(m[2]), float(m[3]), m[4], m[5], float(m[6])) for m in found if m}


def _is_one_line(text):
    return text.count("\n") == 1 and text.startswith("python -m jmpscale: error: ")


def _is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One real run of a small model: exit code, stdout, stderr, the file, and what was drawn."""
    path = tmp_path_factory.mktemp("run") / "out.png"
    out, err, drawn = io.StringIO(), io.StringIO(), []
    draw = demo._draw
    with _lenient(), _tiny(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_draw", lambda *args: drawn.append((*args, draw(*args))) or drawn[0][-1])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = demo.main(["--steps", "150", "--batch-tokens", str(2**20), "--output", str(path)])
    return code, out.getvalue(), err.getvalue(), path, drawn[0]


def test_a_run_prints_one_table_and_four_texts_and_writes_one_png(run):
    code, out, err, path, (outcomes, _, _) = run
    assert code == 0
    assert list(path.parent.iterdir()) == [path]
    assert _is_png(path)
    rows = _rows(out)
    assert list(rows) == NAMES
    for name, (_, seconds, scale, skipped, _) in rows.items():
        assert 0 < seconds < 10, name
        assert (scale == "-") == (skipped == "-") == (name != NAMES[3])
    for name in NAMES:
        written = out.partition(f"\n{name} writes:\n")[2].partition("\n\n")[0]
        assert written.replace("\n", " ") == outcomes[name].writing
        assert len(written) > 20
    assert out.splitlines()[-1] == f"wrote {path}"
    assert err.splitlines()[0] == "float32: 0 of 150 steps"
    assert err.splitlines()[-1] == "float16, jmpscale: 150 of 150 steps"
    assert len(err.splitlines()) <= 4 * 6


def test_float16_alone_loses_gradients_and_fails_and_the_loss_scale_rescues_it(run):
    rows = _rows(run[1])
    losses, zeros = ([rows[name][column] for name in NAMES] for column in (0, 4))
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[2] > losses[0] + 0.2
    assert losses[3] == pytest.approx(losses[0], abs=0.05)
    assert zeros[2] > 2 * zeros[0]
    assert zeros[3] == pytest.approx(zeros[0], abs=1)
    *_, scale, skipped, _ = rows[NAMES[3]]
    assert int(scale.removeprefix("2^")) > 20
    assert int(skipped) > 0


def test_the_table_and_the_picture_show_what_was_recorded(run):
    _, out, _, _, (outcomes, whole, figure) = run
    loss, texts, scale, window = figure.axes
    for curve, (name, outcome) in zip(loss.lines, outcomes.items(), strict=True):
        losses = outcome.history["loss"]
        np.testing.assert_allclose(curve.get_ydata()[[0, 9, 149]], [losses[0], losses[:10].mean(), losses[-10:].mean()])
        assert curve.get_label() == f"{name}: {losses[-100:].mean():.3f}"
        assert _rows(out)[name][0] == pytest.approx(losses[-100:].mean(), abs=6e-4)
        assert _rows(out)[name][4] == pytest.approx(100 * outcome.history["zero"][-100:].mean(), abs=6e-3)
    written = [text.get_text().replace("\n", " ") for text in texts.texts]
    assert written == [part for name in NAMES for part in (f"{name} writes:", outcomes[name].writing)]
    exact, _, plain, scaled = (np.mean(outcome.history["loss"][-100:]) for outcome in outcomes.values())
    assert figure.get_suptitle() == (
        f"float16 ends {plain - exact:z.2f} nats above float32, with jmpscale {scaled - exact:z.2f}"
    )
    assert f"{whole:,} of the whole batch" in figure.get_supxlabel()
    history = outcomes[NAMES[3]].history
    np.testing.assert_array_equal(scale.lines[0].get_ydata(), history["loss_scale"])
    assert len(scale.lines[1].get_xdata()) == history["skipped"][-1]
    values = np.abs(np.concatenate([np.ravel(g) for g in outcomes[NAMES[3]].gradients.values()]))
    power = int(np.log2(history["loss_scale"][-1]))
    for patch, shift in zip(window.patches[1:], (0, power), strict=True):
        shares, edges, _ = patch.get_data()
        assert shares.sum() == pytest.approx(100 * np.mean(values > 0), abs=0.1)
        assert f"{np.mean(values < 2.0 ** (-24 - shift)):.0%} too small" in patch.get_label()
        within = (np.log2(values) + shift >= -30) & (np.log2(values) + shift < -29)
        assert shares[list(edges).index(-30)] == pytest.approx(100 * within.mean())


def test_the_model_looks_back_only_and_computes_in_its_dtype(tiny):
    params = demo.init(jax.random.key(0), 7)
    tokens = jnp.arange(32).reshape(2, 16) % 7
    changed = tokens.at[:, 9].add(1) % 7
    predict = jax.jit(demo.predict, static_argnums=2)
    before, after = (predict(params, batch, jnp.float32) for batch in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before - after)[:, 9:].max(axis=(0, 2)) > 1e-6).all(), "what is seen is used at every later place"
    for dtype, smallest, largest in ((jnp.float16, 1e-6, 0.02), (jnp.bfloat16, 1e-3, 0.2)):
        logits = predict(params, tokens, dtype)
        assert logits.dtype == jnp.float32
        assert smallest < np.abs(logits - before).max() < largest


def test_the_gradients_of_all_shares_add_up_to_those_of_the_mean(tiny):
    params, batch = demo.init(jax.random.key(1), 7), jax.random.randint(jax.random.key(2), (12, 17), 0, 7)

    def mean(params):
        logits = demo.predict(params, batch[:, :-1], jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    gradient = jax.jit(jax.grad(demo.share_loss), static_argnums=(2, 3))
    shares = [gradient(params, part, batch[:, 1:].size, jnp.float32) for part in np.split(np.asarray(batch), 3)]
    for name, exact in jax.jit(jax.grad(mean))(params).items():
        np.testing.assert_allclose(sum(np.asarray(share[name]) for share in shares), exact, atol=1e-6)


def test_taps_have_the_gradients_of_the_activations(tiny):
    params, batch = demo.init(jax.random.key(1), 7), jax.random.randint(jax.random.key(2), (4, 17), 0, 7)
    taps = demo.make_taps(7, jnp.float32)
    grads = demo.tap_grads(params, batch, 2.0, jnp.float32, taps)
    assert {name: grad.shape for name, grad in grads.items()} == {
        "embed": (4, 16, 16), "logits": (4, 16, 7), "layer_0/mlp": (4, 16, 64),
    }  # fmt: skip
    logits = jax.jit(demo.predict, static_argnums=2)(params, batch[:, :-1], jnp.float32)
    errors = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(7)[batch[:, 1:]]
    np.testing.assert_allclose(grads["logits"], errors / 2, atol=1e-6)
    by_parameter = jax.jit(jax.grad(demo.share_loss), static_argnums=(2, 3))(params, batch, 2.0, jnp.float32)
    np.testing.assert_allclose(np.sum(grads["embed"], 0), by_parameter["position"], atol=1e-5)


@pytest.mark.full
def test_a_seed_fixes_everything_and_another_changes_it(run, tiny):
    (outcomes, whole, _), text = run[4], demo.encode(demo.read_text())
    again, other = (demo.train("float16", text, 150, whole, seed) for seed in (0, 1))
    for name, values in outcomes["float16"].history.items():
        np.testing.assert_array_equal(values, again.history[name])
    assert again.writing == outcomes["float16"].writing
    assert other.writing != again.writing
    assert (other.history["loss"] != again.history["loss"]).all()


@pytest.mark.full
def test_what_is_not_to_be_printed_is_not(tiny):
    writing = demo.train("float16", demo.encode(STRANGE * 200), 2, 2**19, 0).writing
    assert writing.isprintable()
    assert len(set(writing)) > 5


def test_any_writing_can_be_drawn(folder, monkeypatch, capsys):
    real = instant.train("", None, 2, 2**19, 0)
    writing = "".join(c for c in STRANGE if c.isprintable())
    monkeypatch.setattr(demo, "train", lambda *args: real._replace(writing=writing * 3))
    assert demo.main(["--text", "text.txt", "--output", "old.png", "--steps", "2"]) == 0
    assert _is_png(folder / "old.png")
    assert writing in capsys.readouterr().out


def test_a_text_is_numbered_and_can_be_read_back(monkeypatch):
    alphabet, tokens = demo.encode(STRANGE)
    assert "".join(alphabet[tokens]) == STRANGE
    assert tokens.dtype == np.int32
    assert len(alphabet) == len(set(STRANGE))
    monkeypatch.setattr(demo, "CHARACTERS", 2)
    alphabet, tokens = demo.encode("aaabbbcd")
    assert "".join(alphabet[tokens]) == "aaabbb\ufffd\ufffd"


def test_the_default_text_is_python_s_manual_and_a_file_is_read_as_it_is(tmp_path, monkeypatch):
    assert "The" in demo.read_text()
    assert len(demo.read_text()) > 100_000
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + "äö\r\n".encode() * 2000)
    assert demo.read_text(tmp_path / "bom.txt") == "äö\n" * 2000
    monkeypatch.setattr(demo, "LONGEST", 5000)
    assert len(demo.read_text(tmp_path / "bom.txt")) == 5000


@pytest.fixture
def trained(monkeypatch):
    """Replaces the training, for tests of all that is around it; lists what was 'trained'."""
    names = []
    monkeypatch.setattr(demo, "train", lambda name, *rest: names.append(name) or instant.train(name, *rest))
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an earlier result, a text, and things that are neither."""
    (tmp_path / "old.png").write_bytes(b"an earlier result")
    (tmp_path / "text.txt").write_text("to be or not to be " * 500)
    (tmp_path / "long name").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "monotonous.txt").write_text("a" * 10_000)
    (tmp_path / "binary.bin").write_bytes(np.random.default_rng(0).bytes(10_000))
    (tmp_path / "link.txt").symlink_to("text.txt")
    (tmp_path / "twin.txt").hardlink_to(tmp_path / "text.txt")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _contents(folder):
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--text", "absent.txt", "No such file"),
        ("--text", "long name", "not a regular file"),
        ("--text", "pipe", "not a regular file"),
        ("--text", os.devnull, "not a regular file"),
        ("--text", "circle.txt", "symbolic links"),
        ("--text", "binary.bin", "can't decode byte"),
        ("--text", "empty.txt", "4,096 characters or more, not all the same, and has 0"),
        ("--text", "short.txt", "and has 9"),
        ("--text", "monotonous.txt", "not all the same"),
        ("--output", "absent/out.png", "No such file or directory"),
        ("--output", "text.txt/out.png", "Not a directory"),
        ("--output", "long name", "not a file that may be overwritten"),
        ("--output", "pipe", "not a file that may be overwritten"),
        ("--output", "x" * 300 + ".png", "name too long"),
        ("--output", os.devnull, "not a file that may be overwritten"),
        ("--output", "text.txt", "it is the text to learn"),
        ("--output", "link.txt", "it is the text to learn"),
        ("--output", "twin.txt", "it is the text to learn"),
    ],
)
def test_what_cannot_work_is_said_before_the_training(option, value, reason, folder, trained, capsys):
    before = _contents(folder)
    options = {"--text": "text.txt", "--output": "old.png"} | {option: value}
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(demo.main([part for pair in options.items() for part in pair])), daemon=True
    )
    thread.start()
    thread.join(60)
    assert codes == [2], "it hangs" if thread.is_alive() else codes
    out, err = capsys.readouterr()
    assert out == ""
    assert _is_one_line(err), err
    assert reason in err
    assert pathlib.Path(os.path.realpath(value)).name in err or value in err
    assert trained == []
    assert _contents(folder) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("protected", [".", "old.png"])
def test_what_is_protected_is_not_overwritten(protected, folder, trained, capsys):
    mode = (folder / protected).stat().st_mode
    (folder / protected).chmod(mode & ~0o222)
    try:
        assert demo.main(["--output", str(folder / "old.png")]) == 2
    finally:
        (folder / protected).chmod(mode)
    assert _is_one_line(capsys.readouterr().err)
    assert trained == []


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "0"],
        ["--steps", "many"],
        ["--batch-tokens", "1000"],
        ["--batch-tokens", "1e6"],
        ["--seed", "-1"],
        ["--image", "x.png"],
    ],
    ids=" ".join,
)
def test_wrong_options_exit_with_2(options, trained, capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(options)
    assert exit_.value.code == 2
    assert options[0] in capsys.readouterr().err
    assert trained == []


@pytest.mark.parametrize(
    ("module", "remedy"),
    [("matplotlib.figure", 'pip install "jmpscale[demo]"'), ("pydoc_data.topics", "name another one with --text FILE")],
)
def test_what_is_not_installed_is_said_in_one_line(module, remedy, folder, trained, monkeypatch, capsys):
    before = _contents(folder)
    monkeypatch.setitem(sys.modules, module, None)
    assert demo.main(["--output", "old.png"]) == 2
    err = capsys.readouterr().err
    assert _is_one_line(err)
    assert f"{module} is missing" in err
    assert remedy in err
    assert trained == []
    assert _contents(folder) == before
    assert demo.main(["--output", "old.png", "--text", "text.txt"]) == (2 if module.startswith("matplotlib") else 0)


def _full_disk(self, file, **options):
    file.write(b"half a picture")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _interrupted(self, file, **options):
    file.write(b"half a picture")
    raise KeyboardInterrupt


@pytest.mark.parametrize(("savefig", "code"), [(_full_disk, 2), (_interrupted, 130)])
def test_the_old_file_survives_a_failed_save(savefig, code, folder, trained, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "savefig", savefig)
    before = _contents(folder)
    assert demo.main(["--text", "text.txt", "--output", "old.png"]) == code
    out, err = capsys.readouterr()
    assert list(_rows(out)) == NAMES
    assert err.splitlines()[-1].endswith("No space left on device" if code == 2 else "nothing written")
    assert trained == NAMES
    assert _contents(folder) == before


def test_the_old_file_survives_a_failed_rename(folder, trained, monkeypatch, capsys):
    def replace(*names):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", replace)
    before = _contents(folder)
    assert demo.main(["--text", "text.txt", "--output", "old.png"]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert _contents(folder) == before


def test_an_old_file_is_replaced_and_a_link_stays_a_link(folder, trained):
    (folder / "link.png").symlink_to("old.png")
    assert demo.main(["--text", "text.txt", "--output", "link.png"]) == 0
    assert (folder / "link.png").is_symlink()
    assert _is_png(folder / "old.png")


def test_ctrl_c_while_training_writes_nothing(folder, monkeypatch, capsys):
    def train(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", train)
    before = _contents(folder)
    assert demo.main(["--output", "old.png"]) == 130
    assert capsys.readouterr() == ("", "interrupted, nothing written\n")
    assert _contents(folder) == before


@pytest.mark.parametrize("closed", [("stderr",), ("stdout", "stderr")], ids="+".join)
@pytest.mark.parametrize(("output", "code"), [("old.png", 0), ("pipe", 2)])
def test_closed_streams_are_nobody_listening(closed, output, code, folder, trained, monkeypatch):
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    assert demo.main(["--text", "text.txt", "--output", output]) == code
    for name in closed:
        getattr(sys, name).close()
    assert _is_png(folder / "old.png") == (code == 0)


def test_letters_that_the_output_does_not_know_are_replaced(folder, monkeypatch):
    real = instant.train("", None, 2, 2**19, 0)
    monkeypatch.setattr(demo, "train", lambda *args: real._replace(writing="naïve"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert demo.main(["--text", "text.txt", "--output", "old.png"]) == 0
    assert out.buffer.getvalue().count(b"na?ve") == 4


def test_a_terminal_gets_a_counter_and_a_file_gets_quarters(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, lines in ((Terminal(), 1), (io.StringIO(), 5)):
        monkeypatch.setattr(sys, "stderr", stream)
        for done in range(0, 81, 10):
            demo._show_progress("float32", done, 80)
        text = stream.getvalue()
        assert text.endswith("float32: 80 of 80 steps\n")
        assert text.count("\n") == lines
        assert text.count("\r") == (9 if lines == 1 else 0)


# A shell that starts the tests in the background makes its children ignore SIGINT; the demonstration is to hear it.
LISTENING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jmpscale", run_name="__main__", alter_sys=True)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="there SIGINT cannot be sent to one process")
def test_ctrl_c_in_the_middle_of_a_process_writes_nothing(folder):
    before = _contents(folder)
    process = start("-c", LISTENING, "--output", "old.png", cwd=folder)
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert any("200 of 800" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = end(process)
    finally:
        watchdog.cancel()
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted, nothing written"
    assert "Traceback" not in err
    assert _contents(folder) == before


@pytest.mark.full
def test_a_process_of_a_stranger(folder):
    command = f'"{sys.executable}" -m jmpscale --text text.txt --steps 30 --output new.png 2>&-'
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(_rows(done.stdout)) == NAMES
    assert _is_png(folder / "new.png")
    command = [sys.executable, "-m", "jmpscale", "--text", "pipe"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert _is_one_line(done.stderr), done.stderr


def test_from_which_batch_on_float16_needs_scaling_is_as_it_is_said():
    path = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "batch_size.json"
    loss = {(r["batch tokens"], r["seed"], r["run"]): r["loss"] for r in json.loads(path.read_text())["runs"]}
    gaps = {key: loss[key] - loss[(*key[:2], "float32")] for key in loss}
    assert {seed for whole, seed, _ in loss if whole == 2**19} == {0, 1, 2, 3}
    for (whole, _, name), gap in gaps.items():
        if name == "float16, jmpscale":
            assert abs(gap) < 0.03
        if name == "float16":
            low, high = {2**10: (-0.02, 0.02), 2**15: (-0.02, 0.2), 2**19: (1, 3), 2**21: (1.5, 6)}[whole]
            assert low < gap < high, (whole, gap)
