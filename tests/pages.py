"""Runs the Python blocks of the documentation as a reader pastes them into a notebook: in order, in one namespace."""

import functools
import itertools
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")])
PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
_HEADING_OR_BLOCK = re.compile(r"^##+ +(.+?) *$|^```(python|text|diff)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def _parts(page):
    return _HEADING_OR_BLOCK.findall((DOCS / f"{page}.md").read_text())


def blocks(page):
    """Returns the Python blocks of a page as (heading, code, expected output or None)."""
    found, heading = [], ""
    for title, language, code in _parts(page):
        if title:
            heading = title
        elif language == "python":
            found.append((heading, code, None))
        elif language == "text" and found and found[-1][2] is None:
            found[-1] = (*found[-1][:2], code)
    return found


def diffs(page):
    return [code for _, language, code in _parts(page) if language == "diff"]


def apply_diff(diff, code):
    """Returns the code with the change, or None if the code lacks a line of the diff. Lines between hunks are kept."""
    lines, changed, position = code.splitlines(), [], 0
    for line in diff.splitlines():
        sign, text = line[:1], line[1:]
        if sign == "+":
            changed.append(text)
            continue
        if text not in lines[position:]:
            return None
        found = lines.index(text, position)
        changed += lines[position : found + (sign == " ")]
        position = found + 1
    return "\n".join(changed + lines[position:])


@functools.cache
def _markdown(path):
    """Returns the text of a page or notebook without its code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def cells(path):
    """Returns the code cells of a notebook as (code, printed text)."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join(line for output in cell["outputs"] for line in output.get("text", ())))
        for cell in found
    ]


def printed(path):
    """Returns what programs print on a page or in a notebook."""
    if path.suffix == ".ipynb":
        return [text for _, text in cells(path)]
    return re.findall(r"^ *```text\n(.*?)^ *```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(path):
    """Returns the targets of the links and pictures of a page or notebook."""
    return re.findall(r"\]\(([^)\s]+)\)", _markdown(path))


def resolves(path, target):
    """Tests whether a relative link leads to a file, and its anchor to a heading."""
    name, _, anchor = target.partition("#")
    target = (path.parent / name).resolve() if name else path
    return target.is_file() and (not anchor or anchor in _anchors(target))


def _anchors(path):
    """Returns the anchors of the headings as code hosts make them: in lower case, without punctuation."""
    headings = re.findall(r"^#+ +(.+?) *$", _markdown(path), flags=re.MULTILINE)
    texts = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def run(code, namespace):
    """Runs a block in a namespace, and returns its losses: the values of `loss`, or the list `losses`."""
    recorder = _Losses(namespace)
    # Reports show this file, with the number of a line in the block.
    exec(compile(code, "train.py", "exec"), namespace, recorder)
    return recorder.losses


class _Losses(dict):
    """Records the losses among the names that a block assigns, and keeps all names in the namespace instead."""

    def __init__(self, namespace):
        super().__init__()
        self._namespace, self.losses = namespace, []

    def __setitem__(self, name, value):
        self._namespace[name] = value
        if name == "loss":
            self.losses.append(float(value))
        elif name == "losses" and isinstance(value, list):
            self.losses = [float(loss) for loss in value]

    def __delitem__(self, name):
        del self._namespace[name]


def assert_same_output(printed, expected):
    """Compares texts word by word.

    The last digits of decimal numbers may differ between versions of JAX, an error in percent by a quarter, because
    compilers round in other places, and a power of two that fits by one exponent, or by eight if it is near the limits
    of float32.
    """
    for ours, theirs in itertools.zip_longest(printed.split(), expected.split()):
        power, other = (re.fullmatch(r"2\^(-?\d+)[,.;]?", word or "") for word in (ours, theirs))
        if power and other and abs(int(power[1]) - int(other[1])) <= (8 if abs(int(other[1])) > 100 else 1):
            continue
        decimals = re.fullmatch(r"-?\d+\.(\d+)(e[-+]\d+)?[%,.:]*", theirs or "")
        if ours is None or not decimals:
            assert ours == theirs, (printed, expected)
        else:
            number = float(theirs.rstrip("%,.:"))
            difference = abs(float(ours.rstrip("%,.:")) - number)
            digits = 2.5 * float(f"1{decimals[2] or ''}") / 10 ** len(decimals[1])
            assert difference <= max(digits, number / 4 if "%" in theirs else 0), (printed, expected)
