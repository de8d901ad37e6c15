"""Reads the documentation's pages, so that tests can run what they show."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts)


def examples(page):
    """Returns the Python code under each second-level heading of a page: what a user copies in one piece.

    The blocks under one heading belong together. A heading without Python code is left out.
    """
    text = (DOCS / f"{page}.md").read_text()
    parts = re.split(r"^## +(.+?) *$", "## \n" + text if not text.startswith("## ") else text, flags=re.MULTILINE)
    found = {}
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        blocks = re.findall(r"^```python\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[heading] = "\n".join(blocks)
    return found


def run(page, heading, **given):
    """Runs one example in a namespace of its own, and returns that; `given` names are there before it starts."""
    namespace = {"__name__": f"docs/{page}.md", **given}
    exec(compile(examples(page)[heading], f"docs/{page}.md, {heading!r}", "exec"), namespace)
    return namespace
