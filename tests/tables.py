"""Tables of named rows as parameters of a test."""

import pytest


def rows(table, only_full=(), default=None):
    """Returns the rows of a table as parameters of a test, which is named after the rows.

    The rows named in `only_full` also run only with --full; so do the rows that `default`, if given, does not name.
    """
    only_full = _only_full(table, only_full, default)
    return [_parameter(row, name, only_full) for name, row in table.items()]


def names(table, only_full=(), default=None):
    """Returns the names of the rows of a table as parameters of a test, as `rows` returns the rows."""
    only_full = _only_full(table, only_full, default)
    return [_parameter(name, name, only_full) for name in table]


def _only_full(table, only_full, default):
    if default is None:
        return only_full
    assert set(default) <= set(table), set(default) - set(table)
    return set(table) - set(default)


def _parameter(value, name, only_full):
    return pytest.param(value, id=name, marks=[pytest.mark.full] * (name in only_full))
