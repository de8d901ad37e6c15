"""Tables of named rows as parameters of a test."""

from typing import Any, NamedTuple

import pytest


class Full(NamedTuple):
    """A row that runs only with --full."""

    row: Any


def full(row):
    """Marks a row of a table: it is slow, or repeats a default row with other shapes, devices or libraries."""
    return Full(row)


def rows(table):
    """Returns the rows of a table as parameters of a test, which is named after the rows."""
    return [
        pytest.param(row.row, id=name, marks=pytest.mark.full) if isinstance(row, Full) else pytest.param(row, id=name)
        for name, row in table.items()
    ]
