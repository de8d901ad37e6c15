"""Runs the code of the README and of the documentation, and compares what it prints with the page."""

import re

import pytest

import pages

pytestmark = pytest.mark.usefixtures("standard_promotion")

README = (pages.DOCS.parent / "README.md").read_text()
README_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
README_OUTPUTS = dict(
    re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
)
PROGRAMS = [(page, heading) for page in pages.PAGES for heading in pages.examples(page)]


@pytest.mark.parametrize(
    "code", [code for language, code in README_BLOCKS if language == "python"], ids=["optax wrapper", "functional API"]
)
def test_readme_program_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"loss .*, scale", printed)
    if code in README_OUTPUTS:
        pages.assert_alike(printed, README_OUTPUTS[code])


def test_readme_has_outputs_and_commands():
    assert len(README_OUTPUTS) == 1
    for module in ("jmpscale", "pytest"):
        assert sum(language == "bash" and f"-m {module}" in code for language, code in README_BLOCKS) == 1


def test_readme_names_existing_files():
    named = re.findall(r"`((?:docs|notebooks)/[\w./]*)`", README)
    assert len(named) >= 8
    assert [path for path in named if not (pages.DOCS.parent / path).exists()] == []


@pytest.mark.full
@pytest.mark.parametrize(("page", "heading"), PROGRAMS, ids=str)
def test_page_program_runs(page, heading, capsys):
    pages.run(page, heading)
    if expected := pages.printed(page).get(heading):
        lines = capsys.readouterr().out.splitlines()[-expected.count("\n") :]
        pages.assert_alike("\n".join(lines), expected)


@pytest.mark.parametrize(
    ("printed", "alike"),
    [
        ("loss 0.196, 1 of 200", True),
        ("loss 0.199, 1 of 200", False),
        ("loss 0.194, 2 of 200", False),
        ("loss 0.194, 1 of 200 steps", False),
    ],
)
def test_assert_alike_tolerates_the_last_digit(printed, alike):
    if alike:
        pages.assert_alike(printed, "loss 0.194, 1 of 200")
    else:
        with pytest.raises(AssertionError):
            pages.assert_alike(printed, "loss 0.194, 1 of 200")
