"""Looking, never deciding: what to log, which leaf overflowed, and when to give up."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jmpscale._finite import AxisName, axes_to_reduce, joint_reductions_pay, refuse_partial_sums, warn_if_alone
from jmpscale._state import COUNTER_LIMIT, LARGEST_SCALE, ScalerState, count, static
from jmpscale._tree import is_inexact, require_one_scaler, require_scaler

FLOAT16_SMALLEST, FLOAT16_SMALLEST_NORMAL, FLOAT16_LARGEST = 2.0**-24, 2.0**-14, 65504.0

_COUNTS = ("nan", "inf", "zero", "below", "subnormal")

_STUCK = "{run} steps in a row were skipped ({total} in all); the loss scale is {scale:g}. "
_OVERFLOW = f"{_STUCK}In the newest skip the gradients were not finite while the loss, if given, was. "
_DIAGNOSES = (  # in the order of _diagnoses
    f"{_STUCK}That is no loss scale: the state was damaged, in storage or by hand. Restore an older checkpoint.",
    f"{_STUCK}In the newest skip the loss itself was not finite, before any scaling. No loss scale cures that: look "
    "for bad data, or for an overflow in the forward pass.",
    f"{_OVERFLOW}The scale cannot fall any further: either the gradients overflow on the way back whatever the scale, "
    "or they are NaN. jmpscale.grad_report names the leaf. Run the same batch in float32; if it is finite there, "
    "allow a smaller scale or keep the overflowing layers in float32.",
    f"{_OVERFLOW}These are the first skips of this run: the scale is still being sought. Allow more, or start lower.",
    f"{_OVERFLOW}The scale is still falling; allow more skips, or look for what changed in the data or the model: "
    "jmpscale.grad_report names the leaf.",
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
      sizes: how many values each leaf has on all the devices that were counted, two for a complex number; static, no
        leaf.
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
        report = jax.device_get(self)
        counts, largest = np.array([getattr(report, name) for name in _COUNTS]), np.asarray(report.largest)
        paths, sizes, bad = report.paths, report.sizes, counts[0] + counts[1]
        with np.errstate(divide="ignore"):
            headroom = np.log2(FLOAT16_LARGEST / largest)
        known = [n if isinstance(cast(object, n), int) else np.nan for n in sizes]  # symbolic ones are not
        share = bad / np.maximum(np.array(known) - counts[2], 1)
        order: list[int] = np.lexsort((headroom, share, bad == 0)).tolist()
        rows = [["leaf", "values", "largest", "headroom", *_COUNTS]]
        for i in order[:limit]:
            rows.append([paths[i], f"{sizes[i]}", f"{largest[i]:.3g}", f"{headroom[i]:.1f}", *map(str, counts[:, i])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        worst, faulty = paths[order[0]], (bad > 0).sum()
        if faulty > 1 and share[order[0]] > 0.5:
            text = f"{faulty} of {len(bad)} leaves are mostly not finite; a smaller scale shows where it begins."
        elif faulty:
            text = f"{faulty} of {len(bad)} leaves are not finite; it most likely began in {worst}."
        else:
            text = f"All {len(bad)} leaves are finite; the largest magnitude is in {worst}."
        if faulty and not counts[1].any():
            text += " All of it is NaN: bad data, a 0/0 in the model, or an overflow whose infinities met on their way."
        return "\n".join([text, *table])

    def totals(self) -> dict[str, jax.Array]:
        """Returns the sums over all leaves, to log beside `metrics`; jittable, nothing is transferred.

        Returns:
          f32[] each: `largest` (NaN if any leaf has one), and of `nan`, `inf`, `zero`, `below`, `subnormal` the share
          of all values, in [0, 1]. Of stacked reports, [steps] each.

        >>> {name: float(x) for name, x in grad_report({"w": jnp.array([0.0, 4.0])}).totals().items() if x > 0}
        {'largest': 4.0, 'zero': 0.5}
        """
        largest = jnp.where(jnp.isnan(self.largest).any(-1), jnp.nan, self.largest.max(-1))
        values = jnp.maximum(jnp.asarray(sum(self.sizes), jnp.float32), 1.0)
        shares = {name: getattr(self, name).astype(jnp.float32).sum(-1) / values for name in _COUNTS}
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
    scaler = static(1.0) if scaler is None else scaler
    require_one_scaler(scaler, "scaler")
    refuse_partial_sums(grads)
    warn_if_alone(axis_name)
    with_paths = cast(list[tuple[Any, Any]], jax.tree_util.tree_leaves_with_path(grads))
    named = [(jax.tree_util.keystr(at, simple=True, separator="/"), x) for at, x in with_paths if is_inexact(x)]
    if not named:
        raise ValueError("grads must have a leaf of an inexact dtype, got none. Pass the gradients.")
    paths, leaves = [name or "grads" for name, _ in named], [leaf for _, leaf in named]
    bits, counted = cast(tuple[list[Any], list[Any]], _look(leaves, scaler.loss_scale))
    axes = [axes_to_reduce(part, axis_name) for part in bits]
    sizes = [jnp.size(x) * (1 + jnp.iscomplexobj(x)) * jax.lax.axis_size(a) for x, a in zip(leaves, axes, strict=True)]
    if large := [n for n in sizes if isinstance(cast(object, n), int) and n > COUNTER_LIMIT]:
        raise ValueError(f"grads must have at most {COUNTER_LIMIT} values in a leaf, got {large[0]}. Split the leaf.")
    # As bits, magnitudes are integers in the same order, and NaN is above infinity: no maximum can lose it.
    largest = jax.lax.bitcast_convert_type(_combine(bits, axes, jax.lax.pmax), _wide(leaves)[0])
    tallies = _combine(counted, axes, jax.lax.psum).T
    scaled = largest * jnp.asarray(scaler.loss_scale, largest.dtype)
    return GradReport(jnp.isfinite(largest).all(), scaled, *tallies, paths=tuple(paths), sizes=tuple(sizes))


def _wide(leaves: list[Any]) -> tuple[Any, Any]:
    """Returns the floating-point dtype that holds all leaves' values, and the integer dtype of its bits."""
    double = any(cast(Any, jnp.finfo(jnp.result_type(x))).bits == 64 for x in leaves)
    return (np.float64, np.int64) if double else (np.float32, np.int32)


@jax.jit
def _look(leaves: list[Any], loss_scale: jax.Array) -> Any:
    """Returns of each leaf, as this device sees it, the bits of the largest magnitude and the counts i32[5]."""
    plain, joint = (functools.partial(_count, reduce) for reduce in (_reduce_each, _reduce_jointly))
    forms: dict[str, Any] = {"cpu": joint} if joint_reductions_pay() else {}
    return cast(Any, jax.lax.platform_dependent(leaves, loss_scale, default=plain, **forms))


def _count(reduce: Callable[..., Any], leaves: list[Any], loss_scale: jax.Array) -> tuple[list[Any], list[Any]]:
    real, integer = _wide(leaves)

    def bits(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(jnp.asarray(x, real), integer)

    infinity = bits(np.inf)
    smallest, normal = (bits(x / jnp.asarray(loss_scale, real)) for x in (FLOAT16_SMALLEST, FLOAT16_SMALLEST_NORMAL))
    seen: list[tuple[Any, ...]] = []
    for x in leaves:
        parts = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
        b = bits(parts) & np.iinfo(integer).max  # without the sign
        kinds = b > infinity, b == infinity, b == 0, (b > 0) & (b < smallest), (b >= smallest) & (b < normal)
        seen.append(reduce(b, [kind.astype(np.int32) for kind in kinds]))
    return [largest for largest, *_ in seen], [jnp.stack(tallies) for _, *tallies in seen]


def _reduce_each(bits: jax.Array, tallies: list[jax.Array]) -> Any:
    return bits.max(initial=0), *(t.sum(dtype=t.dtype) for t in tallies)


def _reduce_jointly(bits: jax.Array, tallies: list[jax.Array]) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return jnp.maximum(a[0], b[0]), *(x + y for x, y in zip(a[1:], b[1:], strict=True))

    operands = (bits, *tallies)
    return jax.lax.reduce(operands, tuple(np.zeros((), x.dtype) for x in operands), combine, tuple(range(bits.ndim)))


def _combine(parts: list[Any], axes: list[tuple[Any, ...]], collective: Any) -> jax.Array:
    """Stacks what the devices saw of the leaves, combined in one collective per set of axes that leaves vary over."""
    groups = {names: [i for i, other in enumerate(axes) if other == names] for names in dict.fromkeys(axes)}
    stacks = [(names, jnp.stack([parts[i] for i in members])) for names, members in groups.items()]
    seen = [collective(stack, names) if names else stack for names, stack in stacks]
    return seen[0] if len(seen) == 1 else jnp.concatenate(seen)[np.argsort(np.concatenate([*groups.values()]))]


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
    stuck = state.skipped_in_a_row > count("max_skips_in_a_row", max_skips_in_a_row)
    numbers = {"scale": state.loss_scale, "run": state.skipped_in_a_row, "total": state.skipped}
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        for holds, text in _diagnoses(state):  # the first one that fails is the one that is told
            cast(Any, checkify.check)(jnp.logical_not(stuck & holds), text, **numbers)
    elif stuck:
        raise FloatingPointError(next(text for holds, text in _diagnoses(state) if holds).format(**numbers))


def _diagnoses(state: ScalerState) -> list[tuple[Any, str]]:
    """Returns each diagnosis of a run that is stuck after whether it holds; the first that does is the right one."""
    scale, config = state.loss_scale, state.config
    damaged = (scale != scale) | (scale <= 0) | (scale > LARGEST_SCALE)
    at_floor = (scale <= np.float32(config.min_scale)) | (config.mode == "static")
    at_start = state.skipped_in_a_row == state.skipped
    return list(zip((damaged, state.last_skip == 2, at_floor, at_start, True), _DIAGNOSES, strict=True))
