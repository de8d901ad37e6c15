"""Looking, never deciding: what to log, which leaf overflowed, and when to give up."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jmpscale._finite import (
    AxisName,
    axes_to_reduce,
    joint_reductions_pay,
    refuse_partial_sums,
    warn_if_alone,
)
from jmpscale._state import COUNTER_LIMIT, LARGEST_SCALE, ScalerState, count
from jmpscale._tree import is_inexact, partition, require_one_scaler, require_scaler

FLOAT16_LARGEST = 65504.0
FLOAT16_SMALLEST = 2.0**-24  # subnormal
FLOAT16_SMALLEST_NORMAL = 2.0**-14

_COUNTS = ("nan", "inf", "zero", "below", "subnormal")

_STUCK = "{run} steps in a row were skipped ({total} in all); the loss scale is {scale:g}. "
_DAMAGED = _STUCK + (
    "That is no loss scale: the state was damaged, in storage or by hand. Restore an older checkpoint, or start afresh."
)
_OVERFLOW = _STUCK + "In the newest skip the gradients were not finite while the loss, if given, was. "
_BAD_LOSS = _STUCK + (
    "In the newest skip the loss itself was not finite, before any scaling. No loss scale cures that: look for bad "
    "data, or for an overflow in the forward pass."
)
_AT_FLOOR = _OVERFLOW + (
    "The scale cannot fall any further: either the gradients overflow on the way back whatever the scale, or they are "
    "NaN. jmpscale.grad_report names the leaf. Run the same batch in float32; if it is finite there, allow a smaller "
    "scale or keep the overflowing layers in float32."
)
_AT_START = _OVERFLOW + (
    "These are the first skips of this run: the scale is still being sought, as is expected at the start. Allow more "
    "skips, or start lower."
)
_FALLING = _OVERFLOW + (
    "The scale is still falling; allow more skips, or look for what changed in the data or the model: "
    "jmpscale.grad_report names the leaf."
)


def metrics(state: ScalerState) -> dict[str, jax.Array]:
    """Returns what there is to log about a scaler, under stable names.

    Args:
      state: a scaler, or a batch of scalers.

    Returns:
      `loss_scale` f32[], and i32[] `good_steps`, `hysteresis_left`, `skipped`, `skipped_in_a_row`, `last_skip`; see
      `ScalerState`. They stay on the device: nothing is transferred until they are read.

    Raises:
      TypeError: `state` is not a `ScalerState`.

    >>> from jmpscale import dynamic
    >>> {name: float(value) for name, value in metrics(dynamic(8.0)).items() if "scale" in name}
    {'loss_scale': 8.0}
    """
    require_scaler(state)
    return {name: value for name, value in state._asdict().items() if name != "config"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradReport:
    """What `grad_report` saw in each leaf of a gradient tree, as float16 would hold it.

    Attributes:
      finite: bool[], whether all of the gradients are finite; the flag that `all_finite` gives.
      largest: f32[leaves], the largest magnitude; NaN where a leaf contains NaN.
      nan: i32[leaves], how many values are NaN.
      inf: i32[leaves], how many are infinite.
      zero: i32[leaves], how many are exactly zero.
      below: i32[leaves], how many are nonzero and below 2^-24, which float16 cannot hold.
      subnormal: i32[leaves], how many are in [2^-24, 2^-14), where float16 keeps fewer than 11 bits.
      paths: the names of the leaves, such as `params/layer_7/kernel`; static, no leaf.
      sizes: how many values each leaf has, two for a complex number; static, no leaf.
    """

    finite: jax.Array
    largest: jax.Array
    nan: jax.Array
    inf: jax.Array
    zero: jax.Array
    below: jax.Array
    subnormal: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def describe(self, limit: int = 20) -> str:
        """Tells in words, and in a table with the worst leaves first, how the gradients are; outside jit.

        Reads the report from the device, once. Among leaves that are not finite the one with the smallest share of
        such values, exact zeros aside, comes first: an overflow spreads on its way back, so that is where it most
        likely began.

        Args:
          limit: how many leaves the table shows.

        Returns:
          A sentence that names the leaf that matters most, and the table. Headroom is log2(65504 / largest): by how
          many bits the gradients could still grow in float16.

        Raises:
          TypeError: the report is traced, or `limit` is not an integer.
          ValueError: the report is one of a batch or of several steps; index its arrays first.

        >>> print(grad_report({"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(3)}).describe())
        1 of 2 leaves are not finite; it most likely began in w.
        leaf  values  largest  headroom  nan  inf  zero  below  subnormal
        w          2      inf      -inf    0    1     0      0          0
        b          3        1      16.0    0    0     0      0          0
        """
        count("limit", limit)
        if isinstance(self.finite, jax.core.Tracer):
            raise TypeError("describe reads the report and so cannot run inside jax.jit. Return the report first.")
        if (shape := jnp.shape(self.finite)) != ():
            raise ValueError(
                f"describe tells about one report, got a batch of shape {shape}. Take one of them: "
                "jax.tree.map(lambda x: x[0], report)."
            )
        return _describe(jax.device_get(self), limit)

    def totals(self) -> dict[str, jax.Array]:
        """Returns the sums over all leaves, to log beside `metrics`; jittable, nothing is transferred.

        Returns:
          f32[] each: `largest` (NaN if any leaf has one), and of `nan`, `inf`, `zero`, `below`, `subnormal` the share
          of all values, in [0, 1].

        >>> {name: float(x) for name, x in grad_report({"w": jnp.array([0.0, 4.0])}).totals().items() if x > 0}
        {'largest': 4.0, 'zero': 0.5}
        """
        largest = jnp.where(jnp.isnan(self.largest).any(), jnp.nan, self.largest.max(initial=0.0))
        values = max(sum(self.sizes), 1)
        shares = {name: getattr(self, name).astype(jnp.float32).sum() / values for name in _COUNTS}
        return {"largest": largest} | shares


def grad_report(grads: Any, *, scaler: ScalerState | None = None, axis_name: AxisName = None) -> GradReport:
    """Looks at each leaf of a gradient tree as float16 holds it: what overflowed, what was lost, what room is left.

    Jittable. What is not used costs nothing under jit; what is used reads the gradients once more. To pay only for
    skipped steps, call it in the branch of a `jax.lax.cond` on `finite`.

    Args:
      grads: pytree of gradients as `jax.grad` gave them, of the scaled loss. Leaves of other than inexact dtypes are
        left out. Of a complex number the real and the imaginary part count as two values.
      scaler: give it if `grads` are unscaled already: they are then looked at as they were before, multiplied by its
        scale. Their `finite` is then the same as that of `unscale_and_check`.
      axis_name: the mapped axes over which to combine, where JAX's types do not tell; see `all_finite`.

    Returns:
      A `GradReport`, of the same structure for every step, and equal on all devices.

    Raises:
      TypeError: `scaler` is not a `ScalerState`, or gradients are partial sums.
      ValueError: `scaler` is a batch of scalers, no leaf is of an inexact dtype, a leaf has more than 2147483647
        values, or an axis is not mapped here.

    >>> report = grad_report({"w": jnp.array([1e-6, 0.0]), "b": jnp.array([3.0, 1e-8])})
    >>> dict(zip(report.paths, report.below.tolist()))
    {'b': 1, 'w': 0}
    """
    if scaler is not None:
        require_one_scaler(scaler, "scaler")
    refuse_partial_sums(grads)
    warn_if_alone(axis_name)
    leaves, _ = partition(grads, is_inexact)
    if not leaves:
        raise ValueError("grads must have a leaf of an inexact dtype, got none. Pass the gradients.")
    with_paths = cast(list[tuple[Any, Any]], jax.tree_util.tree_leaves_with_path(grads))
    paths = tuple(_name(path) for path, leaf in with_paths if is_inexact(leaf))
    sizes = tuple(int(jnp.size(leaf)) * (1 + jnp.iscomplexobj(leaf)) for leaf in leaves)
    if max(sizes, default=0) > COUNTER_LIMIT:
        raise ValueError(f"grads must have at most {COUNTER_LIMIT} values in a leaf, got {max(sizes)}. Split the leaf.")
    loss_scale = jnp.ones((), jnp.float32) if scaler is None else scaler.loss_scale
    bits, counted = cast(tuple[list[Any], list[Any]], _look(leaves, loss_scale))
    # As bits, magnitudes are integers in the same order, and NaN is above infinity: no maximum can lose it.
    bits = _combine(bits, cast(Any, jax.lax.pmax), axis_name)
    largest = jax.lax.bitcast_convert_type(bits, _wide(leaves)[0])
    tallies = _combine(counted, cast(Any, jax.lax.psum), axis_name).T
    largest_scaled = largest * loss_scale.astype(largest.dtype)
    return GradReport(jnp.isfinite(largest).all(), largest_scaled, *tallies, paths=paths, sizes=sizes)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "grads"


def _wide(leaves: list[Any]) -> tuple[Any, Any]:
    """Returns the floating-point dtype that holds all leaves' values, and the integer dtype of its bits."""
    double = any(cast(Any, jnp.finfo(jnp.result_type(x))).bits == 64 for x in leaves)
    return (np.float64, np.int64) if double else (np.float32, np.int32)


@jax.jit
def _look(leaves: list[Any], loss_scale: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns of each leaf, as this device sees it, the bits of the largest magnitude and the counts i32[5]."""
    real, integer = _wide(leaves)

    def bits(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(jnp.asarray(x, real), integer)

    infinity = bits(np.inf)
    smallest, normal = (bits(x / loss_scale.astype(real)) for x in (FLOAT16_SMALLEST, FLOAT16_SMALLEST_NORMAL))
    largest: list[jax.Array] = []
    counted: list[jax.Array] = []
    for x in leaves:
        parts = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
        b = bits(parts) & np.iinfo(integer).max  # without the sign
        kinds = b > infinity, b == infinity, b == 0, (b > 0) & (b < smallest), (b >= smallest) & (b < normal)
        seen = _reduce(b, kinds)
        largest.append(seen[0])
        counted.append(jnp.stack(seen[1:]))
    return largest, counted


def _reduce(bits: jax.Array, kinds: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the maximum of `bits`, and how often each of `kinds` is true."""
    tallies = [kind.astype(jnp.int32) for kind in kinds]
    if not joint_reductions_pay():
        return [bits.max(initial=0), *(t.sum() for t in tallies)]
    start = tuple(jnp.zeros((), t.dtype) for t in (bits, *tallies))

    def combine(a: Any, b: Any) -> Any:
        return jnp.maximum(a[0], b[0]), *(x + y for x, y in zip(a[1:], b[1:], strict=True))

    return list(jax.lax.reduce((bits, *tallies), start, combine, tuple(range(bits.ndim))))


def _combine(parts: list[jax.Array], collective: Callable[..., Any], axis_name: AxisName) -> jax.Array:
    """Stacks what the devices saw of the leaves, combined in one collective per set of axes that leaves vary over."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault(axes_to_reduce(part, axis_name), []).append(i)
    stacks = [jnp.stack([parts[i] for i in members]) for members in groups.values()]
    seen = [collective(x, axes) if axes else x for axes, x in zip(groups, stacks, strict=True)]
    order = np.argsort(np.concatenate(list(groups.values())))
    return seen[0] if len(seen) == 1 else jnp.concatenate(seen)[order]


def _describe(report: GradReport, limit: int) -> str:
    """Writes the text of a report whose arrays have been read."""
    counted: dict[str, Any] = {name: getattr(report, name) for name in _COUNTS}
    largest: Any = report.largest
    bad = counted["nan"] + counted["inf"]
    with np.errstate(divide="ignore"):
        headroom = np.log2(FLOAT16_LARGEST / largest)
    share = bad / np.maximum(np.asarray(report.sizes) - counted["zero"], 1)
    order: list[int] = np.lexsort((headroom, share, bad == 0)).tolist()
    cells: dict[str, list[str]] = {"leaf": list(report.paths), "values": [str(n) for n in report.sizes]}
    cells |= {"largest": [f"{x:.3g}" for x in largest], "headroom": [f"{x:.1f}" for x in headroom]}
    cells |= {name: [str(n) for n in column] for name, column in counted.items()}
    rows: list[list[str]] = [list(cells), *([column[i] for column in cells.values()] for i in order[:limit])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    text = f"All {len(bad)} leaves are finite; the largest magnitude is in {report.paths[order[0]]}."
    if bad.any():
        text = (
            f"{(bad > 0).sum()} of {len(bad)} leaves are not finite; it most likely began in {report.paths[order[0]]}."
        )
        if (bad > 0).sum() > 1 and share[order[0]] > 0.5:
            text = (
                f"{(bad > 0).sum()} of {len(bad)} leaves are mostly not finite; a smaller scale shows where it begins."
            )
        if not counted["inf"].any():
            text += " All of it is NaN: bad data, a 0/0 in the model, or an overflow whose infinities met on their way."
    return "\n".join([text, *table])


def raise_if_stuck(state: ScalerState, *, max_skips_in_a_row: int) -> None:
    """Raises if too many steps in a row have been skipped; call it between two steps, as often as you like.

    Reads one scalar from the device, and waits for it; calling it every hundred steps costs next to nothing. Inside a
    compiled program it is a `jax.experimental.checkify` check: transform the program with `checkify.checkify`, and
    throw the error that it returns.

    Args:
      state: the scaler.
      max_skips_in_a_row: how many skips in a row are still fine, at least 1. Finding the scale at the start can take
        some: from 2^16 down to 1 it takes 16.

    Raises:
      FloatingPointError: more steps in a row have been skipped; says which scale, why, and what to do. Under
        `checkify` it is a `JaxRuntimeError` with the same text.
      TypeError: `state` is not a `ScalerState`, or `max_skips_in_a_row` is not an integer.
      ValueError: `state` is a batch of scalers, or `max_skips_in_a_row` is below 1; or JAX's own, under `jax.jit`
        without `checkify`.

    >>> from jmpscale import dynamic
    >>> raise_if_stuck(dynamic(), max_skips_in_a_row=20)
    """
    require_one_scaler(state)
    allowed = count("max_skips_in_a_row", max_skips_in_a_row)
    stuck = state.skipped_in_a_row > allowed
    numbers = {"scale": state.loss_scale, "run": state.skipped_in_a_row, "total": state.skipped}
    if isinstance(stuck, jax.core.Tracer):
        for holds, text in _diagnoses(state):
            cast(Any, checkify.check)(~(stuck & holds), text, **numbers)
    elif stuck:
        state, numbers = jax.device_get((state, numbers))
        raise FloatingPointError(next(text for holds, text in _diagnoses(state) if holds).format(**numbers))


def _diagnoses(state: ScalerState) -> list[tuple[Any, str]]:
    """Returns the texts for a run that is stuck, each with whether it is the right one; exactly one is."""
    damaged = ~((state.loss_scale > 0) & (state.loss_scale <= LARGEST_SCALE))
    bad_loss = ~damaged & (state.last_skip == 2)
    overflow = ~damaged & ~bad_loss
    at_floor = (state.loss_scale <= np.float32(state.config.min_scale)) | (state.config.mode == "static")
    at_start = state.skipped_in_a_row == state.skipped
    return [
        (damaged, _DAMAGED),
        (bad_loss, _BAD_LOSS),
        (overflow & at_floor, _AT_FLOOR),
        (overflow & ~at_floor & at_start, _AT_START),
        (overflow & ~at_floor & ~at_start, _FALLING),
    ]
