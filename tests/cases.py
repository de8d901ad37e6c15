"""Which of many alike cases the README's command runs; the rest is for `--full`."""

import itertools

import pytest


def some(cases, default):
    """Returns the cases as parameters; those not in `default` show the same once more, and run with `--full`.

    Cases with names, in a dictionary, are chosen by name, and their values are the parameters.
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
