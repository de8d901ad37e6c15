"""The result of a diagnosis: measured numbers, a row for each line and pass, and their description."""

import dataclasses
import enum
import math
import textwrap
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from jmpscale._base.arguments import check_count
from jmpscale._base.text import format_percentage, format_table, truncate
from jmpscale._state import ScalerState

_WIDTH = 100  # columns
_RANGE = {"headroom", "overflow", "tiny"}  # columns
_LARGE_HEADROOM = 64  # bits: float16 has at most 40
_LONGEST_LAYER = 24  # characters of a cell
_SHOWN = 8  # operations that were not entered


@dataclasses.dataclass(frozen=True)
class DiagnosisRow:
    """A line of the program in one pass, in all iterations of the loops around it; created by `diagnose`.

    Attributes:
      line: the user's line, such as `model.py:41 (mlp)`.
      pass_: the pass: `"forward"`, `"backward"` or `"update"`, which is what the step does apart from the gradients.
      operation: the name of the first JAX primitive that overflows, or else of the one with the largest result.
      dtype: the name of the dtype of its result.
      max_abs: the largest finite magnitude in float32. It and the next two are NaN, and not measured, in an update in
        bfloat16, which has the range of float32.
      overflow: the fraction of values that are finite only in float32, in the operation for which it is largest.
      tiny: the fraction of values that are below the smallest normal number of the dtype, and so lose digits or become
        zero, but are not zero in float32, in the operation for which it is largest.
      in_lines: whether the line is one of `Diagnosis.lines`.
      alone: the error of the gradients if this row alone computes in half precision; infinite if a value is not finite,
        at least 100% if the loss is wrong. It can exceed the error of the whole program, because errors cancel. None if
        there are no `lines` and the error of the whole program is below 5%, or `accepted_error`; or the program has
        more than 64 rows.
      casts: for a line that casts several arguments, such as a tree of parameters: the names of those that are wrong
        alone, such as `params['w']`. They are measured if an error begins in this row; none if more than 3 are wrong.
      layers: for a line that several layers run: those in which the error begins, such as `Model/Block_7`, by the
        scopes of Flax Linen, Haiku and `jax.named_scope`, or the parameter that is read there, such as
        `params['layers'][7]['w']`; none if more than 3, or most of them, are wrong.
    """

    line: str
    pass_: str
    operation: str
    dtype: str
    max_abs: float
    overflow: float
    tiny: float
    in_lines: bool
    alone: float | None
    casts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def headroom(self) -> float:
        """The number of bits by which the result could grow before it overflows."""
        return math.log2(float(jnp.finfo(self.dtype).max) / self.max_abs) if self.max_abs > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class DiagnosisChange:
    """What a training step makes of a leaf of its state, or another result; created by `diagnose_step`.

    Attributes:
      name: the leaf, such as `params['w']`, or the result, such as `result['accuracy']`.
      dtype: the name of its dtype.
      is_state: whether it is a leaf of the state.
      error: the L2 norm of the difference between its change and the change that an update in float32 makes, with the
        same gradients, relative to the norm of that change. A leaf to which no gradient leads, such as a running mean,
        is compared with the whole step in float32; a result is compared by its value. Infinite if a value is finite in
        float32 only, or changes in half precision only. Leaves of which one takes what rounding removes from the other
        one, as in Kahan summation, are compared as a pair; a leaf that holds nothing else has the error 0. The error of
        a leaf that is rounded at random is the systematic one.
    """

    name: str
    dtype: str
    is_state: bool
    error: float


class FindingKind(enum.StrEnum):
    """What a `DiagnosisFinding` is about.

    Attributes:
      FORWARD_OVERFLOW: a result of the forward pass overflows, which no loss scale prevents.
      BACKWARD_OVERFLOW: a result of the backward pass overflows at each loss scale that does not underflow.
      UNDERFLOW: results underflow. Without `lines`, the remedy is a scaler, or a larger number that scales the loss.
      ROUNDING: rounding makes a gradient or the loss wrong.
      WRONG_INDICES: rounding makes integers wrong that are indices, such as positions.
      SMALL_SCALE: the loss scale is too small.
      LARGE_SCALE: the loss scale is too large, or the number, or another library's scaler, that scales the loss.
      UNUSED_SCALER: no gradient depends on the scale of a dynamic scaler.
      NOT_SCALED: values are unscaled although the loss scale does not multiply them.
      LOST_CHANGE: rounding removes most of the change of a leaf of the state.
      WRONG_CHANGE: the change of a leaf of the state, or its new value, is wrong.
      WRONG_RESULT: another result of the step is wrong.
      STALLED: a leaf of the state, such as an average or a counter, will stop moving, or an average stays far from what
        it averages.
      LOST_DECAY: the decay of a parameter is lost.
      ROUNDED_CONSTANT: a leaf does not change because a constant near 1 is rounded.
      ROUNDED_INPUT: an argument or a constant has too few digits; `error` is the change that a move within its last
        place makes.
      COARSE_RANDOM: random numbers in half precision are too coarse for what is chosen by them.
      NOT_FINITE: a value is infinite or NaN, in float32 too.
      NOT_COMPARED: something was not compared, so nothing is known of it.
      LOST_PROGRESS: in a run, the loss makes less progress than in float32.
      LAGGING: in a run, a leaf of the state does not get as far as in float32.
    """

    FORWARD_OVERFLOW = enum.auto()
    BACKWARD_OVERFLOW = enum.auto()
    UNDERFLOW = enum.auto()
    ROUNDING = enum.auto()
    WRONG_INDICES = enum.auto()
    SMALL_SCALE = enum.auto()
    LARGE_SCALE = enum.auto()
    UNUSED_SCALER = enum.auto()
    NOT_SCALED = enum.auto()
    LOST_CHANGE = enum.auto()
    WRONG_CHANGE = enum.auto()
    WRONG_RESULT = enum.auto()
    STALLED = enum.auto()
    LOST_DECAY = enum.auto()
    ROUNDED_CONSTANT = enum.auto()
    ROUNDED_INPUT = enum.auto()
    COARSE_RANDOM = enum.auto()
    NOT_FINITE = enum.auto()
    NOT_COMPARED = enum.auto()
    LOST_PROGRESS = enum.auto()
    LAGGING = enum.auto()


@dataclasses.dataclass(frozen=True)
class DiagnosisFinding:
    """Something that is wrong in a training step or a run, or was not compared; created by the diagnoses.

    Attributes:
      kind: what is wrong.
      names: the gradients, leaves of the state, results or arguments that it concerns, such as `params['w']`. In a step
        with several scalers, the first name of a finding about a loss scale is the scaler, such as
        `opt_state['d'].scaler`, and so is that of any finding with a `scaler`.
      lines: the lines to change: with them in float32, `error_then` remains.
      dtype: the name of the dtype that is too small; None if it is not about one.
      error: the largest relative error, as in `Diagnosis.gradient_error` or `DiagnosisChange.error`; in a run, the part
        of the decrease of the loss, or of the change of the first leaf, that is missing; None if it is not about an
        error.
      error_then: the largest relative error after the remedy; None if it was not measured.
      scaler: the scaler that is right after the remedy, in place of the present one: if there are `lines`, once they
        compute in float32. None if the present one is right then.
      layers: the layers in which it begins, as in `DiagnosisRow.layers`.
    """

    kind: FindingKind
    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    dtype: str | None = None
    error: float | None = None
    error_then: float | None = None
    scaler: ScalerState | None = None
    layers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What half precision does to a training step; created by `diagnose`.

    Attributes:
      loss: the loss, as the program is written; None if the step does not return it.
      loss_float32: the loss of the same program in float32.
      gradient_error: the L2 norm of the difference between a gradient at the current scale and in float32, relative to
        the norm in float32, for the worst parameter. It is infinite if a gradient is not finite.
        Parameters whose gradient in float32 is rounding noise, or negligible beside the others, do not count, and
        neither do values that a backward pass returns in place of a gradient and the loss scale does not multiply.
      loss_scale: the current loss scale.
      fitting_scales: the smallest and the largest loss scale that fit, both powers of two; None if no scale fits: the
        gradients are not finite at any scale, or wrong at all of them, by more than 50% or `accepted_error`; or no
        gradient can be compared, as if those in float32 depend on the scale.
        A scale fits if the gradients are finite, and nearly as accurate as at the best scale: the error of each is at
        most 1.1 times its smallest one, plus one percentage point, plus a quarter of the largest error at the best
        scale. If a gradient has an error of 5% or more at every scale, the error of the forward pass alone counts if it
        is larger than the smallest one.
      scaler: the scaler that helps the program as it is, with the settings of the present one that need no change: a
        scale that fits, or has room for larger gradients. None if the present scaler is right, and if none helps: a
        scaler that helps only after an edit is part of the finding that names the lines. If the step has several
        scalers, it replaces the one that the first finding names, and each other one has a finding of its own. The
        fields about loss scales are those of this scaler, or of the one whose gradients have the largest error.
      scale_errors: pairs of a loss scale and the `gradient_error` at this scale, for all scales that were tried.
      lines: a minimal set of lines that must compute in float32, in program order; empty if none need to. A set of more
        than 12 lines need not be minimal.
      rows: a `DiagnosisRow` for each line and pass with results in half precision, in program order. They are measured
        at the current scale; if there are `lines`, at a scale that fits once they compute in float32.
      not_entered: the operations that run as written, in the float32 run too, such as kernels.
      summary: the result in a few sentences, with the remedy if one is needed.
      findings: a `DiagnosisFinding` for all that is wrong, the worst one first; empty if the step is right.
      changes: a `DiagnosisChange` for each leaf of the state, and for each other result, that half precision may change
        other than through the gradients; only of a diagnosis by `diagnose_step`.
      state: the arguments of the step that it returns, which are its state; only by `diagnose_step`.
      kept: the matmuls that `autocast` leaves in float32 although the program does not request it, with their number,
        the line of the first one, and the reason, such as a function with a derivative rule of its own.
    """

    loss: float | None
    loss_float32: float | None
    gradient_error: float
    loss_scale: float
    fitting_scales: tuple[float, float] | None
    scaler: ScalerState | None
    scale_errors: tuple[tuple[float, float], ...]
    lines: tuple[str, ...]
    rows: tuple[DiagnosisRow, ...]
    not_entered: tuple[str, ...]
    summary: str
    findings: tuple[DiagnosisFinding, ...] = ()
    changes: tuple[DiagnosisChange, ...] = ()
    state: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def describe(self, limit: int = 20) -> str:
        """Returns the summary and a table of the lines, in 100 columns.

        Args:
          limit: the number of rows of the table.

        Returns:
          The summary; the table, with `lines` first and then the rows with the largest errors alone; the operations
          that were not entered; and what `autocast` leaves in float32. In the table, `headroom` is the number of bits
          by which a result could grow.

        Raises:
          TypeError: `limit` is not an integer.
          ValueError: `limit` is below 1.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> loss_fn = lambda w: jnp.sum((w * w).astype(jnp.float32))
        >>> diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), jnp.full(3, 300.0, jnp.float16))
        >>> print(diagnosis.describe())  # doctest: +ELLIPSIS
        The forward pass overflows: mul at ...
        """
        check_count("limit", limit)
        parts = [textwrap.fill(self.summary, _WIDTH, break_long_words=False, break_on_hyphens=False)]
        if self.rows:
            parts.append(self._table(limit))
        if self.not_entered:
            parts.append("These operations run as written, in the float32 run too:")
            parts += [f"  {truncate(name, _WIDTH - 2)}" for name in self.not_entered[:_SHOWN]]
            parts += [f"  and {len(self.not_entered) - _SHOWN} more"] if len(self.not_entered) > _SHOWN else []
        if self.kept:
            parts.append("autocast leaves in float32:")
            parts += [textwrap.fill(x, _WIDTH, initial_indent="  ", subsequent_indent="  ") for x in self.kept]
        return "\n".join(parts)

    def _table(self, limit: int) -> str:
        shown = worst_first(self.rows)[:limit]
        columns = ["line", "pass", "dtype", "max_abs", "headroom", "overflow", "tiny", "alone", "casts", "layers"]
        # A column of numbers that were not measured, or that say nothing, is omitted.
        silent = _RANGE if all(map(_is_in_range, shown)) else set()
        filled = [x for x in zip(columns, *map(_cells, shown), strict=True) if any(x[1:]) and x[0] not in silent]
        table = [list(cells) for cells in zip(*filled, strict=True)]
        width = len(format_table(table).partition("\n")[0])
        if width > _WIDTH and table[0][-2:] == ["casts", "layers"]:  # the findings have the layers
            table = [row[:-1] for row in table]
            width = len(format_table(table).partition("\n")[0])
        longest = max(len(row[0]) for row in table)
        shown_table = [[truncate(cells[0], max(longest - width + _WIDTH, 12)), *cells[1:]] for cells in table]
        return "\n".join(map(str.rstrip, format_table(shown_table).splitlines()))


def _is_in_range(row: DiagnosisRow) -> bool:
    """Tests whether results use a small part of the range of their dtype, as in bfloat16."""
    return not row.overflow > 0 and not row.tiny > 0 and row.headroom > _LARGE_HEADROOM


def worst_first(rows: Iterable[DiagnosisRow]) -> list[DiagnosisRow]:
    """Sorts rows: the lines that must compute in float32, in program order, and then the largest errors."""
    return sorted(rows, key=lambda row: (0,) if row.in_lines else (1, -(row.alone or 0.0), row.headroom))


def _range_cells(row: DiagnosisRow) -> list[str]:
    fractions = map(format_percentage, (row.overflow, row.tiny))
    return [f"{row.max_abs:.3g}", f"{row.headroom:.1f}", *fractions]


def _layers_cell(layers: Sequence[str]) -> str:
    """Returns the end of the first name, which tells layers apart, and the number of the others."""
    if not layers:
        return ""
    others = f" (+{len(layers) - 1})" if len(layers) > 1 else ""
    longest = _LONGEST_LAYER - len(others)
    return f"{layers[0] if len(layers[0]) <= longest else f'...{layers[0][3 - longest :]}'}{others}"


def _cells(row: DiagnosisRow) -> list[str]:
    return [
        row.line,
        row.pass_,
        row.dtype,
        *(["", "", "", ""] if math.isnan(row.max_abs) else _range_cells(row)),
        "" if row.alone is None else format_percentage(row.alone),
        ", ".join(row.casts),
        "" if row.casts else _layers_cell(row.layers),
    ]
