"""A report on each gradient: non-finite values, underflows and the headroom in float16."""

import dataclasses
import functools
import json
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpscale._base.arguments import COUNTER_LIMIT, check_count
from jmpscale._base.axes import AxisName, axes_to_reduce
from jmpscale._base.compat import use_variadic_reduce
from jmpscale._base.options import requires_names
from jmpscale._base.text import format_table
from jmpscale._base.tree import PyTree, check_no_refs, is_traced, named_gradients
from jmpscale._get_scaler import find_scaler
from jmpscale._guards.checks import check_no_partial_sums, warn_if_unsynchronized
from jmpscale._state import scale_of

_ZERO_IN_FLOAT16, _FLOAT16_SMALLEST_NORMAL, _FLOAT16_MAX = 2.0**-25, 2.0**-14, 65504.0

_COUNTS = ("nan", "inf", "zero", "underflow", "subnormal")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradReport:
    """Statistics of each leaf of a gradient tree with respect to the range of float16; created by `grad_report`.

    Devices that flush subnormal numbers, such as CPUs, may take magnitudes below 2^-126 for zero.

    Attributes:
      finite: bool[], whether all gradients are finite.
      max_abs: f32[leaves], or f64[leaves] if a leaf is float64, the largest magnitude; NaN if the leaf contains NaN.
      nan: i32[leaves], the number of NaN values.
      inf: i32[leaves], the number of infinite values.
      zero: i32[leaves], the number of zeros.
      underflow: i32[leaves], the number of nonzero magnitudes of at most 2^-25, which are zero in float16.
      subnormal: i32[leaves], the number of larger magnitudes below 2^-14, for which float16 has fewer than 11
        significant bits.
      paths: the names of the leaves, such as `params/layer_7/kernel`; static.
      sizes: the number of values of each leaf over all combined devices, where a complex number counts as two; static.
    """

    finite: jax.Array
    max_abs: jax.Array
    nan: jax.Array
    inf: jax.Array
    zero: jax.Array
    underflow: jax.Array
    subnormal: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def describe(self, limit: int = 20) -> str:
        """Describes the gradients in a sentence and a table.

        Call it outside `jax.jit`. Leaves that are not finite come first, in ascending order of the fraction of their
        nonzero values that are not finite. Finite leaves follow in ascending order of their headroom.

        Args:
          limit: the number of leaves in the table.

        Returns:
          The text. The headroom, log2(65504 / max_abs), is the number of bits by which the gradients could grow in
          float16.

        Raises:
          TypeError: the report is traced, or `limit` is not an integer.
          ValueError: `limit` is below 1, or the report is a batch.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> print(jmpscale.grad_report({"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(3)}).describe())
        1 of 2 leaves is not finite: w. jmpscale.diagnose names the line.
        leaf  values  max_abs  headroom  nan  inf  zero  underflow  subnormal
        w          2      inf      -inf    0    1     0          0          0
        b          3        1      16.0    0    0     0          0          0
        """
        check_count("limit", limit)
        if is_traced(self.finite):
            raise TypeError("describe reads the report and so cannot run inside jax.jit. Return the report first.")
        if (shape := jnp.shape(self.finite)) != ():
            raise ValueError(
                f"describe takes a single report, got a batch of shape {shape}. Select one: "
                "jax.tree.map(lambda x: x[0], report)."
            )
        report = jax.device_get(self)
        counts = np.array([getattr(report, name) for name in _COUNTS])
        max_abs, paths, sizes = np.asarray(report.max_abs), report.paths, report.sizes
        nonfinite = counts[0] + counts[1]
        with np.errstate(divide="ignore"):
            headroom = np.log2(_FLOAT16_MAX / max_abs)
        known_sizes = np.array([size if isinstance(size, int) else np.nan for size in sizes])  # symbolic shapes
        fraction = nonfinite / np.maximum(known_sizes - counts[2], 1)
        order = np.lexsort((headroom, fraction, nonfinite == 0)).tolist()
        rows = [
            [paths[i], f"{sizes[i]}", f"{max_abs[i]:.3g}", f"{headroom[i]:.1f}", *map(str, counts[:, i])]
            for i in order[:limit]
        ]
        sentence = _summarize(paths[order[0]], nonfinite)
        return f"{sentence}\n{format_table([['leaf', 'values', 'max_abs', 'headroom', *_COUNTS], *rows])}"

    def totals(self) -> dict[str, jax.Array]:
        """Returns statistics of all leaves together, to log beside `metrics`. It also works under `jax.jit`.

        Returns:
          A dict of f32[], or of f32[steps] for stacked reports. `max_abs` is the largest magnitude, NaN if a leaf
          contains NaN. `nan`, `inf`, `zero`, `underflow` and `subnormal` are fractions of all values, in [0, 1].

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> report = jmpscale.grad_report({"w": jnp.array([0.0, 4.0])})
        >>> {name: float(x) for name, x in report.totals().items() if x > 0}
        {'max_abs': 4.0, 'zero': 0.5}
        """
        max_abs = jnp.where(jnp.isnan(self.max_abs).any(-1), jnp.nan, self.max_abs.max(-1))
        values = jnp.maximum(jnp.asarray(sum(self.sizes), jnp.float32), 1.0)
        fractions = {name: getattr(self, name).astype(jnp.float32).sum(-1) / values for name in _COUNTS}
        return {"max_abs": max_abs} | fractions


def _summarize(first: str, nonfinite: np.ndarray) -> str:
    """Summarizes a report; `first` is the first leaf of the table."""
    leaves, faulty = len(nonfinite), int((nonfinite > 0).sum())
    if not faulty:
        return f"All leaves are finite; the largest magnitude is in {first}."
    where = "is not finite:" if faulty == 1 else "are not finite; the fraction of non-finite values is smallest in"
    return f"{faulty} of {leaves} leaves {where} {first}. jmpscale.diagnose names the line."


jax.export.register_pytree_node_serialization(
    GradReport,
    serialized_name="jmpscale.GradReport",
    serialize_auxdata=lambda paths_and_sizes: json.dumps(paths_and_sizes).encode(),
    deserialize_auxdata=lambda data: tuple(map(tuple, json.loads(data))),
)


@requires_names
def grad_report(grads: PyTree, *, scaler: PyTree = None, axis_name: AxisName = None) -> GradReport:
    """Reports the non-finite values, the underflows and the headroom in float16 of each leaf of a gradient tree.

    The report reads the gradients again. Under `jax.jit`, unused parts of the report are removed. To report only on
    skipped steps, call it in a branch of `jax.lax.cond` on `finite`.

    Args:
      grads: pytree of unscaled gradients, as `value_and_grad` returns them. Leaves that are not floating-point or
        complex are omitted, and so are the new scales and histories of Flax's fp8 layers. The real and imaginary parts
        of a complex number count as two values.
      scaler: the scaler of the step, or any pytree that contains exactly one, for a report on the scaled gradients, as
        the backward pass held them. Without it the report is on the unscaled gradients.
      axis_name: the mapped axes over which to combine the report, as in `all_finite`.

    Returns:
      A `GradReport`, with the same structure for each step and equal on all devices.

    Raises:
      TypeError: a leaf is a partial sum or a `jax.Ref`.
      ValueError: `scaler` does not contain exactly one scaler; no leaf has a floating-point dtype; a leaf has more than
        2147483647 values; or an axis is not mapped here.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> report = jmpscale.grad_report({"w": jnp.array([1e-6, 0.0]), "b": jnp.array([3.0, 1e-8])})
    >>> dict(zip(report.paths, report.underflow.tolist()))
    {'b': 1, 'w': 0}
    """
    loss_scale = None if scaler is None else scale_of(find_scaler(scaler))
    check_no_refs(grads, "grads")
    check_no_partial_sums(grads, "grads")
    warn_if_unsynchronized(axis_name)
    gradients = named_gradients(grads)
    if not gradients:
        raise ValueError("grads must have a leaf of a floating-point dtype, got none. Pass the gradients.")
    names = [name or "grads" for name, _ in gradients]
    leaves = [leaf for _, leaf in gradients]
    largest, counts = _leaf_statistics(leaves, loss_scale)
    # By their own types: in JAX 0.10, the counts of a leaf without values vary over devices, but its maximum does not.
    axes, axes_of_largest = ([axes_to_reduce(x, axis_name) for x in parts] for parts in (counts, largest))
    sizes = [jnp.size(x) * (1 + jnp.iscomplexobj(x)) * jax.lax.axis_size(a) for x, a in zip(leaves, axes, strict=True)]
    if large := [size for size in sizes if isinstance(size, int) and size > COUNTER_LIMIT]:
        raise ValueError(f"grads must have at most {COUNTER_LIMIT} values in a leaf, got {large[0]}. Split the leaf.")
    totals = dict(zip(_COUNTS, _all_reduce(counts, axes, jax.lax.psum).T, strict=True))
    max_abs = jnp.where(totals["nan"] > 0, np.nan, _all_reduce(largest, axes_of_largest, jax.lax.pmax))
    finite = jnp.isfinite(max_abs).all()
    if loss_scale is not None:
        max_abs = max_abs * jnp.asarray(loss_scale, max_abs.dtype)
    return GradReport(finite=finite, max_abs=max_abs, **totals, paths=tuple(names), sizes=tuple(sizes))


@jax.jit
def _leaf_statistics(
    leaves: Sequence[ArrayLike], loss_scale: jax.Array | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns for each leaf, on this device, the largest magnitude except NaN, and i32[5], the `_COUNTS`."""
    forms = {"cpu": functools.partial(_count, _reduce_variadic)} if use_variadic_reduce() else {}
    return jax.lax.platform_dependent(leaves, loss_scale, default=functools.partial(_count, _reduce_each), **forms)


def _count(
    reduce: Callable[..., Sequence[jax.Array]], leaves: Sequence[jax.Array], loss_scale: jax.Array | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    dtype = np.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else np.float32
    largest, counts = [], []
    for x in leaves:
        parts = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
        magnitude = jnp.abs(parts.astype(dtype))
        scaled = magnitude if loss_scale is None else magnitude * jnp.asarray(loss_scale, dtype)
        is_nan = jnp.isnan(magnitude)
        kinds = (
            is_nan,
            jnp.isinf(magnitude),
            magnitude == 0,
            (magnitude > 0) & (scaled <= _ZERO_IN_FLOAT16),
            (scaled > _ZERO_IN_FLOAT16) & (scaled < _FLOAT16_SMALLEST_NORMAL),
        )
        maximum, *tallies = reduce(jnp.where(is_nan, 0, magnitude), [kind.astype(np.int32) for kind in kinds])
        largest.append(maximum)
        counts.append(jnp.stack(tallies))
    return largest, counts


def _reduce_each(magnitude: jax.Array, tallies: list[jax.Array]) -> tuple[jax.Array, ...]:
    return magnitude.max(initial=0), *(tally.sum(dtype=tally.dtype) for tally in tallies)


def _reduce_variadic(magnitude: jax.Array, tallies: list[jax.Array]) -> Sequence[jax.Array]:
    def combine(a: list[jax.Array], b: list[jax.Array]) -> tuple[jax.Array, ...]:
        return jnp.maximum(a[0], b[0]), *(x + y for x, y in zip(a[1:], b[1:], strict=True))

    operands = (magnitude, *tallies)
    zeros = tuple(np.zeros((), x.dtype) for x in operands)
    return jax.lax.reduce(operands, zeros, combine, tuple(range(magnitude.ndim)))


def _all_reduce(
    parts: list[jax.Array], axes: list[tuple[Hashable, ...]], collective: Callable[..., jax.Array]
) -> jax.Array:
    """Stacks the statistics of all leaves, combined over devices in one collective for each set of axes."""
    groups = {names: [i for i, other in enumerate(axes) if other == names] for names in dict.fromkeys(axes)}
    stacks = [(names, jnp.stack([parts[i] for i in members])) for names, members in groups.items()]
    reduced = [collective(stack, names) if names else stack for names, stack in stacks]
    if len(reduced) == 1:
        return reduced[0]
    return jnp.concatenate(reduced)[np.argsort(np.concatenate([*groups.values()]))]
