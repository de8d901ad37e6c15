"""The plot of a diagnosis, with matplotlib (`pip install "jmpscale[plots]"`)."""

import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from jmpscale._base.options import requires_names
from jmpscale._base.text import describe, format_percentage, format_scale, truncate
from jmpscale._diagnosis.report import Diagnosis, DiagnosisRow, worst_first

__all__ = ["diagnosis"]

GRAY, RED, BLUE, YELLOW = "#5c626b", "#d1495b", "#2a7f9e", "#e9b44c"


@requires_names
def diagnosis(diagnosis: Diagnosis, *, ax: Axes | None = None) -> Axes:
    """Plots the error of the gradients against the loss scale, and the errors of single lines if they were measured.

    Args:
      diagnosis: the result of `jmpscale.diagnose(loss_fn)(...)`.
      ax: matplotlib axes, by default new ones. Axes in a grid, such as the axes of `plt.subplots`, are split: new axes
        below show the lines.

    Returns:
      The axes with the loss scales. They show which ones fit, and why smaller and larger ones do not.

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
    scales, errors = np.reshape(diagnosis.scale_errors, (-1, 2)).T
    fitting, present = diagnosis.fitting_scales, diagnosis.loss_scale
    left, right = min(1.0, present, *(fitting or scales)) / 64, max(1.0, present, *(fitting or scales)) * 64
    highest = scales[np.isfinite(errors)].max(initial=0.0)
    first = scales[scales > highest].min(initial=right) if highest else left
    ranges = [("overflow" if highest else "not finite" if scales.size else "not run", RED, first, right)]
    if fitting:
        ranges += [("fit", YELLOW, *fitting), ("underflow", GRAY, max(scales.min(), left), fitting[0])]
    for name, color, start, end in ranges:
        if start < end:
            ax.axvspan(start, end, color=color, alpha=0.3, linewidth=0)
            ax.text(np.sqrt(start) * np.sqrt(end), 1.02, name, transform=ax.get_xaxis_transform(), ha="center")
    for name, scale, style in (("no loss scaling", 1.0, ":"), ("current scale", present, "--")):
        ax.axvline(scale, color="black", linestyle=style, label=f"{name}: {format_scale(scale)}")
    low, _ = _set_error_axis(ax, "y", errors)
    ax.plot(scales, np.maximum(errors, low), color=BLUE, marker="o", markersize=4)
    ax.set_xscale("log", base=2)
    ax.set_xlim(left, right)
    ax.set_title(textwrap.fill(diagnosis.summary.partition(". ")[0].removesuffix("."), 52) + "\n")
    ax.set(xlabel="loss scale", ylabel="error of the gradients")
    ax.legend(fontsize="small")
    return ax


def _plot_rows(rows: Sequence[DiagnosisRow], ax: Axes) -> None:
    alone = np.array([row.alone for row in rows])
    low, high = _set_error_axis(ax, "x", alone)
    colors = [RED if row.in_lines else BLUE for row in rows]
    ax.barh(range(len(rows)), np.clip(alone, low, high), color=colors, alpha=0.5)
    for i, row in enumerate(rows):
        error = format_percentage(alone[i]).replace("inf", "not finite")
        ax.text(low, i, f" {truncate(row.line, 50)}, {'backward' if row.backward else 'forward'}: {error}", va="center")
    ax.set(ylim=(len(rows) - 0.5, -0.5), yticks=[], xlabel="error with only this line in half precision")
    if RED in colors:
        ax.set_ylabel("red: needs float32", color=RED)


def _set_error_axis(ax: Axes, name: str, errors: np.ndarray) -> tuple[float, float]:
    shown = errors[np.isfinite(errors) & (errors > 1e-5)]
    limits = shown.min(initial=1e-3) / 2, 2 * shown.max(initial=1.0)
    ax.set(**{f"{name}scale": "log", f"{name}lim": limits})
    getattr(ax, f"{name}axis").set_major_formatter(lambda error, _: f"{100 * error:g}%")
    return limits
