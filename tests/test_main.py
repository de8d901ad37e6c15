"""The demonstration: what it writes, what it says, and that it leaves nothing behind when it fails."""

import contextlib
import errno
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import jmpscale
import jmpscale.__main__ as demo

pytestmark = pytest.mark.once

NAMES = ["float32", "bfloat16", "float16, no scaling", "float16, jmpscale"]
SMALL = ["--size", "32", "--steps", "150", "--seed", "3"]
ROW = re.compile(r"^(\w.*?)  +([\d.]+|nan) +([\d.]+) +(2\^\d+|-) +(\d+|-) +([\d.]+)%$")


def _rows(text):
    """Reads the table back: {run: (PSNR, seconds, scale, skipped, zeros)}."""
    found = [ROW.match(line) for line in text.splitlines()]
    return {m[1]: (float(m[2]), float(m[3]), m[4], m[5], float(m[6])) for m in found if m}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """One real run in this process: exit code, stdout, stderr, and the file."""
    path = tmp_path_factory.mktemp("small") / "out.png"
    out, err = io.StringIO(), io.StringIO()
    # optax relies on silent promotion.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = demo.main([*SMALL, "--output", str(path)])
    return code, out.getvalue(), err.getvalue(), path


@pytest.fixture
def instant_fits(monkeypatch):
    """Replaces the training, for tests of all that is around it; lists the variants that were 'trained'."""
    trained = []

    def fit(variant, target, steps, seed, report):
        trained.append(variant.name)
        report(variant.name, steps, steps)
        history = {name: np.stack([value] * steps) for name, value in jmpscale.metrics(jmpscale.dynamic()).items()}
        return demo.Outcome(variant, target, 40.0, 0.01, history, 0.01)

    monkeypatch.setattr(demo, "_fit", fit)
    return trained


def _photograph(path, size=(24, 16)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def _is_one_line(text):
    return text.count("\n") == 1 and text.startswith("python -m jmpscale: error: ")


def test_a_run_writes_one_png(small_run):
    code, _, _, path = small_run
    assert code == 0
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert 1000 < image.width < 4000
        assert 600 < image.height < 4000
        assert len(image.convert("RGB").getcolors(2**24)) > 500
    assert list(path.parent.iterdir()) == [path]


def test_a_run_prints_one_table_and_the_file(small_run):
    _, out, err, path = small_run
    rows = _rows(out)
    assert list(rows) == NAMES
    for name, (psnr, seconds, scale, skipped, _) in rows.items():
        assert 20 < psnr < 120, name
        assert 0 < seconds < 10, name
        assert (scale == "-") == (skipped == "-") == (name != NAMES[3])
    assert str(path) in out.splitlines()[-1]
    assert err.splitlines()[0] == "float32: 0 of 150 steps"
    assert err.splitlines()[-1] == "float16, jmpscale: 150 of 150 steps"
    assert len(err.splitlines()) <= 4 * 6


def test_the_loss_scale_grows_and_rescues_gradients(small_run):
    rows = _rows(small_run[1])
    _, _, scale, skipped, zeros = rows["float16, jmpscale"]
    assert scale == f"2^{16 + 150 // demo.GROWTH_INTERVAL}"
    assert skipped == "0"
    assert rows["float16, no scaling"][4] > 0.1
    assert zeros < 0.1 * rows["float16, no scaling"][4]


def test_the_same_seed_gives_the_same_result_in_another_process(small_run, tmp_path):
    command = [sys.executable, "-m", "jmpscale", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    mine, others = _rows(small_run[1]), _rows(done.stdout)
    assert list(others) == NAMES
    for name in NAMES:
        assert mine[name][:1] + mine[name][2:] == others[name][:1] + others[name][2:]
    assert [p.name for p in tmp_path.iterdir()] == ["jmpscale.png"]


@pytest.mark.parametrize("size", [(24, 16), (9, 60), (200, 3), (1, 1)], ids=str)
def test_every_shape_of_picture_can_be_drawn(size, instant_fits, tmp_path, capsys):
    photograph = _photograph(tmp_path / "in.png", size)
    assert demo.main(["--image", str(photograph), "--output", str(tmp_path / "out.png"), "--steps", "3"]) == 0
    assert instant_fits == NAMES
    with Image.open(tmp_path / "out.png") as image:
        image.load()
    assert list(_rows(capsys.readouterr().out)) == NAMES


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_pictures_of_any_mode_become_rgb_of_the_size_asked_for(mode, tmp_path):
    with Image.open(_photograph(tmp_path / "rgb.png", (40, 20))) as image:
        image.convert(mode).save(tmp_path / "in.png")
    target = demo._read_picture(tmp_path / "in.png", 10)
    assert (target.shape, target.dtype) == ((5, 10, 3), np.float32)
    assert target.min() >= 0
    assert target.max() <= 1
    assert demo._read_picture(tmp_path / "in.png", 4000).shape == (20, 40, 3)


@pytest.fixture
def folder(tmp_path):
    """A folder with an earlier result, a photograph, and things that are neither."""
    (tmp_path / "old.png").write_bytes(b"an earlier result")
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "a folder").mkdir()
    photograph = _photograph(tmp_path / "photograph.png")
    (tmp_path / "cut.png").write_bytes(photograph.read_bytes()[:200])
    return tmp_path


def _contents(folder):
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--image", "absent.png", "No such file"),
        ("--image", "text.png", "cannot identify image"),
        ("--image", "cut.png", "cannot read"),
        ("--image", "a folder", "directory"),
        ("--output", "absent/out.png", "No such file or directory"),
        ("--output", "text.png/out.png", "Not a directory"),
        ("--output", "a folder", "not a file that may be overwritten"),
        ("--output", "x" * 300 + ".png", "name too long"),
        ("--output", os.devnull, "not a file that may be overwritten"),
    ],
)
def test_what_cannot_work_is_said_before_the_training(option, value, reason, folder, instant_fits, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = _contents(folder)
    options = {"--image": "photograph.png", "--output": "old.png"} | {option: value}
    assert demo.main([part for pair in options.items() for part in pair]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert _is_one_line(err), err
    assert reason in err
    assert pathlib.Path(value).name in err
    assert instant_fits == []
    assert _contents(folder) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("protected", [".", "old.png"])
def test_what_is_protected_is_not_overwritten(protected, folder, instant_fits, capsys):
    mode = (folder / protected).stat().st_mode
    (folder / protected).chmod(mode & ~0o222)
    try:
        assert demo.main(["--output", str(folder / "old.png")]) == 2
    finally:
        (folder / protected).chmod(mode)
    assert _is_one_line(capsys.readouterr().err)
    assert instant_fits == []


def test_a_process_says_it_in_one_line_and_exits_with_2(folder):
    command = [sys.executable, "-m", "jmpscale", "--image", "text.png", "--output", "old.png"]
    before = _contents(folder)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert _is_one_line(done.stderr), done.stderr
    assert _contents(folder) == before


@pytest.mark.parametrize(
    "options",
    [["--steps", "0"], ["--steps", "many"], ["--size", "-1"], ["--size", "2.5"], ["--seed", "-1"], ["--colour"]],
    ids=" ".join,
)
def test_wrong_options_exit_with_2(options, instant_fits, capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(options)
    assert exit_.value.code == 2
    assert options[0] in capsys.readouterr().err
    assert instant_fits == []


def _full_disk(self, file, **options):
    file.write(b"half a picture")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _interrupted(self, file, **options):
    file.write(b"half a picture")
    raise KeyboardInterrupt


@pytest.mark.parametrize(("savefig", "code"), [(_full_disk, 2), (_interrupted, 130)])
def test_the_old_file_survives_a_failed_save(savefig, code, folder, instant_fits, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "savefig", savefig)
    before = _contents(folder)
    assert demo.main(["--image", str(folder / "photograph.png"), "--output", str(folder / "old.png")]) == code
    out, err = capsys.readouterr()
    assert list(_rows(out)) == NAMES
    last = err.splitlines()[-1]
    assert last.endswith("No space left on device" if code == 2 else "nothing written")
    assert instant_fits == NAMES
    assert _contents(folder) == before


def test_the_old_file_survives_a_failed_rename(folder, instant_fits, monkeypatch, capsys):
    def replace(*names):
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(os, "replace", replace)
    before = _contents(folder)
    assert demo.main(["--image", str(folder / "photograph.png"), "--output", str(folder / "old.png")]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert _contents(folder) == before


def test_an_old_file_is_replaced_and_a_link_stays_a_link(folder, instant_fits):
    (folder / "link.png").symlink_to("old.png")
    assert demo.main(["--image", str(folder / "photograph.png"), "--output", str(folder / "link.png")]) == 0
    assert (folder / "link.png").is_symlink()
    assert (folder / "old.png").read_bytes().startswith(b"\x89PNG")


WITHOUT = """
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
runpy.run_module("jmpscale", run_name="__main__")
"""


def test_without_the_extra_it_says_what_to_install(tmp_path):
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert _is_one_line(done.stderr), done.stderr
    assert 'pip install "jmpscale[demo]"' in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["matplotlib.figure", "PIL.Image", "sklearn.datasets"])
def test_every_package_of_the_extra_is_asked_for(module, monkeypatch, instant_fits, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert demo.main(["--output", str(tmp_path / "out.png")]) == 2
    err = capsys.readouterr().err
    assert _is_one_line(err)
    assert module in err
    assert 'pip install "jmpscale[demo]"' in err
    assert instant_fits == []


# A shell that starts the tests in the background makes its children ignore SIGINT; the demonstration is to hear it.
LISTENING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jmpscale", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there SIGINT cannot be sent to one process")
def test_ctrl_c_in_the_middle_writes_nothing(folder):
    options = ["--image", "photograph.png", "--output", "old.png", "--size", "8", "--steps", "8000"]
    before = _contents(folder)
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        with process:
            seen = iter(process.stderr.readline, "")
            assert any("2000 of 8000" in line for line in seen)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    finally:
        watchdog.cancel()
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted, nothing written"
    assert "Traceback" not in err
    assert _contents(folder) == before


def test_a_terminal_gets_a_bar_and_a_file_gets_quarters(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, line in [
        (Terminal(), "\rfloat32              [" + "#" * 15 + " " * 15 + "] 20/40"),
        (io.StringIO(), ""),
    ]:
        monkeypatch.setattr(sys, "stderr", stream)
        for done in range(0, 41, 10):
            demo._show_progress("float32", done, 40)
        text = stream.getvalue()
        assert line in text
        assert text.endswith("\n")
        assert text.count("\n") == (1 if line else 5)
