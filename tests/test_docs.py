"""Every example of the documentation is short enough to copy, and runs as it stands."""

import pathlib

import pytest

import pages

EXAMPLES = [(page, heading) for page in pages.PAGES for heading in pages.examples(page)]
TESTS = [path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py") if path.name != "test_docs.py"]


def _has_tests_of_its_own(page, heading):
    name = page.removeprefix("guides/")
    return any((f'"{page}"' in text and f'"{heading}"' in text) or f'"{name}", "{heading}"' in text for text in TESTS)


def _name(value):
    return value


@pytest.mark.parametrize(("page", "heading"), EXAMPLES, ids=_name)
def test_it_is_short(page, heading):
    lines = [line for line in pages.examples(page)[heading].splitlines() if line.strip()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


# Equinox 0.13.0, the newest for JAX 0.7, imports what that calls deprecated.
@pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("page", "heading"), [e for e in EXAMPLES if not _has_tests_of_its_own(*e)], ids=_name)
def test_it_runs(page, heading):
    pages.run(page, heading)
