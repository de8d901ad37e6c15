"""Pictures of gradients and of loss scales, with matplotlib (`pip install "jmpscale[demo]"`). They read values.

Each function draws into the matplotlib axes it is given, or else into new ones, and returns the axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import matplotlib.pyplot as plt
import numpy as np

from jmpscale._report import FLOAT16_LARGEST, FLOAT16_SMALLEST, FLOAT16_SMALLEST_NORMAL, GradReport
from jmpscale._state import ScalerState, count, shown
from jmpscale._tree import is_inexact, partition, require_one_scaler

GREY, RED, BLUE, YELLOW = "#5c626b", "#d1495b", "#2a7f9e", "#e9b44c"


def exponent_histogram(grads: Any, *, scaler: ScalerState | None = None, ax: Any = None) -> Any:
    """Draws how the magnitudes of gradients spread over the powers of two, and what float16 makes of them.

    Args:
      grads: pytree of unscaled gradients; computed in float32, if what float16 loses is to be seen. Of a complex
        number the real and the imaginary part count as two values.
      scaler: shows what its loss scale rescues, and what it makes too large.
      ax: matplotlib axes.

    Returns:
      The axes: share of all values (%) over log2 of the magnitude; after figure 3 of Micikevicius et al. 2017
      (arXiv:1710.03740).

    Raises:
      TypeError: `scaler` is not a `ScalerState`.
      ValueError: `grads` holds no value of an inexact dtype, or `scaler` is a batch of scalers.

    >>> exponent_histogram({"w": np.array([0.0, 1e-8, 1e-5, 1.0])}).get_ylabel()
    'share of all values (%)'
    """
    if scaler is not None:
        require_one_scaler(scaler, "scaler")
    leaves: list[Any] = [np.ravel(x) for x in jax.device_get(partition(grads, is_inexact)[0])]
    parts = [np.concatenate([x.real, x.imag]) if np.iscomplexobj(x) else x.astype(np.float64) for x in leaves]
    values = np.abs(np.concatenate([np.zeros(0), *parts]))
    if not values.size:
        raise ValueError("grads must have a value of an inexact dtype, got none. Pass the gradients.")
    plain = values[np.isfinite(values) & (values > 0)]
    scaled = plain * (1.0 if scaler is None else float(scaler.loss_scale))
    lost, normal, over = scaled < FLOAT16_SMALLEST, scaled >= FLOAT16_SMALLEST_NORMAL, scaled > FLOAT16_LARGEST
    kinds = [
        ("lost: below float16's smallest", RED, lost),
        ("rounded: subnormal in float16", YELLOW, ~lost & ~normal),
        ("rescued by the loss scale", BLUE, normal & ~over & (plain < FLOAT16_SMALLEST_NORMAL)),
        ("kept", GREY, normal & ~over & (plain >= FLOAT16_SMALLEST_NORMAL)),
        ("overflowing", "black", over),
    ]
    exponents: Any = np.floor(np.log2(plain))
    edges = list(range(int(exponents.min(initial=0)), int(exponents.max(initial=0)) + 2))
    ax, below = _axes(ax), np.zeros(len(edges) - 1)
    for name, colour, mask in kinds:
        if mask.any():
            shares = np.histogram(exponents[mask], edges)[0] * (100 / len(values))
            label = f"{name} ({shares.sum():.1f}%)"
            ax.bar(edges[:-1], shares, 1.0, bottom=below, align="edge", color=colour, label=label)
            below += shares
    for limit, style in ((FLOAT16_SMALLEST, ":"), (FLOAT16_SMALLEST_NORMAL, "--"), (FLOAT16_LARGEST, "-")):
        ax.axvline(np.log2(limit), color="black", linestyle=style, linewidth=1, label=f"float16: {limit:.3g}")
    ax.set_title(f"exactly zero, and not shown: {np.mean(values == 0):.1%}", fontsize=10)
    return _labelled(ax, "log2 of the gradient's magnitude, unscaled", "share of all values (%)")


def scale_trajectory(history: Mapping[str, Any], *, ax: Any = None) -> Any:
    """Draws the loss scale over the steps of a run, with the skipped steps by their cause.

    Args:
      history: what `metrics` returned after each step, stacked: an array [steps] under each name. `jax.lax.scan`
        stacks by itself; a list is stacked by `jax.tree.map(lambda *x: np.stack(x), *history)`.
      ax: matplotlib axes.

    Returns:
      The axes: loss scale, logarithmic, over steps.

    Raises:
      TypeError: `history` is no mapping of stacked arrays.

    >>> from jmpscale import dynamic, metrics, update
    >>> history = [metrics(update(dynamic(), finite)) for finite in (True, False)]
    >>> scale_trajectory(jax.tree.map(lambda *x: np.stack(x), *history)).get_ylabel()
    'loss scale'
    """
    names = "loss_scale", "skipped_in_a_row", "last_skip"
    columns = [history.get(name) for name in names] if isinstance(cast(object, history), Mapping) else [None]
    _require_stacked(
        history, columns, 1, f"history must hold what metrics returned after each step, arrays [steps] of {names}"
    )
    scale, skipped, last_skip = map(np.asarray, columns)
    ax, steps = _axes(ax), np.arange(1, len(scale) + 1)
    ax.step(steps, scale, where="post", color=BLUE, label="loss scale after the step")
    for cause, colour, name in ((1, RED, "gradients not finite"), (2, "black", "loss not finite")):
        at = (skipped > 0) & (last_skip == cause)
        if at.any():
            ax.plot(steps[at], scale[at], "v", color=colour, label=f"skipped, {name}: {at.sum()}")
    ax.set_yscale("log", base=2)
    ax.grid(alpha=0.3)
    return _labelled(ax, "step", "loss scale")


def headroom(reports: GradReport, *, limit: int = 8, ax: Any = None) -> Any:
    """Draws over the steps of a run how many bits each leaf's largest gradient is below float16's largest number.

    Args:
      reports: the `GradReport` of each step, stacked, as `jax.lax.scan` does: arrays [steps, leaves].
      limit: how many leaves to name, those with the least headroom; the others are grey.
      ax: matplotlib axes.

    Returns:
      The axes: log2(65504 / largest) over steps; below zero a leaf overflows. Steps that did are gaps.

    Raises:
      TypeError: `reports` is no stacked `GradReport`, or `limit` no integer.
      ValueError: `limit` is below 1.

    >>> from jmpscale import grad_report
    >>> headroom(jax.vmap(grad_report)(np.ones((3, 2), np.float32))).get_xlabel()
    'step'
    """
    seen = reports.largest if isinstance(cast(object, reports), GradReport) else None
    _require_stacked(reports, [seen], 2, "reports must be a GradReport with arrays [steps, leaves]")
    count("limit", limit)
    largest = np.asarray(seen, np.float64)
    ax, steps = _axes(ax), np.arange(1, len(largest) + 1)
    room = -np.log2(np.where(np.isfinite(largest) & (largest > 0), largest, np.nan) / FLOAT16_LARGEST)
    paths = [" " * path.startswith("_") + path for path in reports.paths]  # the legend omits what begins with a _
    order: list[int] = np.argsort(np.nanmin(room, axis=0, initial=np.inf)).tolist()
    ax.plot(steps, room[:, order[limit:]], color="#d0d4da", linewidth=0.7)
    for leaf in order[:limit]:
        ax.plot(steps, room[:, leaf], linewidth=1.4, label=paths[leaf])
    ax.axhline(0, color=RED, linestyle="--", linewidth=1, label="float16 overflows")
    return _labelled(ax, "step", "headroom (bits)")


def _require_stacked(given: object, arrays: Sequence[object], ndim: int, rule: str) -> None:
    if any(np.ndim(cast(Any, x)) != ndim for x in arrays):
        got = shown(given) if arrays[0] is None else ", ".join(map(shown, arrays))
        raise TypeError(f"{rule}, got {got}. Stack a list with jax.tree.map(lambda *x: np.stack(x), *the_list).")


def _axes(ax: Any) -> Any:
    return cast(Any, plt).subplots(figsize=(8, 4), layout="constrained")[1] if ax is None else ax


def _labelled(ax: Any, x: str, y: str) -> Any:
    ax.set(xlabel=x, ylabel=y)
    ax.legend(fontsize=8)
    return ax
