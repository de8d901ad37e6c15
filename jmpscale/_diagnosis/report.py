"""The result of a diagnosis: measured numbers, a row for each operation, and their description."""

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jmpscale._base.check import check_count
from jmpscale._base.text import format_table
from jmpscale._diagnosis.evaluate import Result, Site

_SHOWN = 8  # operations that were not entered


@dataclasses.dataclass(frozen=True)
class DiagnosisRow:
    """A result of an operation, in all iterations of the loops around it; created by `diagnose`.

    Attributes:
      line: the user's line, such as `model.py:41 (mlp)`.
      module: the path of the module or of the named scopes, such as `encoder/dense_1`.
      operation: the name of JAX's primitive.
      dtype: the name of the dtype.
      backward: whether the operation is part of the backward pass.
      max_abs: the largest finite magnitude in float32.
      error: the L2 norm of the difference to float32, relative to the norm in float32. It is infinite if a value
        overflows; this has no effect if a later operation removes the value, as softmax removes a mask.
      overflow: the fraction of values that are finite in float32 only.
      underflow: the fraction of the L1 norm in values that are zero, but not zero in float32.
      subnormal: the fraction of the L1 norm in values that are subnormal, and therefore less precise.
      steps: the iterations of the loops around the operation, outermost first and counted from 0, in which the error
        is largest.
    """

    line: str
    module: str
    operation: str
    dtype: str
    backward: bool
    max_abs: float
    error: float
    overflow: float
    underflow: float
    subnormal: float
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        """The operation and its line, and the iterations of loops in which the error is largest."""
        return name_of(self.operation, self.line, self.steps)

    @property
    def headroom(self) -> float:
        """The number of bits by which the result could grow before it overflows."""
        return math.log2(float(jnp.finfo(self.dtype).max) / self.max_abs) if self.max_abs else math.inf


def name_of(operation: str, line: str, steps: tuple[int, ...]) -> str:
    """Returns the name of a result in sentences."""
    return f"{operation} at {line}" + (f" in step {_format_steps(steps)}" if steps else "")


def _format_steps(steps: tuple[int, ...]) -> str:
    """Formats the iterations of nested loops, such as 2/0."""
    return "/".join(map(str, steps))


def make_rows(results: Iterable[Result]) -> dict[Site, DiagnosisRow]:
    """Returns a row for each operation with floating-point results, in program order."""
    executions: dict[Site, list[Result]] = {}
    for result in results:
        if not result.site.moves and jnp.issubdtype(result.site.dtype, np.floating):
            executions.setdefault(result.site, []).append(result)
    return {site: _make_row(site, found) for site, found in executions.items()}


def _make_row(site: Site, executions: list[Result]) -> DiagnosisRow:
    measured = [x.measured for x in executions]
    return DiagnosisRow(
        line=site.line,
        module=site.module,
        operation=site.operation,
        dtype=site.dtype.name,
        backward=site.backward,
        max_abs=max(abs(x.extreme) for x in measured),
        error=max(x.error for x in measured),
        overflow=max(x.overflow for x in measured),
        underflow=max(x.underflow for x in measured),
        subnormal=max(x.subnormal for x in measured),
        steps=max(executions, key=lambda x: x.measured.error).steps,
    )


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What half precision does to a training step; created by `diagnose`.

    Attributes:
      loss: the loss, as the program is written.
      loss_float32: the loss of the same program in float32.
      gradient_error: the L2 norm of the difference between a gradient at the present scale and in float32, relative to
        the norm in float32; of the parameter for which it is largest. It is infinite if a gradient is not finite.
        Parameters whose gradient in float32 is rounding noise do not count.
      loss_scale: the present loss scale.
      scale_errors: pairs of a loss scale and the `gradient_error` at this scale, for all scales that were tried.
      rows: a `DiagnosisRow` for each operation with floating-point results, in program order.
      causes: the rows at which the errors begin, if there are errors.
      not_entered: the operations that were not evaluated in float32, or not one at a time, such as kernels.
      summary: the result in one to three sentences, with the remedy if one is needed.
    """

    loss: float
    loss_float32: float
    gradient_error: float
    loss_scale: float
    scale_errors: tuple[tuple[float, float], ...]
    rows: tuple[DiagnosisRow, ...]
    causes: tuple[DiagnosisRow, ...]
    not_entered: tuple[str, ...]
    summary: str
    _fitting: tuple[float, float] | None = dataclasses.field(repr=False)

    def fitting_scales(self) -> tuple[float, float] | None:
        """Returns the smallest and the largest loss scale that fit, both powers of two.

        A scale fits if the gradients are finite, and their error is at most 1.1 times the smallest one, plus one
        percentage point.

        Returns:
          `(low, high)`, or None if no scale fits: the gradients are not finite at any scale, or useless at all of them.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> loss_fn = lambda w: jnp.sum((w * jnp.float16(2.0**-20)).astype(jnp.float32))
        >>> jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), jnp.ones(3, jnp.float16)).fitting_scales()
        (0.0625, 32768.0)
        """
        return self._fitting

    def describe(self, limit: int = 20) -> str:
        """Returns the summary and a table of the operations.

        Args:
          limit: the number of rows of the table.

        Returns:
          The summary; the table, with `causes` first and then the rows with the largest errors; and the operations that
          were not evaluated in float32. In the table, `headroom` is the number of bits by which a result could grow,
          and `step` the iteration with the largest error; 2/0 is iteration 0 of a loop in iteration 2 of another loop.

        Raises:
          TypeError: `limit` is not an integer.
          ValueError: `limit` is below 1.

        >>> import jax.numpy as jnp
        >>> import jmpscale
        >>> loss_fn = lambda w: jnp.sum((w * w).astype(jnp.float32))
        >>> diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), jnp.full(3, 300.0, jnp.float16))
        >>> print(diagnosis.describe().splitlines()[0])  # doctest: +ELLIPSIS
        The forward pass overflows: mul at ... reaches 9e+04, and the largest number of float16 is 65504. ...
        """
        check_count("limit", limit)
        parts = [self.summary]
        if self.rows:
            parts.append(self._table(limit))
        if self.not_entered:
            parts.append("These operations were evaluated as a whole, or in their own dtype:")
            parts += [f"  {name}" for name in self.not_entered[:_SHOWN]]
            parts += [f"  and {len(self.not_entered) - _SHOWN} more"] if len(self.not_entered) > _SHOWN else []
        return "\n".join(parts)

    def _table(self, limit: int) -> str:
        others = sorted((row for row in self.rows if row not in self.causes), key=lambda row: -row.error)
        shown = [*self.causes, *others][:limit]
        columns = ["result", "module", "pass", "dtype", "max_abs", "headroom", "error", "overflow", "underflow", "step"]
        table = [columns, *map(_cells, shown)]
        empty = {i for i, column in enumerate(zip(*table[1:], strict=True)) if not any(column)}
        return format_table([[cell for i, cell in enumerate(cells) if i not in empty] for cells in table])


def _cells(row: DiagnosisRow) -> list[str]:
    return [
        f"{row.operation}, {row.line}",
        row.module,
        "backward" if row.backward else "forward",
        row.dtype,
        f"{row.max_abs:.3g}",
        f"{row.headroom:.1f}",
        *map(format_percentage, (row.error, row.overflow, row.underflow)),
        _format_steps(row.steps),
    ]


def format_percentage(fraction: float) -> str:
    """Formats a fraction as a percentage with three digits."""
    if math.isinf(fraction):
        return "inf"
    if fraction == 0:
        return "0"
    if fraction < 1e-5:
        return "<0.001%"
    return f"{100 * fraction:.3g}%" if fraction < 10 else f"{100 * fraction:.0f}%"
