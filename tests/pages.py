"""Reads the documentation's pages, so that tests can run what they show.

The word after `python` on a fence says how a block is run:

- ```` ```python ````: a program of its own, together with the other such blocks under its heading;
- ```` ```python continued ````: goes on where the nearest complete program above it ended;
- ```` ```python instead ````: the lines in which a variant differs from that program: each statement takes the place of
  the one that binds the same names (a loop, of the loop), and one that is new stands before the next that is not.
"""

import ast
import itertools
import pathlib
import re

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
_HEADING_OR_BLOCK = re.compile(r"^## +(.+?) *$|^```python *(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_LOOP = "a loop"


def _parts(page):
    """Returns the Python blocks under each second-level heading of a page, as (kind, code)."""
    found, heading = {}, ""
    for title, kind, code in _HEADING_OR_BLOCK.findall((DOCS / f"{page}.md").read_text()):
        if title:
            heading = title
        else:
            found.setdefault(heading, []).append((kind, code))
    return found


def shown(page):
    """Returns the Python code that stands on the page under each of its headings."""
    return {heading: "\n".join(code for _, code in blocks) for heading, blocks in _parts(page).items()}


def printed(page):
    """Returns what each example of a page prints, by its own word; of those that show it, below the code."""
    text = re.split(r"^## +(.+?) *$", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE)
    found = {}
    for heading, body in zip(text[1::2], text[2::2], strict=True):
        if blocks := re.findall(r"^```text\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL):
            found[heading] = "".join(blocks)
    return found


def examples(page):
    """Returns the whole program that belongs to each heading: what a user who follows the page has in the end."""
    found, complete = {}, ""
    for heading, blocks in _parts(page).items():
        own = "\n".join(code for kind, code in blocks if not kind)
        program = complete = own or complete
        assert program, f"docs/{page}.md, {heading!r}: no complete program to go on from"
        for kind, code in blocks:
            if kind == "continued":
                program += "\n" + code
            elif kind == "instead":
                program = _with(program, code)
            else:
                assert not kind, f"docs/{page}.md, {heading!r}: a block is `continued` or `instead`, not {kind!r}"
        found[heading] = program
    return found


def run(page, heading, **given):
    """Runs one example in a namespace of its own, and returns that; `given` names are there before it starts."""
    namespace = {"__name__": f"docs/{page}.md", **given}
    exec(compile(examples(page)[heading], f"docs/{page}.md, {heading!r}", "exec"), namespace)
    return namespace


def _with(program, lines):
    """Puts the statements of `lines` in the place of those that bind the same names in `program`."""
    body, new, replaced = ast.parse(program).body, [], False
    for statement in ast.parse(lines).body:
        names = _bound(statement)
        old = [number for number, other in enumerate(body) if names & _bound(other)]
        if not old:
            new.append(statement)
            continue
        body[old[0] : old[0] + 1] = [*new, statement]
        for number in reversed(old[1:]):
            del body[number + len(new)]
        new, replaced = [], True
    assert replaced, f"no statement of the page's program binds a name that these lines bind:\n{lines}"
    return ast.unparse(ast.Module([*body, *new], []))


def _bound(statement):
    """Returns the names that a statement of a module binds, in its own line."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {name.asname or name.name for name in names}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.For():
            return {_LOOP}
        case ast.With(body=body):
            return set().union(*map(_bound, body))
        case _:
            return set()


def assert_alike(printed, expected):
    """Compares texts word by word; a number with decimals may differ in the last ones, with another version of JAX."""
    for ours, theirs in itertools.zip_longest(printed.split(), expected.split()):
        decimals = re.fullmatch(r"-?\d+\.(\d+)(e[-+]\d+)?,?", theirs or "")
        if ours is None or not decimals:
            assert ours == theirs, (printed, expected)
        else:
            difference = abs(float(ours.rstrip(",")) - float(theirs.rstrip(",")))
            assert difference <= 2.5 * float(f"1{decimals[2] or ''}") / 10 ** len(decimals[1]), (printed, expected)
