"""The texts of errors, warnings and reports."""

import math
from collections.abc import Sequence

import jax
import numpy as np


def describe(value: object) -> str:
    """Describes a value in a message: the dtype and shape of an array, a short text, a length, a name, or the type."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}{list(shape)}"
    if isinstance(value, (str, int, float, complex, type(None))):
        return truncate(repr(value))
    if type(value) is tuple or type(value) is list:
        return f"{type_name(value)} of {len(value)}"
    return getattr(value, "__name__", None) or type_name(value)


def type_name(value: object) -> str:
    """Returns the name of a value's type; `Array` for every class of JAX arrays."""
    return "Array" if isinstance(value, jax.Array) else type(value).__name__


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def format_number(value: float | np.floating) -> str:
    """Formats a number, and a large or small power of two as one, such as 2^16."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not -10 <= exponent - 1 <= 10:
        return f"2^{exponent - 1}"
    return str(value).removesuffix(".0")


def truncate(value: object, length: int = 60) -> str:
    """Returns the text of a value, cut to `length` characters."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def cut_to_difference(one: str, other: str, length: int = 60) -> tuple[str, str]:
    """Returns two texts, cut to `length` characters around the first one that differs."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    start = max(0, next(differing, min(len(one), len(other))) - length // 2)
    first, second = (f"...{text[start:]}" if start else text for text in (one, other))
    return truncate(first, length), truncate(second, length)


def format_table(rows: list[list[str]]) -> str:
    """Aligns the columns of a table, the first to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(map("  ".join, lines))


def format_percentage(fraction: float) -> str:
    """Formats a fraction as a percentage with three digits; large ones are not exact."""
    if math.isinf(fraction):
        return "inf"
    if fraction > 10:
        return ">1000%"
    if fraction == 0:
        return "0"
    return "<0.001%" if fraction < 1e-5 else f"{100 * fraction:.3g}%"


def format_scale(scale: float) -> str:
    """Formats a loss scale, as a power of two if it is one."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else format_number(scale)


def enumerate_names(names: Sequence[str], limit: int = 4) -> str:
    """Returns names as in `a, b and c`."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
