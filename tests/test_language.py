"""The texts of the project use the field's terms, and no phrase that has confused a reader before."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("jmpscale", "tests", "benchmarks", "docs", "notebooks")
TEXTS = sorted(ROOT.glob("*.md")) + sorted(
    path for folder in FOLDERS for kind in ("py", "md", "ipynb") for path in (ROOT / folder).rglob(f"*.{kind}")
)
PHRASES = {
    r"(?<!there )\bis no [a-z]": "is not a",
    r"leav(?:es?|ing) out|left out": "skip, omit",
    r"\balike\b": "equally, the same",
    r"\banew\b": "again",
    r"on (?:the|its) way back": "in the backward pass",
    r"mov(?:es?|ing) on\b": "changes, advances",
    r"stands? in\b|in the place of": "replaces",
    r"\bforeign\b": "unexpected",
    r"without a word": "silently",
    r"in vain": "without effect",
    r"\bas (?:it was|they were)\b": "unchanged",
    r"\bfor good\b": "permanently",
    r"\bwhoever\b": "the caller",
    r"\b(?:that|those) of\b": "the noun again",
    r"\btells?\b": "shows, returns",
    r"all or nothing": "one decision for all",
}


def _lines(path):
    """Returns the lines of a text, or the lines of the cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text().splitlines()
    return [line for cell in json.loads(path.read_text())["cells"] for line in cell["source"]]


@pytest.mark.parametrize("path", [path for path in TEXTS if path != pathlib.Path(__file__)], ids=lambda path: path.name)
def test_text_uses_the_terms_of_the_field(path):
    found = [
        f"{path.relative_to(ROOT)}:{number}: write {term!r} in place of {match[0]!r}"
        for number, line in enumerate(_lines(path), 1)
        for phrase, term in PHRASES.items()
        if (match := re.search(phrase, line, flags=re.IGNORECASE))
    ]
    assert not found, "\n".join(found)


def test_phrases_are_found():
    phrase = next(iter(PHRASES))
    assert re.search(phrase, "That is no loss scale.")
    assert not re.search(phrase, "there is no scale")
