"""Plots of diagnoses, with matplotlib (`pip install "jmpscale[plots]"`)."""

import itertools
import math
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from jmpscale._base.options import requires_names
from jmpscale._base.text import describe, format_percentage, format_scale, truncate
from jmpscale._diagnosis.tell.report import Diagnosis, DiagnosisChange, DiagnosisRow, worst_first
from jmpscale._run.report import RunChange, RunDiagnosis
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE

__all__ = ["changes", "diagnosis", "run"]

GRAY, RED, BLUE, GREEN = "#5c626b", "#d1495b", "#2a7f9e", "#5aa469"
COLORS = {  # of the bands
    "too small": GRAY,
    "fit": GREEN,
    "inaccurate": GRAY,
    "overflow": RED,
    "not finite": RED,
    "not run": RED,
}
NARROW = 0.12  # of the width of the axes
LEGEND_DISTANCE = 3.8  # from the axes to the legend below the label of the axis, in font sizes
MOST_ROWS, MOST_CHANGES, MOST_TICKS = 6, 12, 6
WIDE = 20  # from this ratio of the losses on, their axis is logarithmic
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
    _check_type(diagnosis, "diagnose(loss_fn)(...)")
    ax = plt.subplots(figsize=(8, 6), layout="constrained")[1] if ax is None else ax
    rows = [row for row in worst_first(diagnosis.rows) if row.alone is not None][:MOST_ROWS]
    if rows and (place := ax.get_subplotspec()):
        grid = place.subgridspec(2, 1, height_ratios=(3, 2))
        ax.set_subplotspec(grid[0])
        _plot_rows(rows, ax.figure.add_subplot(grid[1]))
    _plot_scales(diagnosis, ax)
    ax.set_title(textwrap.fill(diagnosis.summary.partition(". ")[0].removesuffix("."), 52) + "\n")
    return ax


@requires_names
def changes(diagnosis: Diagnosis, *, ax: Axes | None = None) -> Axes:
    """Plots the error of each change that a training step makes: of the leaves of its state, and of other results.

    Args:
      diagnosis: the result of `jmpscale.diagnose_step(train_step)(...)`.
      ax: matplotlib axes, by default new ones.

    Returns:
      The axes, with a bar for each of the 12 changes with the largest errors, in the order of the errors. At 100%, the
      whole change is lost. Bars of leaves and results in half precision are red.

    Raises:
      TypeError: `diagnosis` is not a `Diagnosis`.
      ValueError: the diagnosis has no changes: it is a diagnosis of a loss function, or half precision changes the
        step only through its gradients.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> from jmpscale import plots
    >>> step = lambda w, grads: w - 1e-3 * grads
    >>> half = jnp.ones(3, jnp.bfloat16)
    >>> diagnosis = jmpscale.diagnose_step(step)(half, half)
    >>> [text.get_text().strip() for text in plots.changes(diagnosis).texts]
    ['w, bfloat16: 100%']
    """
    _check_type(diagnosis, "diagnose_step(train_step)(...)")
    if not diagnosis.changes:
        raise ValueError(
            "diagnosis must have changes, got none. diagnose_step measures them, unless half precision changes the "
            "step only through its gradients."
        )
    shown = sorted(diagnosis.changes, key=lambda change: -change.error)[:MOST_CHANGES]
    height = 1.2 + 0.45 * len(shown)  # inches
    ax = plt.subplots(figsize=(8, height), layout="constrained")[1] if ax is None else ax
    errors = np.array([change.error for change in shown])
    largest = max(1.0, errors[np.isfinite(errors)].max(initial=0.0))
    ax.set(xlim=(0, largest), xlabel="error of the change (100%: it is lost)")
    ax.xaxis.set_major_formatter(_write_percentage)
    labels = [f"{truncate(change.name, 50)}, {change.dtype}" for change in shown]
    colors = [RED if _is_half(change) else BLUE for change in shown]
    _plot_bars(ax, labels, errors, colors)
    ax.set_title("Error of each change in a step, relative to float32")
    return ax


@requires_names
def run(run: RunDiagnosis, *, ax: Axes | None = None) -> Axes:
    """Plots the loss of a run and of the same run in float32, and how far leaves get that do not get as far.

    Args:
      run: the result of `jmpscale.diagnose_run(train_step, batches)(...)`.
      ax: matplotlib axes, by default new ones. Axes in a grid, such as the axes of `plt.subplots`, are split: new axes
        below show the leaves that the findings name.

    Returns:
      The axes with the losses. A band from the loss in float32 to the loss from a start that is rounded otherwise shows
      which differences are chance, and a line the step that was diagnosed.

    Raises:
      TypeError: `run` is not a `RunDiagnosis`.
      ValueError: the step returns no loss, so the run has none.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> from jmpscale import plots
    >>> def train_step(w, x):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x * w - 1) ** 2))(w)
    ...     return w - 0.1 * grad, loss
    >>> run = jmpscale.diagnose_run(train_step, [jnp.ones(3, jnp.bfloat16)] * 10)(jnp.zeros(3, jnp.bfloat16))
    >>> plots.run(run).get_xlabel()
    'step'
    """
    if not isinstance(run, RunDiagnosis):
        raise TypeError(f"run must be a RunDiagnosis, got {describe(run)}. Pass the result of diagnose_run(...)(...).")
    if run.loss is None or run.loss_float32 is None or run.loss_spread is None:
        raise ValueError("run must have losses, got none. Return the loss from the step that diagnose_run calls.")
    ax = plt.subplots(figsize=(8, 6), layout="constrained")[1] if ax is None else ax
    named = {name for finding in run.findings for name in finding.names}
    behind = sorted((x for x in run.changes if x.name in named), key=lambda x: x.progress)[:MOST_ROWS]
    if behind and (place := ax.get_subplotspec()):
        grid = place.subgridspec(2, 1, height_ratios=(3, 0.6 + 0.4 * len(behind)))
        ax.set_subplotspec(grid[0])
        _plot_progress(behind, ax.figure.add_subplot(grid[1]))
    steps = np.arange(len(run.loss))
    ax.fill_between(steps, run.loss_float32, run.loss_spread, color=BLUE, alpha=0.3, linewidth=0, label="chance")
    ax.plot(steps, run.loss_float32, color=BLUE, label="float32")
    ax.plot(steps, run.loss, color=RED if run.findings else GREEN, linestyle="--", label="as written")
    if run.findings and run.worst_step is not None:
        ax.axvline(run.worst_step, color=GRAY, linestyle=":", label=f"step {run.worst_step}, diagnosed")
    losses = np.concatenate([run.loss, run.loss_float32])
    losses = losses[np.isfinite(losses)]
    if losses.size and losses.min() > 0 and losses.max() > WIDE * losses.min():
        ax.set_yscale("log")
    ax.set(xlabel="step", ylabel=f"loss ({run.loss_name})")
    ax.legend(fontsize="small")
    ax.set_title(textwrap.fill(run.summary.partition(". ")[0].removesuffix("."), 60))
    return ax


def _plot_progress(leaves: Sequence[RunChange], ax: Axes) -> None:
    ax.set(xlim=(0, 1), xlabel="net change (100%: as far as in float32)")
    ax.xaxis.set_major_formatter(_write_percentage)
    labels = [f"{truncate(leaf.name, 50)}, {leaf.dtype}" for leaf in leaves]
    colors = [RED if leaf.dtype != "float32" else BLUE for leaf in leaves]
    _plot_bars(ax, labels, np.array([max(leaf.progress, 0.0) for leaf in leaves]), colors)


def _check_type(diagnosis: object, call: str) -> None:
    if not isinstance(diagnosis, Diagnosis):
        raise TypeError(f"diagnosis must be a Diagnosis, got {describe(diagnosis)}. Pass the result of {call}.")


def _is_half(change: DiagnosisChange) -> bool:
    return change.dtype in ("float16", "bfloat16")


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
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=MOST_TICKS))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda scale, _: format_scale(scale))
    ax.set(xlabel="loss scale", ylabel="error of the gradients")
    # Below the axes it hides nothing.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=LEGEND_DISTANCE, fontsize="small")


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
    return "too small" if scale < diagnosis.fitting_scales[0] else "fit"


def _plot_rows(rows: Sequence[DiagnosisRow], ax: Axes) -> None:
    alone = np.array([row.alone for row in rows])
    _set_error_axis(ax, "x", alone)
    ax.set_xlabel("error with only this line in half precision")
    colors = [RED if row.in_lines else BLUE for row in rows]
    _plot_bars(ax, [f"{truncate(row.line, 50)}, {row.pass_}" for row in rows], alone, colors)
    if RED in colors:
        ax.set_ylabel("red: needs float32", color=RED)


def _plot_bars(ax: Axes, labels: Sequence[str], errors: np.ndarray, colors: Sequence[str]) -> None:
    """Plots a thin bar for each error, below its label."""
    low, high = ax.get_xlim()
    ax.barh(np.arange(len(errors)) + 0.25, np.clip(errors, low, high) - low, left=low, height=0.3, color=colors)
    for i, (label, error) in enumerate(zip(labels, errors, strict=True)):
        ax.text(low, i - 0.1, f" {label}: {_format_error(error)}", va="center")
    ax.set(ylim=(len(errors) - 0.5, -0.5), yticks=[])


def _format_error(error: float) -> str:
    return format_percentage(error).replace("inf", "not finite")


def _write_percentage(error: float, _position: float) -> str:
    return f"{100 * error:g}%"


def _set_error_axis(ax: Axes, name: str, errors: np.ndarray) -> tuple[float, float]:
    shown = errors[np.isfinite(errors) & (errors > 1e-5)]
    limits = shown.min(initial=1e-3) / 2, 2 * shown.max(initial=1.0)
    ax.set(**{f"{name}scale": "log", f"{name}lim": limits})
    getattr(ax, f"{name}axis").set_major_formatter(_write_percentage)
    return limits
