"""The demonstration meets with a full disk, a closed pipe, a signal: one clear line, and the old picture stays."""

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

import instant
from children import end, start

once = pytest.mark.once  # nothing in these depends on the version of JAX
TINY = ["--steps", "1", "--output", "old.png"]


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

    monkeypatch.setattr(demo, "train", instant.train)
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
    assert "float32 writes:" in out
    assert (
        err.splitlines()[-1]
        == f"python -m jmpscale: error: cannot write {small_disk}/old.png: {os.strerror(errno.ENOSPC)}"
    )
    assert _files(small_disk) == before


@once
def test_what_a_killed_run_has_left_behind_does_not_stop_the_next_one(demo, folder):
    # In a container every run may have the same process number.
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(pathlib.Path, "unlink", lambda *args, **options: None)
        with demo._replacing(folder / "old.png", keep=True) as file:
            file.write(b"half a picture")
            raise KeyboardInterrupt
    assert len(_files(folder)) == 2
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
    assert "float32 writes:" in capsys.readouterr().out
    assert (folder / "old.png").read_bytes().startswith(b"\x89PNG")


# The demonstration as a process, from first to last line, but with a training that takes no time. A picture that takes
# for ever to write gives a signal its moment.
INSTANT = f"""
import pathlib, sys, time
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import instant, jmpscale
from matplotlib.figure import Figure

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
train = instant.train
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
        runs[name] = start(*command, cwd=folder, **options), folder

    begin("training", "-m", "jmpscale", "--steps", "400", *TINY[-2:])
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
        return {name: (*end(process), process.returncode, _files(folder)) for name, (process, folder) in runs.items()}
    finally:
        watchdog.cancel()
        for process, _ in runs.values():
            end(process)


@once
@pytest.mark.full
@pytest.mark.parametrize("when", ["training", "saving"])
def test_sigterm_leaves_the_old_picture_and_nothing_else(when, ended):
    _, err, code, files = ended[when]
    assert code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert "Traceback" not in err
    assert files == {"old.png": b"an earlier result"}


@once
@pytest.mark.full
def test_a_process_whose_output_is_full_says_so_in_one_line(ended):
    _, err, code, files = ended["full"]
    assert code == 2
    *progress, last = err.splitlines()
    assert all(line.endswith("steps") for line in progress), err
    assert last.endswith(os.strerror(errno.ENOSPC))
    assert files.keys() == {"old.png"}
    assert files["old.png"].startswith(b"\x89PNG")
