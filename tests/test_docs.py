"""Every example of the documentation is short enough to copy, and runs as it stands."""

import ast
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


RUN = [e for e in EXAMPLES if not _has_tests_of_its_own(*e) or e[1] in pages.printed(e[0])]


@pytest.mark.parametrize(("page", "heading"), EXAMPLES, ids=_name)
def test_it_is_short(page, heading):
    lines = [line for line in pages.shown(page)[heading].splitlines() if line.strip()]
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120


# The examples of the README and of the guides run by default, in tests of their own.
@pytest.mark.full
# Equinox 0.13.0, the newest version for JAX 0.7, imports a name that JAX 0.7 has deprecated.
@pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("page", "heading"), RUN, ids=_name)
def test_it_runs_and_prints_what_the_page_says(page, heading, capsys):
    pages.run(page, heading)
    if expected := pages.printed(page).get(heading):
        lines = capsys.readouterr().out.splitlines()[-expected.count("\n") :]
        pages.assert_alike("\n".join(lines), expected)


@pytest.mark.parametrize("page", pages.PAGES)
def test_linters_accept_its_code(page):
    """One import in each line, no lambda with a name; `ruff format` checks pages by itself."""
    for heading, code in pages.shown(page).items():
        tree = ast.parse(code)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        assert all(len(node.names) == 1 for node in imports), heading
        assert not [
            node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
        ]


PAGE = """# A page

## Whole

```python
import math

x, y = 1, 2


def f(n):
    return n + x


for n in range(3):
    last = f(n)
```

## Another start

```python instead
z = 5
x, y = 10, z
```

## Another function

```python instead
def f(n):
    return math.sqrt(n)
```

```python continued
root = f(16)
```
"""


def test_a_variant_is_the_complete_program_with_its_lines(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    assert pages.shown("page")["Another start"] == "z = 5\nx, y = 10, z\n"
    assert pages.run("page", "Whole")["last"] == 3
    other = pages.run("page", "Another start")
    assert (other["last"], other["y"]) == (12, 5)
    function = pages.run("page", "Another function")
    assert (function["last"], function["root"]) == (2**0.5, 4)


@pytest.mark.parametrize(
    ("printed", "alike"),
    [
        ("loss 0.194, 1 of 200", True),
        ("loss 0.196, 1 of 200", True),
        ("loss 0.199, 1 of 200", False),
        ("loss 0.194, 2 of 200", False),
        ("loss 0.194, 1 of", False),
        ("loss 0.194, 1 of 200 steps", False),
    ],
)
def test_assert_alike_allows_a_difference_in_the_last_digit_only(printed, alike):
    if alike:
        pages.assert_alike(printed, "loss 0.194, 1 of 200")
    else:
        with pytest.raises(AssertionError):
            pages.assert_alike(printed, "loss 0.194, 1 of 200")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "```python instead\nz = 5\nx, y = 10, z",
            "```python instead\nz = 5",
            "no statement of the page's program binds",
        ),
        ("```python instead", "```python otherwise", "`continued` or `instead`, not 'otherwise'"),
        ("```python\nimport", "```python continued\nimport", "no complete program to go on from"),
    ],
)
def test_a_block_without_a_place_is_refused(tmp_path, monkeypatch, old, new, error):
    assert old in PAGE
    (tmp_path / "page.md").write_text(PAGE.replace(old, new, 1))
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    with pytest.raises(AssertionError, match=error):
        pages.examples("page")
