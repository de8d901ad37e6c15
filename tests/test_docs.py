"""Every example of the documentation runs as it stands, alone, and is short enough to copy."""

import pytest

import pages

EXAMPLES = [
    pytest.param(page, heading, id=f"{page}: {heading}") for page in pages.PAGES for heading in pages.examples(page)
]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("page", "heading"), EXAMPLES)
def test_it_is_short(page, heading):
    lines = [line for line in pages.examples(page)[heading].splitlines() if line.strip()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("page", "heading"), EXAMPLES)
def test_it_runs(page, heading):
    pages.run(page, heading)
