"""Reads the lines that docs/guides/training_loops.md tells the users of a framework to paste."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "training_loops.md"


def changed_programs(heading: str) -> list[str]:
    """Returns the program after each of the changes that are shown under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert section, f"the page has no section {heading!r}"
    changes = re.findall(r"^```diff\n(.*?)^```", section[1], flags=re.MULTILINE | re.DOTALL)
    return ["".join(line[1:] for line in change.splitlines(True) if line[0] != "-") for change in changes]
