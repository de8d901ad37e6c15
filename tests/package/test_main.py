"""The demonstration, `python -m jmpscale`, trains, prints its results, and rejects invalid options."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
import jmpscale.__main__ as demo

SMALL = {"SEQUENCES": 2, "LENGTH": 8, "SHARD_TOKENS": 16, "WIDTH": 8, "HEADS": 2, "LAYERS": 1, "SAMPLE_LENGTH": 40}
# The name of a run, its losses, the percentage of zero gradients, the scale and the skips.
ROW = re.compile(r"^(\w.*?)((?:  +[\d.]+){4}) +(\d+)% +(2\^\d+|-) +(\d+|-)$", flags=re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def _promotion():
    """The model relies on silent promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def small():
    """Makes the model small, so that it compiles quickly."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SMALL | {"GROWTH_INTERVAL": 3}).items():
            patch.setattr(demo, name, value)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def scaled(small):
    return demo.train("float16, jmpscale", demo.read_text(), 6, 2**20, 0)


def _runs(run):
    return {name: run._replace(sample="noise" if name == "float16" else "words") for name in demo.RUNS}


def _rows(printed):
    """Returns the losses, and then the percentage, the scale and the skips, by the name of the run."""
    found = ROW.findall(printed)
    return {name: ([float(loss) for loss in losses.split()], *others) for name, losses, *others in found}


@pytest.mark.full
def test_train_records_each_step(scaled):
    assert {len(values) for values in scaled.history.values()} == {6}
    assert np.isfinite(scaled.history["loss"]).all()
    assert scaled.history["loss_scale"].tolist() == [2.0**16] * 2 + [2.0**17] * 3 + [2.0**18]
    assert set(scaled.history) >= {"loss", "zero", "total_skips", "loss_scale"}
    assert 0 < len(scaled.sample) <= demo.SHOWN_LENGTH
    assert scaled.mean("zero") == pytest.approx(scaled.history["zero"].mean())
    assert scaled.mean("loss", 2) == pytest.approx(scaled.history["loss"][:2].mean())


@pytest.mark.full
def test_format_table_has_a_row_for_each_run_and_equal_texts_once(scaled):
    table = demo.format_table(_runs(scaled))
    rows = _rows(table)
    assert list(rows) == list(demo.RUNS)
    ends = [1, 3, 4, 6]
    assert re.findall(r"step (\d+)", table) == [str(end) for end in ends]
    for name, (losses, zeros, scale, skipped) in rows.items():
        assert losses == [round(scaled.mean("loss", end), 2) for end in ends]
        assert zeros == f"{100 * scaled.mean('zero'):.0f}"
        assert (scale, skipped) == (("2^18", "0") if "jmpscale" in name else ("-", "-"))
    assert table.endswith("\n\nText of float32; bfloat16; float16, jmpscale:\nwords\n\nText of float16:\nnoise")


@pytest.mark.full
def test_main_prints_the_table(scaled, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(demo, "train", lambda name, *args: calls.append((name, *args[1:])) or _runs(scaled)[name])
    demo.main(["--steps", "6", "--batch-tokens", str(2**20), "--seed", "5"])
    assert calls == [(name, 6, 2**20, 5) for name in demo.RUNS]
    assert capsys.readouterr().out == f"{demo.format_table(_runs(scaled))}\n"


@pytest.mark.full
def test_main_shows_that_loss_scaling_prevents_underflow(small, capsys, monkeypatch):
    for name, value in {"SEQUENCES": 4, "LENGTH": 16, "SHARD_TOKENS": 64, "WIDTH": 16, "GROWTH_INTERVAL": 5}.items():
        monkeypatch.setattr(demo, name, value)
    jax.clear_caches()  # the sizes of the model are not arguments of its functions
    demo.main(["--steps", "150", "--batch-tokens", str(2**20)])
    rows = _rows(capsys.readouterr().out)
    losses, zeros = [rows[name][0][-1] for name in demo.RUNS], [int(rows[name][1]) for name in demo.RUNS]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[2] > losses[0] + 0.2
    assert losses[3] == pytest.approx(losses[0], abs=0.05)
    assert zeros[2] > 2 * zeros[0]
    assert zeros[3] == pytest.approx(zeros[0], abs=1)
    _, _, scale, skipped = rows["float16, jmpscale"]
    assert int(scale.removeprefix("2^")) > 20
    assert int(skipped) > 0


@pytest.mark.full
def test_predict_is_causal_and_computes_in_the_dtype_of_its_parameters(small):
    params, tokens = demo.init(jax.random.key(0), 7), jnp.arange(16).reshape(2, 8) % 7
    predict = jax.jit(demo.predict)
    before, after = (predict(params, batch) for batch in (tokens, tokens.at[:, 5].add(1) % 7))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before - after)[:, 5:].max(axis=(0, 2)) > 1e-6).all(), "each later position must depend on it"
    for dtype, smallest, largest in ((jnp.float16, 1e-6, 0.02), (jnp.bfloat16, 1e-3, 0.2)):
        logits = predict(jmpscale.cast(params, dtype), tokens)
        assert logits.dtype == jnp.float32
        assert smallest < np.abs(logits - before).max() < largest


@pytest.mark.full
def test_shard_loss_gradients_add_up_to_the_mean_gradient(small):
    params, batch = demo.init(jax.random.key(1), 7), jax.random.randint(jax.random.key(2), (6, 9), 0, 7)

    def mean(params):
        logits = demo.predict(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    gradient = jax.jit(jax.grad(demo.shard_loss), static_argnums=2)
    shards = [gradient(params, part, batch[:, 1:].size) for part in np.split(np.asarray(batch), 3)]
    for name, exact in jax.jit(jax.grad(mean))(params).items():
        np.testing.assert_allclose(sum(np.asarray(shard[name]) for shard in shards), exact, atol=1e-6)


# --- the text and the options ---


def test_read_text_encodes_the_python_manual():
    alphabet, tokens = demo.read_text()
    text = "".join(alphabet[tokens])
    assert len(text) > 100_000
    assert '\nThe "if" statement' in text
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: must be between 1 and 1000000, got 0"),
        (["--steps", "many"], "--steps: invalid int value"),
        (["--batch-tokens", "1000"], "--batch-tokens: must be between"),
        (["--seed", "-1"], "--seed: must be between 0"),
    ],
    ids=" ".join,
)
def test_main_reports_invalid_options_before_it_trains(options, message, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SHARD_TOKENS", 1024)
    with pytest.raises(SystemExit) as exit_:
        demo.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
