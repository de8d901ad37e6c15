"""The plots show the values of the arrays: heights, curves and markers are read back from the axes."""

import math

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

import jmpscale
from jmpscale import plots

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def _row(line, alone=0.01, *, pass_="forward", in_lines=False):
    return jmpscale.DiagnosisRow(line, pass_, "mul", "float16", 1.0, 0.0, 0.0, in_lines, alone)


def _diagnosis(**changes):
    values = {
        "loss": 1.0,
        "loss_float32": 1.0,
        "gradient_error": 0.001,
        "loss_scale": 2.0**12,
        "scale_errors": ((2.0**-2, 0.5), (2.0**4, 0.01), (2.0**12, 0.0), (2.0**15, 0.01), (2.0**20, math.inf)),
        "lines": (),
        "rows": (),
        "not_entered": (),
        "scaler": None,
        "summary": "Loss scales from 2^4 to 2^15 fit; yours is 2^12. The gradients differ.",
        "fitting_scales": (2.0**4, 2.0**15),
    }
    return jmpscale.Diagnosis(**values | changes)


def _bands(ax):
    """Returns the ends of the shaded bands by the names in or above them, as exponents."""
    names = [text.get_text() for text in ax.texts]
    ends = [(span.get_x(), span.get_x() + span.get_width()) for span in ax.patches]
    bands = {name: tuple(np.log2(pair).round(6)) for name, pair in zip(names, ends, strict=True)}
    starts, stops = zip(*bands.values(), strict=True)
    left, right = np.log2(ax.get_xlim()).round(6)
    assert (*starts, right) == (left, *stops), "the bands must cover the axis without gaps"
    for text, (start, stop) in zip(ax.texts, bands.values(), strict=True):
        assert math.log2(text.get_position()[0]) == pytest.approx((start + stop) / 2)
    return bands


def test_diagnosis_shows_the_errors_and_why_scales_do_not_fit():
    given = plt.subplots()[1]
    ax = plots.diagnosis(_diagnosis(), ax=given)
    assert ax is given
    assert ax.figure.axes == [ax]
    curve, *_ = ax.lines
    bottom = ax.get_ylim()[0]
    assert 0 < bottom < 0.01
    points = [(2**-2, 0.5), (2**4, 0.01), (2**12, bottom), (2**15, 0.01), (2**20, math.inf)]
    assert curve.get_xydata().tolist() == [list(point) for point in points]
    assert _bands(ax) == {"too small": (-6, 1), "fit": (1, 17.5), "overflow": (17.5, 21)}
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_title().strip() == "Loss scales from 2^4 to 2^15 fit; yours is 2^12"


SCALES = {  # the present scale, the errors, and the labels and errors of the marked scales
    "both tried": (4.0, {1.0: 0.5, 4.0: 0.02}, {"no loss scaling, 2^0: 50%": 0.5, "your scale, 2^2: 2%": 0.02}),
    "the same": (1.0, {1.0: 0.5, 4.0: 0.02}, {"your scale, no loss scaling, 2^0: 50%": 0.5}),
    "overflow": (
        *(4.0, {1.0: 0.5, 4.0: math.inf}),
        {"no loss scaling, 2^0: 50%": 0.5, "your scale, 2^2: not finite": 2.0},  # on the upper edge
    ),
    "one tried": (4.0, {4.0: 0.02}, {"no loss scaling, 2^0": None, "your scale, 2^2: 2%": 0.02}),
}


@pytest.mark.parametrize("name", SCALES)
def test_diagnosis_marks_the_present_scale_and_a_scale_of_1(name):
    present, errors, expected = SCALES[name]
    ax = plots.diagnosis(_diagnosis(loss_scale=present, scale_errors=tuple(errors.items()), fitting_scales=None))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    _, *drawn = ax.lines
    marked = {}
    for label, line, points in zip(labels, drawn[::2], drawn[1::2], strict=True):
        assert line.get_label() == label
        scale = present if "your scale" in label else 1
        assert line.get_xdata() == [scale, scale]
        marked[label] = next((error for x, error in points.get_xydata() if x == scale), None)
    assert marked == expected


BANDS = {  # changes of the diagnosis, and the bands
    "nothing overflows": (
        {"scale_errors": ((1.0, 0.0), (2.0**15, 0.0))},
        {"too small": (-6, 7.5), "fit": (7.5, 21)},
    ),
    "no smaller scale": ({"scale_errors": ((2.0**4, 0.0), (2.0**15, 0.0))}, {"fit": (-6, 21)}),
    "overflow from 1": (
        {"fitting_scales": (2.0**-9, 0.5), "scale_errors": ((2.0**-9, 0.0), (0.5, 0.0), (1.0, math.inf))},
        {"fit": (-16, -0.5), "overflow": (-0.5, 19)},
    ),
    "larger scales are worse": (
        {"scale_errors": ((2.0**4, 0.0), (2.0**15, 0.0), (2.0**16, 0.3), (2.0**17, math.inf))},
        {"fit": (-6, 15.5), "inaccurate": (15.5, 16.5), "overflow": (16.5, 21)},
    ),
    "not accurate": (
        {"fitting_scales": None, "scale_errors": ((1.0, 0.5), (4.0, math.inf))},
        {"inaccurate": (-6, 1), "overflow": (1, 18)},
    ),
    "to the smallest scale": (
        {"fitting_scales": (2.0**-126, 2.0**15), "scale_errors": ((2.0**-126, 0.0), (2.0**15, 0.0))},
        {"fit": (-126, 62)},
    ),
    "not finite": ({"fitting_scales": None, "scale_errors": ((1.0, math.inf),)}, {"not finite": (-6, 18)}),
    "no scales": ({"fitting_scales": None, "scale_errors": ()}, {"not run": (-6, 18)}),
}


@pytest.mark.parametrize("name", BANDS)
def test_diagnosis_names_every_band(name):
    changes, expected = BANDS[name]
    assert _bands(plots.diagnosis(_diagnosis(**changes))) == expected


def test_diagnosis_writes_the_name_of_a_narrow_band_upright():
    changes, _ = BANDS["larger scales are worse"]
    texts = plots.diagnosis(_diagnosis(**changes)).texts
    assert {text.get_text(): text.get_rotation() for text in texts} == {"fit": 0, "inaccurate": 90, "overflow": 0}


def test_diagnosis_writes_powers_of_two_alike_and_hides_nothing():
    ax = plots.diagnosis(_diagnosis())
    ax.figure.canvas.draw()
    ticks = [text.get_text() for text in ax.get_xticklabels()]
    assert 3 <= len(ticks) <= 8
    assert all(label == f"2^{math.log2(tick):g}" for label, tick in zip(ticks, ax.get_xticks(), strict=True))
    assert not ax.get_legend().get_window_extent().overlaps(ax.get_window_extent())
    assert ax.xaxis.label.get_window_extent().y0 > ax.get_legend().get_window_extent().y1


def _assert_labels_above_bars(ax):
    """The labels have the order of the bars, and cover none of them."""
    for i, (text, bar) in enumerate(zip(ax.texts, ax.patches, strict=True)):
        assert i - 0.5 < text.get_position()[1] < bar.get_y() < bar.get_y() + bar.get_height() < i + 0.5


def test_diagnosis_shows_the_worst_lines():
    rows = [_row(f"line {i}", 0.01 * i) for i in range(7)]
    rows += [_row("infinite", math.inf), _row("wrong", 0.02, pass_="backward", in_lines=True)]
    ax = plots.diagnosis(_diagnosis(rows=tuple(rows)))
    upper, lower = ax.figure.axes
    assert upper is ax
    assert [text.get_text().strip() for text in lower.texts] == [
        "wrong, backward: 2%",
        "infinite, forward: not finite",
        "line 6, forward: 6%",
        "line 5, forward: 5%",
        "line 4, forward: 4%",
        "line 3, forward: 3%",
    ]
    ends = [bar.get_x() + bar.get_width() for bar in lower.patches]
    assert ends == pytest.approx([0.02, lower.get_xlim()[1], 0.06, 0.05, 0.04, 0.03])
    _assert_labels_above_bars(lower)
    red, *others = [bar.get_facecolor() for bar in lower.patches]
    assert set(others) == {others[0]} != {red}
    assert lower.get_ylabel() == "red: needs float32"
    assert not plots.diagnosis(_diagnosis(rows=(_row("a"),))).figure.axes[1].get_ylabel()


def test_diagnosis_of_lines_that_were_not_run_shows_the_scales_only():
    assert len(plots.diagnosis(_diagnosis(rows=(_row("a", None),))).figure.axes) == 1


def test_diagnosis_in_axes_without_a_grid_shows_no_lines():
    given = plt.figure().add_axes((0, 0, 1, 1))
    assert plots.diagnosis(_diagnosis(rows=(_row("a"),)), ax=given).figure.axes == [given]


def test_diagnosis_of_something_else_raises():
    with pytest.raises(TypeError, match=r"^diagnosis must be a Diagnosis, got 3\. Pass the result of diagnose"):
        plots.diagnosis(3)


def _changes(*errors, dtype="bfloat16"):
    return tuple(jmpscale.DiagnosisChange(f"params['{error}']", dtype, True, error) for error in errors)


def test_changes_shows_the_worst_changes_first():
    given = plt.subplots()[1]
    ax = plots.changes(_diagnosis(changes=_changes(0.1, 0.9) + _changes(0.3, dtype="float32")), ax=given)
    assert ax is given
    assert [text.get_text().strip() for text in ax.texts] == [
        "params['0.9'], bfloat16: 90%",
        "params['0.3'], float32: 30%",
        "params['0.1'], bfloat16: 10%",
    ]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([0.9, 0.3, 0.1])
    _assert_labels_above_bars(ax)
    red, blue, also_red = [bar.get_facecolor() for bar in ax.patches]
    assert red == also_red != blue
    assert "relative to float32" in ax.get_title()
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 1), (2.5, -0.5))


def test_changes_shows_large_errors_at_the_edge():
    ax = plots.changes(_diagnosis(changes=_changes(3.0, math.inf, dtype="float32")))
    assert ax.texts[0].get_text().strip() == "params['inf'], float32: not finite"
    assert [bar.get_width() for bar in ax.patches] == [3, 3]


def test_changes_shows_at_most_twelve():
    ax = plots.changes(_diagnosis(changes=_changes(*np.arange(20) / 20)))
    assert len(ax.patches) == 12
    assert ax.patches[-1].get_width() == pytest.approx(8 / 20)


def test_changes_of_something_else_raises():
    with pytest.raises(TypeError, match=r"^diagnosis must be a Diagnosis, got 3\. Pass the result of diagnose_step"):
        plots.changes(3)
    with pytest.raises(ValueError, match=r"^diagnosis must have changes, got none\."):
        plots.changes(_diagnosis())


def _run(**changes):
    values = {
        "loss": np.array([1.0, 0.9, 0.85]),
        "loss_float32": np.array([1.0, 0.7, 0.5]),
        "loss_spread": np.array([1.0, 0.71, 0.52]),
        "loss_name": "result[1]",
        "progress": 0.3,
        "changes": (_run_change("params['w']", 0.03, "bfloat16"), _run_change("params['b']", 1.0, "float32")),
        "skips": 0,
        "skips_float32": 0,
        "state": ("params",),
        "findings": (),
        "worst_step": 1,
        "diagnosis": None,
        "as_written": (),
        "summary": "In 3 steps the loss falls. params['w'] moves 3% as far.",
    }
    return jmpscale.RunDiagnosis(**values | changes)


def _run_change(name, progress, dtype):
    return jmpscale.RunChange(name, dtype, 1 - progress, progress, 0.001)


FINDING = jmpscale.DiagnosisFinding(jmpscale.FindingKind.LAGGING, ("params['w']",), (), "bfloat16", 0.97, None)


def test_run_shows_both_losses_and_chance():
    given = plt.subplots()[1]
    ax = plots.run(_run(), ax=given)
    assert ax is given
    assert ax.figure.axes == [ax]
    curves = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert curves == {"float32": [1.0, 0.7, 0.5], "as written": [1.0, 0.9, 0.85]}
    [band] = ax.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(6).tolist()}
    assert {(1.0, 0.7), (1.0, 0.71), (2.0, 0.5), (2.0, 0.52)} <= corners
    assert (ax.get_ylabel(), ax.get_yscale()) == ("loss (result[1])", "linear")
    assert ax.get_title() == "In 3 steps the loss falls"


def test_run_shows_the_leaves_that_do_not_get_as_far_and_the_step_that_was_diagnosed():
    ax = plots.run(_run(findings=(FINDING,)))
    _, leaves = ax.figure.axes
    assert [text.get_text().strip() for text in leaves.texts] == ["params['w'], bfloat16: 3%"]
    [bar] = leaves.patches
    assert bar.get_width() == pytest.approx(0.03)
    assert ax.lines[-1].get_xdata() == [1, 1]
    assert ax.lines[-1].get_label() == "step 1, diagnosed"


def test_run_has_a_logarithmic_axis_for_losses_of_different_size():
    losses = np.array([1.0, 0.1, 1e-3])
    assert plots.run(_run(loss_float32=losses, loss_spread=losses)).get_yscale() == "log"
    losses = np.array([1.0, np.nan, -1.0])
    assert plots.run(_run(loss_float32=losses, loss_spread=losses)).get_yscale() == "linear"


def test_run_requires_a_run_with_losses():
    with pytest.raises(TypeError, match=r"run must be a RunDiagnosis, got .* Pass the result of diagnose_run"):
        plots.run(_diagnosis())
    with pytest.raises(ValueError, match="run must have losses, got none"):
        plots.run(_run(loss=None, loss_float32=None, loss_spread=None, loss_name=None))
