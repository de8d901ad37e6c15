"""The plot of a diagnosis, with matplotlib (`pip install "jmpscale[plots]"`)."""

import itertools
import math
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from jmpscale._base.options import requires_names
from jmpscale._base.text import describe, format_percentage, format_scale, truncate
from jmpscale._diagnosis.report import Diagnosis, DiagnosisRow, worst_first
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE

__all__ = ["diagnosis"]

GRAY, RED, BLUE, YELLOW = "#5c626b", "#d1495b", "#2a7f9e", "#e9b44c"
COLORS = {  # of the bands
    "underflow": GRAY,
    "fit": YELLOW,
    "inaccurate": GRAY,
    "overflow": RED,
    "not finite": RED,
    "not run": RED,
}
NARROW = 0.12  # of the width of the axes
LOWEST, HIGHEST = math.log2(SMALLEST_SCALE), math.log2(LARGEST_SCALE)


@requires_names
def diagnosis(diagnosis: Diagnosis, *, ax: Axes | None = None) -> Axes:
    """Plots the error of the gradients against the loss scale, and the errors of single lines if they were measured.

    Args:
      diagnosis: the result of `jmpscale.diagnose(loss_fn)(...)`.
      ax: matplotlib axes, by default new ones. Axes in a grid, such as the axes of `plt.subplots`, are split: new axes
        below show the lines.

    Returns:
      The axes with the loss scales. Named bands show which scales fit, and why smaller and larger ones do not. Two
      points show the error at your scale and without loss scaling.

    Raises:
      TypeError: `diagnosis` is not a `Diagnosis`.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> from jmpscale import plots
    >>> loss_fn = lambda w: jnp.sum((w * w).astype(jnp.float32))
    >>> diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), jnp.ones(3, jnp.float16))
    >>> plots.diagnosis(diagnosis).get_xlabel()
    'loss scale'
    """
    if not isinstance(diagnosis, Diagnosis):
        raise TypeError(
            f"diagnosis must be a Diagnosis, got {describe(diagnosis)}. Pass the result of diagnose(loss_fn)(...)."
        )
    ax = plt.subplots(figsize=(8, 6), layout="constrained")[1] if ax is None else ax
    rows = [row for row in worst_first(diagnosis.rows) if row.alone is not None][:6]
    if rows and (place := ax.get_subplotspec()):
        grid = place.subgridspec(2, 1, height_ratios=(3, 2))
        ax.set_subplotspec(grid[0])
        _plot_rows(rows, ax.figure.add_subplot(grid[1]))
    _plot_scales(diagnosis, ax)
    ax.set_title(textwrap.fill(diagnosis.summary.partition(". ")[0].removesuffix("."), 52) + "\n")
    return ax


def _plot_scales(diagnosis: Diagnosis, ax: Axes) -> None:
    scales, errors = np.reshape(diagnosis.scale_errors, (-1, 2)).T
    low, high = _set_error_axis(ax, "y", errors)
    _plot_bands(diagnosis, ax)
    ax.plot(scales, np.maximum(errors, low), color=BLUE, marker="o", markersize=4)
    for scale, style in {1.0: ":", diagnosis.loss_scale: "--"}.items():
        error = dict(diagnosis.scale_errors).get(scale)
        label = _label(scale, error, is_present=scale == diagnosis.loss_scale)
        # A scale with infinite gradients has its point on the upper edge, outside of the curve.
        points = [] if error is None else [np.clip(error, low, high)]
        line = ax.axvline(scale, color="black", linestyle=style, label=label)
        ax.plot([scale] * len(points), points, color=line.get_color(), marker="o", markersize=8, clip_on=False)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="loss scale", ylabel="error of the gradients")
    ax.legend(fontsize="small")


def _label(scale: float, error: float | None, *, is_present: bool) -> str:
    names = ["your scale"] * is_present + ["no loss scaling"] * (scale == 1.0)
    measured = "" if error is None else f": {_format_error(error)}"
    return f"{', '.join(names)}, {format_scale(scale)}{measured}"


def _plot_bands(diagnosis: Diagnosis, ax: Axes) -> None:
    """Shades the whole axis in bands that say whether scales fit, or why they do not."""
    bands = _bands(diagnosis)
    inner = [1.0, diagnosis.loss_scale, *(diagnosis.fitting_scales or (s for s, _ in diagnosis.scale_errors))]
    left, right = np.log2(min(inner)), np.log2(max(inner))
    margin = max(6.0, (right - left) / 3)  # so that a name fits above the first and the last band
    left, right = max(left - margin, LOWEST), min(right + margin, HIGHEST)
    for (name, start), (_, end) in itertools.pairwise([*bands, ("", math.inf)]):
        start, end = np.clip((start, end), left, right)
        ax.axvspan(2.0**start, 2.0**end, color=COLORS[name], alpha=0.3, linewidth=0)
        # The name is above the band, or upright in it if the band is narrow.
        is_narrow = end - start < NARROW * (right - left)
        ax.text(
            *(2.0 ** ((start + end) / 2), 0.5 if is_narrow else 1.02),
            name,
            transform=ax.get_xaxis_transform(),
            ha="center",
            rotation=90 if is_narrow else 0,
        )
    ax.set_xlim(2.0**left, 2.0**right)


def _bands(diagnosis: Diagnosis) -> list[tuple[str, float]]:
    """Returns the name of each band, and the binary logarithm of the scale at which it begins."""
    found = [(_band(diagnosis, scale, error), np.log2(scale)) for scale, error in diagnosis.scale_errors]
    bands = [(found[0][0] if found else "not run", -math.inf)]
    for (name, exponent), (next_name, next_exponent) in itertools.pairwise(found):
        if name != next_name:  # somewhere between two scales that were tried
            bands.append((next_name, (exponent + next_exponent) / 2))
    return bands


def _band(diagnosis: Diagnosis, scale: float, error: float) -> str:
    if math.isinf(error):
        smaller = [math.isfinite(error) for tried, error in diagnosis.scale_errors if tried < scale]
        return "overflow" if any(smaller) else "not finite"
    if not diagnosis.fitting_scales or scale > diagnosis.fitting_scales[1]:
        return "inaccurate"
    return "underflow" if scale < diagnosis.fitting_scales[0] else "fit"


def _plot_rows(rows: Sequence[DiagnosisRow], ax: Axes) -> None:
    alone = np.array([row.alone for row in rows])
    low, high = _set_error_axis(ax, "x", alone)
    colors = [RED if row.in_lines else BLUE for row in rows]
    ax.barh(range(len(rows)), np.clip(alone, low, high), color=colors, alpha=0.5)
    for i, row in enumerate(rows):
        ax.text(low, i, f" {truncate(row.line, 50)}, {row.pass_}: {_format_error(alone[i])}", va="center")
    ax.set(ylim=(len(rows) - 0.5, -0.5), yticks=[], xlabel="error with only this line in half precision")
    if RED in colors:
        ax.set_ylabel("red: needs float32", color=RED)


def _format_error(error: float) -> str:
    return format_percentage(error).replace("inf", "not finite")


def _set_error_axis(ax: Axes, name: str, errors: np.ndarray) -> tuple[float, float]:
    shown = errors[np.isfinite(errors) & (errors > 1e-5)]
    limits = shown.min(initial=1e-3) / 2, 2 * shown.max(initial=1.0)
    ax.set(**{f"{name}scale": "log", f"{name}lim": limits})
    getattr(ax, f"{name}axis").set_major_formatter(lambda error, _: f"{100 * error:g}%")
    return limits
