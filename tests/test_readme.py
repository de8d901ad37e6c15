"""Every code block of the README runs by itself and prints what it says, and a package index can show the README."""

import re

import pytest

import pages

TEXT = (pages.DOCS.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
PRINTED = dict(re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("code", PYTHON, ids=["optax wrapper", "functional API"])
def test_each_block_alone_trains_and_prints_what_it_says(code, capsys):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"loss .*, scale", printed)
    if code in PRINTED:
        pages.assert_alike(printed, PRINTED[code])


def test_the_first_block_prints_loss_scale_and_skips():
    assert len(PRINTED) == 1
    assert re.search(r"loss [\d.]+, scale \d+, skipped \d+", PRINTED[PYTHON[0]])


def test_readme_has_the_two_commands():
    for module in ("jmpscale", "pytest"):
        assert sum(language == "bash" and f"-m {module}" in code for language, code in BLOCKS) == 1


def test_a_package_index_can_show_it():
    """Relative links do not work there, so pages are named by their paths. The picture has an alternative text."""
    assert re.findall(r"(?<!!)\[[^\]]*\]\((?!https://)", TEXT) == []
    assert re.findall(r"!\[(.+)\]\((.+)\)", TEXT)[0][1] == "docs/jmpscale.png"
    named = re.findall(r"`((?:docs|notebooks)/[\w./]*)`", TEXT)
    assert len(named) >= 8
    assert not [path for path in named if not (pages.DOCS.parent / path).exists()]


def test_its_comparison_is_part_of_the_full_comparison():
    rows = [line for line in TEXT.split("## Comparison")[1].split("## ")[0].splitlines() if line.startswith("|")]
    full = (pages.DOCS / "comparison.md").read_text().splitlines()
    assert len(rows) >= 6
    assert [row for row in rows if row not in full] == []
