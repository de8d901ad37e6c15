"""Which of many alike cases the README's command runs; the rest is for `--full`."""

import itertools

import pytest


def some(cases, default):
    """Returns parameters of which those in `default` always run; the others show the same elsewhere, with `--full`."""
    cases, default = list(cases), list(default)
    assert all(case in cases for case in default), f"not among the cases: {default}"
    marked = [pytest.mark.full if case not in default else () for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marked, strict=True)
    ]


def some_of_all(*values, default):
    """Returns `some` of all combinations of the values, one of each."""
    return some(itertools.product(*values), default)
