"""The plots show the values of the arrays: heights, curves and markers are read back from the axes."""

import math

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

import jmpscale
from jmpscale import plots

from tables import names

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


# --- exponent_histogram ---

W, B = np.array([1e-9, 2.0**-24, 2.0**-15, 2.0**-14]), np.array([1.0, 0.0, np.nan, 7e4])
OTHERS = [np.float32, jax.random.key(0), "text", np.str_("text"), jnp.tanh, None, 3, jnp.array(3)]
HISTOGRAMS = {  # the gradients, the scale, and the percentages of each kind and of zero, infinite and NaN values
    "unscaled": ([W, B], None, {"underflow": 12.5, "subnormal": 25, "normal": 25, "overflow": 12.5}, (12.5, 0, 12.5)),
    "others": (
        [W, B, *OTHERS],
        None,
        {"underflow": 12.5, "subnormal": 25, "normal": 25, "overflow": 12.5},
        (12.5, 0, 12.5),
    ),
    "scaled": ([W, B], 2.0**16, {"preserved": 37.5, "normal": 12.5, "overflow": 25}, (12.5, 0, 12.5)),
    "float16": ([np.float16([2.0**-20, 1.0])], 4.0, {"subnormal": 50, "normal": 50}, (0, 0, 0)),
    "limits": ([np.array([65504.0, 65505.0])], None, {"normal": 50, "overflow": 50}, (0, 0, 0)),
    "complex": ([np.array([1 + 1e-9j, 7e4j]), 1j], None, {"underflow": 1, "normal": 2, "overflow": 1}, (2, 0, 0)),
    "infinite": ([np.array([1.0, np.inf, -np.inf, np.nan, 0.0])], 8.0, {"normal": 20}, (20, 40, 20)),
    "zeros": ([np.zeros(3)], None, {}, (100, 0, 0)),
}


@pytest.mark.parametrize("name", names(HISTOGRAMS, default={"scaled"}))
def test_exponent_histogram_sorts_values_by_kind(name):
    grads, scale, expected, hidden = HISTOGRAMS[name]
    unit = 100 / 6 if name == "complex" else 1
    ax = plots.exponent_histogram(grads, scaler=None if scale is None else jmpscale.static(scale))
    percentages = {bars.get_label().split()[0]: sum(bar.get_height() for bar in bars) for bars in ax.containers}
    assert percentages == pytest.approx({kind: unit * value for kind, value in expected.items()})
    for bars in ax.containers:
        assert f"({percentages[bars.get_label().split()[0]]:.1f}%)" in bars.get_label()
    zero, infinite, nan = (unit * value for value in hidden)
    assert ax.get_title() == f"not shown: zero {zero:.1f}%, infinite {infinite:.1f}%, NaN {nan:.1f}%"
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([-24.0, -14.0, np.log2(65504)])


def test_exponent_histogram_stacks_bars_over_their_exponents():
    given = plt.subplots()[1]
    ax = plots.exponent_histogram(jnp.array([2.0**-3, 8.0, 60_000.0, 65_530.0]), ax=given)
    assert ax is given
    normal, overflow = ([bar for bar in bars if bar.get_height()] for bars in ax.containers)
    assert [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in normal] == [(-3, 0, 25), (3, 0, 25), (15, 0, 25)]
    assert [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in overflow] == [(15, 25, 25)]
    assert {bar.get_width() for bar in (*normal, *overflow)} == {1.0}
    assert [bar.get_x() for bar in ax.containers[0]] == list(range(-3, 16))
    assert [bar.get_x() for bar in plots.exponent_histogram(jnp.array([8.0])).containers[0]] == [0, 1, 2, 3]
    assert [bar.get_x() for bar in plots.exponent_histogram(jnp.array([0.25])).containers[0]] == [-2, -1, 0]


# --- scale_trajectory and headroom ---


def test_scale_trajectory_marks_skips_by_reason():
    history = {
        "loss_scale": jnp.array([8.0, 4.0, 4.0, 8.0, 4.0, 4.0]),
        "consecutive_skips": jnp.array([0, 1, 0, 0, 1, 2]),
        "last_skip_reason": jnp.array([0, 1, 1, 1, 1, 2]),
    }
    ax = plots.scale_trajectory(history)
    curve, overflows, losses = ax.lines
    assert curve.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert curve.get_ydata().tolist() == history["loss_scale"].tolist()
    assert (overflows.get_xdata().tolist(), overflows.get_ydata().tolist()) == ([2, 5], [4.0, 4.0])
    assert (losses.get_xdata().tolist(), losses.get_ydata().tolist()) == ([6], [4.0])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[1:] == ["skipped, gradients not finite: 2", "skipped, loss not finite: 1"]
    assert (ax.get_yscale(), ax.yaxis.get_transform().base) == ("log", 2)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
    finite = history | {"consecutive_skips": jnp.zeros(6), "last_skip_reason": jnp.ones(6)}
    assert len(plots.scale_trajectory(finite, ax=plt.subplots()[1]).lines) == 1


def _reports(*max_abs, paths):
    max_abs = np.float32(max_abs)
    counts = [np.zeros(max_abs.shape, np.int32)] * 5
    return jmpscale.GradReport(np.isfinite(max_abs).all(1), max_abs, *counts, paths=paths, sizes=(2,) * len(paths))


def test_headroom_names_the_leaves_with_the_least_headroom():
    reports = _reports([1.0, 1024.0], [2.0, 65504.0], [0.0, np.inf], paths=("far", "near"))
    given = plt.subplots()[1]
    ax = plots.headroom(reports, limit=1, ax=given)
    assert ax is given
    far, near, limit = ax.lines
    np.testing.assert_allclose(near.get_ydata(), [np.log2(65504 / 1024), 0, np.nan])
    np.testing.assert_allclose(far.get_ydata(), [np.log2(65504), np.log2(65504 / 2), np.nan])
    assert near.get_xdata().tolist() == [1, 2, 3]
    assert limit.get_ydata() == [0, 0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["near", "float16 overflows"]


@pytest.mark.full
def test_headroom_names_leaves_up_to_the_limit():
    paths = ("_scale", *(f"layer_{i}" for i in range(9)))  # matplotlib omits labels that begin with an underscore
    reports = _reports([*(2.0 ** -np.arange(9.0)), 0.0], paths=paths)
    for options, count in (({}, 8), ({"limit": 2}, 2), ({"limit": 99}, 10)):
        labels = [text.get_text().strip() for text in plots.headroom(reports, **options).get_legend().get_texts()]
        assert labels == [*paths[:count], "float16 overflows"]


# --- diagnosis ---


def _diagnosis(**changes):
    values = {
        "loss": 1.0,
        "loss_float32": 1.0,
        "gradient_error": 0.001,
        "loss_scale": 2.0**12,
        "scale_errors": ((2.0**-2, 0.5), (2.0**4, 0.01), (2.0**12, 0.001), (2.0**20, math.inf)),
        "rows": (),
        "causes": (),
        "not_entered": (),
        "summary": "",
        "_fitting": (2.0**4, 2.0**12),
    }
    return jmpscale.Diagnosis(**values | changes)


def test_diagnosis_shows_finite_errors_and_the_scales_that_fit():
    given = plt.subplots()[1]
    ax = plots.diagnosis(_diagnosis(), ax=given)
    assert ax is given
    scale, errors = ax.lines
    assert list(scale.get_xdata()) == [12, 12]
    assert np.array(errors.get_xydata()) == pytest.approx(np.array([(-2, 0.5), (4, 0.01), (12, 0.001)]))
    (span,) = ax.patches
    assert (span.get_x(), span.get_width()) == (4, 8)
    assert not plots.diagnosis(_diagnosis(_fitting=None)).patches


def test_diagnosis_of_something_else_raises():
    with pytest.raises(TypeError, match=r"^diagnosis must be a Diagnosis, got 3\. Pass the result of diagnose"):
        plots.diagnosis(3)
    with pytest.raises(ValueError, match=r"^diagnosis must have a scale with finite gradients, got none\."):
        plots.diagnosis(_diagnosis(scale_errors=((1.0, math.inf),)))
