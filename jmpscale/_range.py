"""Where float16 fails: a report on each result that a program holds in half precision, by source line."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import check_count
from jmpscale._base.frameworks import is_nnx_object
from jmpscale._base.text import describe, format_number, format_table
from jmpscale._base.tree import PyTree, check_no_refs, flatten_matching, is_array, is_inexact, is_traced, named_leaves
from jmpscale._dataflow import output_variables
from jmpscale._find_scaler import find_scaler
from jmpscale._grad import value_and_grad
from jmpscale._measure import POLE, Evaluation, Place, Site
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, ScalerState, static
from jmpscale._statistics import INFINITE, MAX_UNDERFLOW, NAN, Range, Statistics

Function = Callable[..., Any]

_EXPONENTS = np.arange(256) - 127  # of the values that each entry of RangeRow.counts counts
_NORMS = np.ldexp(1 / math.log(2), _EXPONENTS)  # the mean magnitude of these values, evenly distributed logarithms
_SHOWN_LINES = 8
# The program runs once, so a short compilation is worth more than fast code.
_COMPILER_OPTIONS = {"cpu": {"xla_backend_optimization_level": 0}}

_NOT_FINITE = (
    "Correct this line. Common causes are invalid data; a softmax over a row that is masked everywhere, which needs a "
    "finite mask or where=; an epsilon that float16 rounds to zero, which needs float32; and a derivative such as the "
    "derivative of a norm at zero."
)
_LOST = 0.5  # of the L1 norm of a result in the forward pass; the rest hardly represents the result


class _Limits(NamedTuple):
    """The limits of a dtype."""

    overflow: float  # the smallest magnitude that rounds to infinity
    normal: int  # the exponent of the smallest normal magnitude
    underflow: int  # the exponent of half the smallest subnormal magnitude; smaller ones round to zero


@functools.cache
def _limits(dtype: str) -> _Limits:
    info = jnp.finfo(dtype)
    largest = float(info.max) + 2.0 ** (info.maxexp - info.nmant - 2)
    return _Limits(largest, info.minexp, info.minexp - info.nmant - 1)


@dataclasses.dataclass(frozen=True)
class RangeRow:
    """A result that the program holds in half precision; `RangeReport` describes the fields."""

    line: str
    module: str
    operation: str
    dtype: str
    backward: bool
    scaled: bool
    max_abs: float
    overflow: float
    underflow: float
    subnormal: float
    steps: tuple[int, ...]
    size: int
    scale: float = dataclasses.field(repr=False)  # 1 if the result is not scaled
    counts: np.ndarray = dataclasses.field(repr=False, compare=False)  # [256], of nonzero values at scale 1
    # Of the iteration with the smallest magnitudes, for loops such as a scan over layers.
    smallest_counts: np.ndarray = dataclasses.field(repr=False, compare=False)
    smallest_steps: tuple[int, ...] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The operation and its line, and the iterations of loops with the largest magnitude."""
        return self._name_in(self.steps)

    @property
    def underflow_name(self) -> str:
        """The operation and its line, and the iterations in which most underflows, if they are known."""
        return self._name_in(self.smallest_steps)

    def _name_in(self, steps: tuple[int, ...]) -> str:
        text = f"{self.operation} at {self.line}"
        return f"{text} in step {format_steps(steps)}" if steps else text

    @property
    def overflows(self) -> bool:
        """Whether the largest magnitude exceeds the range of the dtype."""
        return self.max_abs >= _limits(self.dtype).overflow

    @property
    def headroom(self) -> float:
        """The number of bits by which the result could grow."""
        return math.log2(_limits(self.dtype).overflow / self.max_abs) if self.max_abs else math.inf

    @property
    def largest_power(self) -> float:
        """The power of two that is the largest scale at which the result does not overflow."""
        if not self.max_abs:
            return math.inf
        return math.ceil(math.log2(_limits(self.dtype).overflow / (self.max_abs / self.scale))) - 1

    @property
    def smallest_power(self) -> float:
        """The power of two that is the smallest scale at which little of the result underflows."""
        if not self.smallest_counts.any():
            return -math.inf
        norms = self.smallest_counts * _NORMS
        return _limits(self.dtype).underflow - _quantile(norms, MAX_UNDERFLOW)

    def percentile_power(self, fraction: float) -> int:
        """Returns the power of two below which a fraction of the nonzero magnitudes lies, at a scale of 1."""
        return _quantile(self.counts, fraction)


def _quantile(weights: np.ndarray, fraction: float) -> int:
    """Returns the largest exponent such that all smaller ones have at most a fraction of the total weight."""
    sums = np.cumsum(weights)
    return int(_EXPONENTS[np.searchsorted(sums, fraction * sums[-1], side="right")])


def _make_row(site: Site, found: Range, scale: float) -> RangeRow:
    scale = scale if site.scaled else 1.0
    counts, max_abs = np.asarray(found.counts, np.float64), float(found.max_abs) * scale
    limits = _limits(site.dtype.name)
    exponents = _EXPONENTS + round(math.log2(scale))
    smallest_counts = counts if found.smallest is None else np.asarray(found.smallest.counts, np.float64)
    norms = smallest_counts * _NORMS
    total = norms.sum() or 1.0
    underflow = norms[exponents < limits.underflow].sum() / total
    subnormal = norms[(exponents >= limits.underflow) & (exponents < limits.normal)].sum() / total
    executions = max(counts.sum() / max(site.size, 1), 1.0)
    overflow = max(counts[exponents > math.log2(limits.overflow)].sum(), float(max_abs >= limits.overflow))
    steps = tuple(np.asarray(found.steps).tolist())
    smallest_steps = () if found.smallest is None else tuple(np.asarray(found.smallest.steps).tolist())
    if smallest_steps and underflow > MAX_UNDERFLOW and not overflow:
        steps = smallest_steps
    return RangeRow(
        line=site.line,
        module=site.module,
        operation=site.operation,
        dtype=site.dtype.name,
        backward=site.backward,
        scaled=site.scaled,
        max_abs=max_abs,
        overflow=float(overflow / (max(site.size, 1) * executions)),
        underflow=float(underflow),
        subnormal=float(subnormal),
        steps=steps,
        size=site.size,
        scale=scale,
        counts=counts,
        smallest_counts=smallest_counts,
        smallest_steps=smallest_steps,
    )


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """The ranges of all results that a training step holds in half precision; created by `range_report`.

    Attributes:
      rows: one entry for each operation, in program order, with the fields `line`, such as `model.py:41 (mlp)`;
        `module`, the path of named scopes; `operation`, the name of JAX's primitive; `dtype`; `backward`, whether the
        operation is part of the backward pass; `scaled`, whether the result is proportional to the loss scale;
        `max_abs`, the largest magnitude at the present scale; `overflow`, the fraction of values above the range of the
        dtype; `underflow` and `subnormal`, the fractions of the L1 norm in values that round to zero or have less
        precision; `steps`, the iterations of the loops around the operation, outermost first and counted from 0, with
        the largest magnitude; and `size`, the number of values in one execution. A scan over layers has one row for
        all layers. If its results are the layers' gradients, `underflow` and `subnormal` are the fractions in the layer
        with the smallest ones, and `steps` is this layer if more than 1% underflows there and nothing overflows.
      scale: the present loss scale.
      sensitive: pairs of a line and the operations of the forward pass in this line that are inaccurate in half
        precision, such as exponentials, logarithms, quotients and long sums.
      float32_matmuls: the lines with matmuls and convolutions in float32.
      has_half_matmuls: whether the program contains matmuls or convolutions in half precision.
      not_finite: the first operation with a result that is not finite although it is computed in float32, and its line,
        if the loss or a gradient is not finite; otherwise None.
      not_entered: the operations that were computed in their own dtype, such as kernels, with their lines.
    """

    rows: tuple[RangeRow, ...]
    scale: float
    sensitive: tuple[tuple[str, tuple[str, ...]], ...]
    float32_matmuls: tuple[str, ...]
    has_half_matmuls: bool
    not_finite: str | None
    not_entered: tuple[str, ...]

    def scales(self) -> tuple[float, float] | None:
        """Returns the range of loss scales for which the backward pass fits into half precision.

        Returns:
          `(low, high)`, powers of two. At `low` and above, at most 1% of the L1 norm of each scaled result underflows.
          Up to `high`, no scaled result overflows. If `low > high`, no scale fits all results. Without scaled results
          in half precision the range is `(2**-126, 2**126)`. None if no scale helps, because the forward pass
          overflows, or because the loss or a gradient is not finite even in float32.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> loss_fn = lambda w: jnp.sum((w * jnp.float16(2.0**-20)).astype(jnp.float32))
        >>> jmpscale.range_report(loss_fn)(jmpscale.dynamic(), jnp.ones(3, jnp.float16)).scales()
        (0.03125, 32768.0)
        """
        if self.not_finite or self._forward_overflows():
            return None
        scaled = [row for row in self.rows if row.scaled]
        low = max((row.smallest_power for row in scaled), default=-math.inf)
        high = min((row.largest_power for row in scaled), default=math.inf)
        return _power(low), _power(high)

    def describe(self, limit: int = 20) -> str:
        """Describes what to do, in one to three sentences, and then each result in a table, most critical ones first.

        Args:
          limit: the number of rows of the table.

        Returns:
          The sentences; the lines with operations that are inaccurate in half precision; the matmuls that are not in
          half precision, if others are; the table; and what could not be evaluated in float32. In the table, `headroom`
          is the number of bits by which the result could grow, and `step` the iteration with the largest magnitude; 2/0
          is iteration 0 of a loop in iteration 2 of another loop.

        Raises:
          TypeError: `limit` is not an integer.
          ValueError: `limit` is below 1.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> loss_fn = lambda w: jnp.sum((w * w).astype(jnp.float32))
        >>> report = jmpscale.range_report(loss_fn)(jmpscale.dynamic(), jnp.full(3, 300.0, jnp.float16))
        >>> print(report.describe().splitlines()[0])  # doctest: +ELLIPSIS
        The forward pass overflows: mul at ... reaches 9e+04, and the largest number of float16 is 65504. ...
        """
        check_count("limit", limit)
        parts = [self._summary(), *self._remarks()]
        if self.rows:
            parts.append(self._table(limit))
        parts += _listing("These operations ran in their own dtype, and are not part of the report:", self.not_entered)
        return "\n".join(parts)

    def _forward_overflows(self) -> list[RangeRow]:
        return [row for row in self.rows if row.overflows and not row.scaled]

    def _summary(self) -> str:
        """Returns what to do."""
        if self.not_finite:
            return f"The result of {self.not_finite} is not finite at any loss scale. {_NOT_FINITE}"
        if overflows := self._forward_overflows():
            return _describe_forward_overflow(overflows)
        if not self.rows:
            return (
                "The program computes in float32: it holds no result in half precision, and needs no loss scale. "
                "jmpscale.autocast runs its matmuls in half precision."
            )
        if not any(row.scaled and row.dtype == "float16" for row in self.rows):
            return "The backward pass holds no result in float16, and needs no loss scale."
        return self._describe_scales()

    def _describe_scales(self) -> str:
        scaled = [row for row in self.rows if row.scaled]
        lowest = max(scaled, key=lambda row: row.smallest_power)
        highest = min(scaled, key=lambda row: row.largest_power)
        low, high = _power(lowest.smallest_power), _power(highest.largest_power)
        below = f"{lowest.underflow_name} underflows below {format_scale(low)}"
        above = f"{highest.name} overflows above {format_scale(high)}"
        if low > high:
            return f"{self._first_remedy()}No loss scale fits: {below}, and {above}. Keep one of them in float32."
        fitting = f"Loss scales from {format_scale(low)} to {format_scale(high)} fit"
        text = f"{fitting}; yours is {format_scale(self.scale)}"
        if self.scale > high:
            remedy = "A dynamic scale backs off; decrease a static scale."
            return f"{self._first_remedy()}{text}, which is too large: {above}. {remedy}"
        if self.scale < low:
            remedy = "A dynamic scale grows up to max_scale; increase a static scale."
            return f"{self._first_remedy()}{text}, which is too small: {below}. {remedy}"
        return f"{text}."

    def _first_remedy(self) -> str:
        """Returns a sentence on operations that may be the reason why a scale does not fit, or nothing."""
        if not self.sensitive:
            return ""
        operations = list(dict.fromkeys(name for _, names in self.sensitive for name in names))
        lines = _enumerate([line for line, _ in self.sensitive])
        cause = f"{_enumerate(operations)} {'is' if len(operations) == 1 else 'are'} inaccurate in half precision"
        return f"First compute {lines} in float32, because {cause}. "

    def _remarks(self) -> list[str]:
        lost = [row.line for row in self.rows if not row.scaled and row.underflow > _LOST]
        parts = _listing(
            "Most of the result of these lines in the forward pass underflows; compute them in float32:",
            list(dict.fromkeys(lost)),
        )
        sensitive = [f"{line}: {', '.join(operations)}" for line, operations in self.sensitive]
        parts += _listing("These operations are inaccurate in half precision; compute them in float32:", sensitive)
        if self.has_half_matmuls:
            parts += _listing("These lines have matmuls in float32:", self.float32_matmuls)
        return parts

    def _table(self, limit: int) -> str:
        order = sorted(range(len(self.rows)), key=lambda i: (*_criticality(self.rows[i]), i))
        header = ["result", "module", "pass", "max_abs", "headroom", "overflow", "underflow", "subnormal"]
        shown = [self.rows[i] for i in order[:limit]]
        table = [header, *map(_cells, shown)]
        if not any(row.module for row in shown):
            table = [[first, *others] for first, _, *others in table]
        if any(row.steps for row in shown):
            steps = ["step", *(format_steps(row.steps) for row in shown)]
            table = [[*cells, step] for cells, step in zip(table, steps, strict=True)]
        return format_table(table)


def format_steps(steps: tuple[int, ...]) -> str:
    """Formats the iterations of nested loops, such as 2/0."""
    return "/".join(map(str, steps))


def format_scale(scale: float) -> str:
    """Formats a loss scale, as a power of two if it is one."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else format_number(scale)


def _power(exponent: float) -> float:
    """Returns a power of two within the limits of loss scales."""
    low, high = math.log2(SMALLEST_SCALE), math.log2(LARGEST_SCALE)
    return 2.0 ** min(max(exponent, low), high)


def _describe_forward_overflow(rows: list[RangeRow]) -> str:
    first, lines = rows[0], list(dict.fromkeys(row.line for row in rows))
    cause = f"reaches {first.max_abs:.3g}, and the largest number of {first.dtype} is {jnp.finfo(first.dtype).max:g}"
    remedy = "compute this line, and the lines that read its result, in float32, or normalize its input"
    if first.max_abs >= POLE:
        cause = f"is infinite, because {first.dtype} rounds its operand to zero"
        remedy = "compute this line, and the lines that its operand comes from, in float32"
    text = f"The forward pass overflows: {first.name} {cause}. A loss scale cannot prevent that: {remedy}."
    return f"{text} These lines overflow, too: {_enumerate(lines[1:])}." if len(lines) > 1 else text


def _enumerate(names: Sequence[str], limit: int = 4) -> str:
    """Returns names as in `a, b and c`."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _listing(title: str, lines: Sequence[str]) -> list[str]:
    """Returns a titled list of lines, or nothing if there are none."""
    more = [f"  and {len(lines) - _SHOWN_LINES} more"] if len(lines) > _SHOWN_LINES else []
    return [title, *(f"  {line}" for line in lines[:_SHOWN_LINES]), *more] if lines else []


def _criticality(row: RangeRow) -> tuple[int, float]:
    """Returns a key by which the most critical rows are sorted first; overflows remain in program order."""
    if row.overflows:
        return (1 if row.scaled else 0), 0.0
    if row.scaled and row.underflow > MAX_UNDERFLOW:
        return 2, -row.underflow
    lowest = math.log2(row.scale) - row.smallest_power if row.scaled else math.inf
    return 3, min(row.headroom, lowest)


def _cells(row: RangeRow) -> list[str]:
    fractions = map(_percentage, (row.overflow, row.underflow, row.subnormal))
    kind = "backward" if row.backward else "forward"
    headroom = f"{row.headroom:.1f}"
    return [f"{row.operation}, {row.line}", row.module, kind, f"{row.max_abs:.3g}", headroom, *fractions]


def _percentage(fraction: float) -> str:
    return f"{fraction:.1%}" if fraction >= 0.0005 else "<0.1%" if fraction else "0"


def range_report(
    fun: Function, argnums: Any = 0, has_aux: bool = False, *, transform: Function = jax.value_and_grad
) -> Callable[..., RangeReport]:
    """Creates a function that reports where a training step leaves the range of half precision, by source line.

    Call it as `jmpscale.value_and_grad` is called, with the same options, outside of `jax.jit`. The forward and
    backward pass run once, with all half-precision values in float32, so that nothing saturates, and the report shows
    where each overflow and underflow begins. It describes each result that the training step would hold in half
    precision. The backward pass is linear in the loss scale, so one run also gives the range of scales that fit.

    The evaluation enters compiled functions, loops, the branches that are taken, checkpointed functions, custom
    derivative rules and `jax.shard_map`. Kernels and callbacks run in their own dtype.

    Args:
      fun: the loss function, as for `value_and_grad`; `autocast` may be applied to it. Of a training step that is
        written with `scale` and `unscale`, pass the loss function without them. If `fun` itself multiplies by a scale,
        as `loss_scaled` does, that scale is a constant factor, and the report is about the scaler.
      argnums: which positional arguments of `fun` to differentiate with respect to.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data.
      transform: the `value_and_grad` of the model's framework.

    Returns:
      `f(scaler, *args, **kwargs) -> RangeReport`. The first argument is a scaler, or any pytree that contains exactly
      one. Flax NNX objects among the arguments are not changed.

    Raises:
      TypeError: `fun` is not callable, or an argument is abstract, traced, or a `jax.Ref`.
      ValueError: the first argument contains no scaler, more than one, or a batch of scalers; or an argument was
        donated to a compiled function.

    The checkers of PyTorch and Paddle that find such operations need the hardware and a run in half precision:
    `DebugUnderflowOverflow` of Hugging Face Transformers, and `paddle.amp.debugging`.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> loss_fn = lambda w, x: jnp.mean(((x @ w) * 1e-6).astype(jnp.float32))
    >>> w, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4), jnp.float16)
    >>> report = jmpscale.range_report(loss_fn)(jmpscale.dynamic(), w, x)
    >>> report.scales()
    (0.5, 524288.0)
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be the loss function, got {describe(fun)}. The scaler is the first argument of the new "
            "function: range_report(loss_fn)(scaler, params, batch)."
        )
    differentiate = functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, transform=transform)
    differentiated = differentiate(fun)  # checks the options

    def range_report_fun(scaler: PyTree, /, *args: Any, **kwargs: Any) -> RangeReport:
        state = find_scaler(scaler, remedy="Call range_report(loss_fn)(scaler, params, batch).")
        _check_concrete({"scaler": state, "args": args, "kwargs": kwargs})

        def loss_and_grads(state: ScalerState, args: PyTree, kwargs: PyTree) -> PyTree:
            out, grads = differentiated(state, *args, **kwargs)
            return out[0] if has_aux else out, grads

        scale = 1.0 if state.config.mode == "disabled" else float(state.loss_scale)
        return _report(loss_and_grads, scale, args, kwargs)

    range_report_fun.__name__ = f"range_report_of_{getattr(fun, '__name__', 'fun')}"
    return range_report_fun


def _check_concrete(trees: dict[str, PyTree]) -> None:
    """Raises if an argument has no values."""
    for name, tree in trees.items():
        check_no_refs(tree, name)
        for path, leaf in named_leaves(tree):
            if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{name} must hold arrays with values, got {describe(leaf)} without values at {name}{path}. Call "
                    "range_report outside of jax.jit, with the arrays of a training step."
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{name} must hold arrays with values, got a deleted {describe(leaf)} at {name}{path}. It was "
                    "donated to a compiled function: call range_report before the training step."
                )


def _report(loss_and_grads: Function, scale: float, args: PyTree, kwargs: PyTree) -> RangeReport:
    arrays, rebuild = _split_arrays((args, kwargs))

    def floating_outputs(loss_scale: jax.Array, arrays: list[Any]) -> list[Any]:
        args, kwargs = rebuild(arrays)
        outputs = loss_and_grads(static(1.0)._replace(loss_scale=loss_scale), args, kwargs)
        return [x for x in jax.tree.leaves(outputs) if is_array(x) and is_inexact(x)]

    # At a scale of 1 the gradients have true units, and are far from the limits of float32.
    inputs = [jnp.float32(1.0), *arrays]
    closed = jax.make_jaxpr(lambda inputs: floating_outputs(inputs[0], inputs[1:]))(inputs)
    evaluation = Evaluation()
    place = Place(outputs=output_variables(closed.jaxpr, [True] * len(closed.jaxpr.outvars)))

    def evaluate(consts: list[Any], inputs: list[Any]) -> tuple[jax.Array, list[Statistics]]:
        degrees = [1, *(0 for _ in arrays)]
        outputs, statistics = evaluation.run(closed.jaxpr, consts, inputs, degrees, place)
        finite = [jnp.isfinite(x).all() for x in outputs]
        return functools.reduce(jnp.logical_and, finite, jnp.bool_(True)), statistics

    # Non-finite values are what is looked for.
    with jax.debug_nans(False), jax.debug_infs(False):
        compiled = jax.jit(evaluate, compiler_options=_COMPILER_OPTIONS.get(jax.default_backend()))
        finite, statistics = jax.device_get(compiled(closed.consts, inputs))
    return _conclude(evaluation, statistics, bool(finite), scale)


def _split_arrays(tree: PyTree) -> tuple[list[Any], Function]:
    """Returns the floating-point arrays of a tree, and a function that makes a copy of the tree with other arrays."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    are_objects = [is_nnx_object(leaf) for leaf in leaves]
    objects = [leaf for leaf, is_object in zip(leaves, are_objects, strict=True) if is_object]
    others = [None if is_object else leaf for leaf, is_object in zip(leaves, are_objects, strict=True)]
    # Flax NNX objects are changed in place, so the trace receives copies of them.
    nnx = sys.modules.get("flax.nnx")
    graph, state = nnx.split(objects) if nnx and objects else (None, None)
    arrays, replace = flatten_matching((others, state), lambda leaf: is_array(leaf) and is_inexact(leaf))

    def rebuild(arrays: Iterable[Any]) -> PyTree:
        others, state = replace(arrays)
        copies = iter(nnx.merge(graph, state) if nnx and objects else ())
        merged = [next(copies) if is_object else x for x, is_object in zip(others, are_objects, strict=True)]
        return jax.tree.unflatten(treedef, merged)

    return arrays, rebuild


def _conclude(evaluation: Evaluation, statistics: list[Statistics], finite: bool, scale: float) -> RangeReport:
    pairs = list(zip(evaluation.sites, statistics, strict=True))
    not_finite = None
    if not finite:
        # NaN spreads and stays, but an infinity may be intended, such as the logarithm of a probability of zero.
        first = next((site for site, s in pairs if s.kind == NAN), None)
        first = first or next((site for site, s in pairs if s.kind == INFINITE), None)
        not_finite = f"{first.operation} at {first.line}" if first else "an argument"
    executed = [(site, s.range) for site, s in pairs if s.range is not None and s.range.max_abs >= 0]
    return RangeReport(
        rows=tuple(_make_row(site, found, scale) for site, found in executed),
        scale=scale,
        sensitive=tuple((line, tuple(operations)) for line, operations in evaluation.sensitive.items()),
        float32_matmuls=tuple(evaluation.wide_matmuls),
        has_half_matmuls=evaluation.has_half_matmul,
        not_finite=not_finite,
        not_entered=tuple(evaluation.opaque),
    )
