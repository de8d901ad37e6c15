"""The demonstration, `python -m jmpscale`."""

import contextlib
import io
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale.__main__ as demo

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("allow_promotion")]

NAMES = list(demo.RUNS)
ROW = re.compile(r"^(\w.*?)  +([\d.]+|nan) +([\d.]+) +(2\^\d+|-) +(\d+|-) +([\d.]+)%$")
SMALL = {"SEQUENCES": 4, "LENGTH": 16, "SHARD_TOKENS": 64, "WIDTH": 16, "HEADS": 2, "LAYERS": 1}
UNUSUAL = "A $ sign_{x}^2 \x1b[2J\x07 漢字かな交じり文 \t\u202e"  # for terminals, for matplotlib, for its font


@contextlib.contextmanager
def small_model():
    """Makes the model small, so that it compiles quickly."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SMALL | {"GROWTH_INTERVAL": 5, "SAMPLE_LENGTH": 100}).items():
            patch.setattr(demo, name, value)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def small():
    with small_model():
        yield


@pytest.fixture(scope="module")
def allow_promotion():
    """Allows silent promotion of dtypes and ranks, which the model relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory, allow_promotion):
    """Runs the demonstration with a small model; returns the rows of the table by name, the output and the picture."""
    path, out = tmp_path_factory.mktemp("run") / "out.png", io.StringIO()
    with small_model(), contextlib.redirect_stdout(out):
        demo.main(["--steps", "150", "--batch-tokens", str(2**20), "--output", str(path)])
    rows = [ROW.match(line) for line in out.getvalue().splitlines()]
    return {row[1]: row.groups()[1:] for row in rows if row}, out.getvalue(), path


def test_main_prints_a_table_and_four_texts_and_writes_a_picture(run):
    rows, out, path = run
    assert list(rows) == NAMES
    for name, (_, seconds, scale, skipped, _) in rows.items():
        assert 0 < float(seconds) < 10
        assert (scale == "-") == (skipped == "-") == (name != "float16, jmpscale")
        assert len(out.partition(f"\n{name} writes:\n")[2].partition("\n\n")[0]) > 20
    assert out.endswith(f"\nwrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_main_shows_that_float16_loses_gradients_and_loss_scaling_keeps_them(run):
    losses, zeros = ([float(run[0][name][column]) for name in NAMES] for column in (0, 4))
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[2] > losses[0] + 0.2
    assert losses[3] == pytest.approx(losses[0], abs=0.05)
    assert zeros[2] > 2 * zeros[0]
    assert zeros[3] == pytest.approx(zeros[0], abs=1)
    _, _, scale, skipped, _ = run[0]["float16, jmpscale"]
    assert int(scale.removeprefix("2^")) > 20
    assert int(skipped) > 0


def test_plot_shows_what_was_recorded(small):
    text = demo.encode(demo.read_text())
    runs = {name: demo.train(name, text, 30, 2**20, 0) for name in NAMES}
    figure = demo.plot(runs, 2**20)
    loss, texts, scale, gradients = figure.axes
    for curve, (name, run) in zip(loss.lines, runs.items(), strict=True):
        losses = run.history["loss"]
        np.testing.assert_allclose(curve.get_ydata()[[0, 9, 29]], [losses[0], losses[:10].mean(), losses[-10:].mean()])
        assert curve.get_label() == f"{name}: {losses.mean():.3f}"
    written = [text.get_text().replace("\n", " ") for text in texts.texts]
    assert written == [part for name in NAMES for part in (f"{name} writes:", runs[name].sample)]
    history = runs["float16, jmpscale"].history
    np.testing.assert_array_equal(scale.lines[0].get_ydata(), history["loss_scale"])
    values = np.abs(np.concatenate([np.ravel(g) for g in runs["float16, jmpscale"].activation_grads.values()]))
    power = int(np.log2(history["loss_scale"][-1]))
    for patch, shift in zip(gradients.patches[1:], (0, power), strict=True):
        assert patch.get_data().values.sum() == pytest.approx(100 * np.mean(values > 0), abs=0.1)
        assert f"{np.mean(values < 2.0 ** (-24 - shift)):.0%} underflow" in patch.get_label()


def test_predict_is_causal_and_computes_in_its_dtype(small):
    params = demo.init(jax.random.key(0), 7)
    tokens = jnp.arange(32).reshape(2, 16) % 7
    changed = tokens.at[:, 9].add(1) % 7
    predict = jax.jit(demo.predict, static_argnums=2)
    before, after = (predict(params, batch, jnp.float32) for batch in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before - after)[:, 9:].max(axis=(0, 2)) > 1e-6).all(), "each later position depends on it"
    for dtype, smallest, largest in ((jnp.float16, 1e-6, 0.02), (jnp.bfloat16, 1e-3, 0.2)):
        logits = predict(params, tokens, dtype)
        assert logits.dtype == jnp.float32
        assert smallest < np.abs(logits - before).max() < largest


def test_gradients_of_shard_loss_add_up_to_those_of_the_mean(small):
    params, batch = demo.init(jax.random.key(1), 7), jax.random.randint(jax.random.key(2), (12, 17), 0, 7)

    def mean(params):
        logits = demo.predict(params, batch[:, :-1], jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    gradient = jax.jit(jax.grad(demo.shard_loss), static_argnums=(2, 3))
    shards = [gradient(params, part, batch[:, 1:].size, jnp.float32) for part in np.split(np.asarray(batch), 3)]
    for name, exact in jax.jit(jax.grad(mean))(params).items():
        np.testing.assert_allclose(sum(np.asarray(shard[name]) for shard in shards), exact, atol=1e-6)


def test_activation_grads_are_the_gradients_of_the_activations(small):
    params, batch = demo.init(jax.random.key(1), 7), jax.random.randint(jax.random.key(2), (4, 17), 0, 7)
    grads = demo.activation_grads(params, batch, 2.0, jnp.float32, demo.zero_perturbations(7))
    assert {name: grad.shape for name, grad in grads.items()} == {
        "embed": (4, 16, 16), "logits": (4, 16, 7), "layer_0/mlp": (4, 16, 64),
    }  # fmt: skip
    logits = jax.jit(demo.predict, static_argnums=2)(params, batch[:, :-1], jnp.float32)
    errors = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(7)[batch[:, 1:]]
    np.testing.assert_allclose(grads["logits"], errors / 2, atol=1e-6)
    by_parameter = jax.jit(jax.grad(demo.shard_loss), static_argnums=(2, 3))(params, batch, 2.0, jnp.float32)
    np.testing.assert_allclose(np.sum(grads["embed"], 0), by_parameter["position"], atol=1e-5)


@pytest.mark.full
def test_train_is_reproducible_and_samples_printable_text(small):
    text = demo.encode(UNUSUAL * 200)
    one, same, other = (demo.train("float16", text, 10, 2**19, seed) for seed in (0, 0, 1))
    for name, values in one.history.items():
        np.testing.assert_array_equal(values, same.history[name])
    assert one.sample == same.sample != other.sample
    assert one.sample.isprintable()


def test_encode_numbers_characters_and_merges_rare_ones(monkeypatch):
    alphabet, tokens = demo.encode(UNUSUAL)
    assert "".join(alphabet[tokens]) == UNUSUAL
    assert tokens.dtype == np.int32
    monkeypatch.setattr(demo, "MAX_ALPHABET", 2)
    alphabet, tokens = demo.encode("aaabbbcd")
    assert "".join(alphabet[tokens]) == "aaabbb\ufffd\ufffd"


def test_read_text_reads_a_file_or_the_manual_of_python(tmp_path, monkeypatch):
    assert len(demo.read_text()) > 100_000
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + "äö\r\n".encode() * 2000)
    assert demo.read_text(tmp_path / "text.txt") == "äö\n" * 2000
    monkeypatch.setattr(demo, "MAX_TEXT", 5000)
    assert len(demo.read_text(tmp_path / "text.txt")) == 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: must be between 1 and 1000000, got 0"),
        (["--steps", "many"], "--steps: invalid int value"),
        (["--batch-tokens", "1000"], "--batch-tokens: must be between 1024"),
        (["--seed", "-1"], "--seed: must be between 0"),
        (["--text", "absent.txt"], "No such file"),
        (["--text", "."], "Is a directory"),
        (["--text", "binary.bin"], "can't decode byte"),
        (["--text", "short.txt"], "must have at least 4,096 characters, not all equal, got 9"),
        (["--text", "equal.txt"], "not all equal"),
        (["--output", "absent/out.png"], "No such file or directory"),
        (["--output", "."], "Is a directory"),
    ],
    ids=" ".join,
)
def test_main_reports_bad_options_before_it_trains(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "equal.txt").write_text("a" * 10_000)
    (tmp_path / "binary.bin").write_bytes(np.random.default_rng(0).bytes(10_000))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        demo.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_main_names_the_extra_if_matplotlib_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        demo.main([])
    assert 'pip install "jmpscale[demo]"' in capsys.readouterr().err


def test_measured_batch_sizes_show_when_float16_needs_loss_scaling():
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
