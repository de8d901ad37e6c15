"""Selects which of many similar cases run by default; the others run with `--full`."""

import itertools

import pytest


def some(cases, default):
    """Returns the cases as parameters; those not in `default` run only with `--full`.

    Cases in a dictionary are selected by name, and their values are the parameters.
    """
    named = cases if isinstance(cases, dict) else {case: case for case in cases}
    assert all(name in named for name in default), f"not among the cases: {default}"
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=() if name in default else pytest.mark.full,
            id=name if named is cases else None,
        )
        for name, case in named.items()
    ]


def some_of_all(*values, default):
    """Returns `some` of all combinations of the values, one of each."""
    return some(itertools.product(*values), default)
