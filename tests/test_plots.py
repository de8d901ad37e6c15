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


def _row(line, alone=0.01, *, backward=False, in_lines=False):
    return jmpscale.DiagnosisRow(line, backward, "mul", "float16", 1.0, 0.0, 0.0, in_lines, alone)


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
        "summary": "Loss scales from 2^4 to 2^15 fit; yours is 2^12. The gradients differ.",
        "fitting_scales": (2.0**4, 2.0**15),
    }
    return jmpscale.Diagnosis(**values | changes)


def _ranges(ax):
    """Returns the shaded ranges by the texts above them, as exponents."""
    names = [text.get_text() for text in ax.texts]
    ends = [(span.get_x(), span.get_x() + span.get_width()) for span in ax.patches]
    return {name: tuple(np.log2(pair)) for name, pair in zip(names, ends, strict=True)}


def test_diagnosis_shows_the_errors_and_why_scales_do_not_fit():
    given = plt.subplots()[1]
    ax = plots.diagnosis(_diagnosis(), ax=given)
    assert ax is given
    assert ax.figure.axes == [ax]
    one, present, curve = ax.lines
    assert (one.get_xdata(), present.get_xdata()) == ([1, 1], [2**12, 2**12])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["no loss scaling: 2^0", "current scale: 2^12"]
    bottom = ax.get_ylim()[0]
    assert 0 < bottom < 0.01
    points = [(2**-2, 0.5), (2**4, 0.01), (2**12, bottom), (2**15, 0.01), (2**20, math.inf)]
    assert curve.get_xydata().tolist() == [list(point) for point in points]
    assert _ranges(ax) == {"underflow": (-2, 4), "fit": (4, 15), "overflow": (20, 21)}
    assert tuple(np.log2(ax.get_xlim())) == (-6, 21)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_title().strip() == "Loss scales from 2^4 to 2^15 fit; yours is 2^12"


RANGES = {  # changes of the diagnosis, and the ranges
    "everything fits": ({"scale_errors": ((1.0, 0.0), (2.0**15, 0.0))}, {"fit": (4, 15), "underflow": (0, 4)}),
    "no smaller scale": ({"scale_errors": ((2.0**4, 0.0), (2.0**15, 0.0))}, {"fit": (4, 15)}),
    "overflow from 1": ({"fitting_scales": (2.0**-9, 0.5), "scale_errors": ((0.5, 0.0), (1.0, math.inf))}, None),
    "not accurate": ({"fitting_scales": None, "scale_errors": ((1.0, 0.5), (4.0, math.inf))}, {"overflow": (2, 18)}),
    "not finite": ({"fitting_scales": None, "scale_errors": ((1.0, math.inf),)}, {"not finite": (-6, 18)}),
    "no scales": ({"fitting_scales": None, "scale_errors": ()}, {"not run": (-6, 18)}),
}


@pytest.mark.parametrize("name", RANGES)
def test_diagnosis_without_some_of_the_ranges(name):
    changes, expected = RANGES[name]
    found = _ranges(plots.diagnosis(_diagnosis(**changes)))
    assert found == (expected or {"fit": (-9, -1), "overflow": (0, 18)})


def test_diagnosis_shows_the_worst_lines():
    rows = [_row(f"line {i}", 0.01 * i) for i in range(7)]
    rows += [_row("infinite", math.inf), _row("wrong", 0.02, backward=True, in_lines=True)]
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
