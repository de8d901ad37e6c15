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
    assert _bands(ax) == {"underflow": (-6, 1), "fit": (1, 17.5), "overflow": (17.5, 21)}
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
        {"underflow": (-6, 7.5), "fit": (7.5, 21)},
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
    assert [bar.get_width() for bar in lower.patches] == [0.02, lower.get_xlim()[1], 0.06, 0.05, 0.04, 0.03]
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
