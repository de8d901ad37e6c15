"""Suggests plainer words for phrases in code, pages and notebooks: `python .ci/language.py`, part of `nox -s lint`.

The script prints the location of each match and a suggestion. It is a help for authors, and does not fail: a change may
keep any phrase.
"""

import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHRASES = {  # regular expressions and suggested replacements
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
    r"\b(?:that|those) of\b": "repeat the noun",
    r"(?<!\.)\btells? ": "shows, returns",
    r"all or nothing": "one decision for all devices",
}


def _texts():
    """Returns the paths of all Python files, Markdown files and notebooks except this file."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py", "*.md", "*.ipynb")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = (ROOT / name for name in listed)
    return [path for path in paths if path.exists() and path != pathlib.Path(__file__).resolve()]


def _lines(path):
    """Yields the location and the text of each line of a file, or of each line in the cells of a notebook."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line
        return
    for index, cell in enumerate(json.loads(text)["cells"], 1):
        for number, line in enumerate(cell["source"], 1):
            yield f"{path.relative_to(ROOT)}:cell {index}:{number}", line


def main():
    """Prints all matches."""
    found = [
        f"{place}: consider {term!r} instead of {match[0]!r}"
        for path in _texts()
        for place, line in _lines(path)
        for phrase, term in PHRASES.items()
        if (match := re.search(phrase, line, flags=re.IGNORECASE))
    ]
    print(*found, sep="\n", end="\n" if found else "")


if __name__ == "__main__":
    main()
