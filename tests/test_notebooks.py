"""Every notebook is committed with the outputs that its code prints: they are what the documentation shows."""

import pathlib
import re

import pytest

nbclient = pytest.importorskip("nbclient", reason="only installed with the notebooks extra")
nbformat = pytest.importorskip("nbformat", reason="only installed with the notebooks extra")
pytest.importorskip("ipykernel", reason="only installed with the notebooks extra")

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?")


def _code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _outputs(cell):
    """Returns the outputs of a cell as (kind, text): parts of one stream joined, pictures without their pixels."""
    found = []
    for output in cell.outputs:
        kind = output.get("name") or ", ".join(sorted(output.get("data", {}))) or output.output_type
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if found and found[-1][0] == kind == output.get("name"):
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


def _matches(committed, printed):
    """Tests whether two texts have the same words, and numbers that differ only by another processor's rounding.

    That is 15 percent, plus one for whole numbers, such as counts of skips and of recognised images.
    """
    words, printed_words = (NUMBER.sub("#", text).split() for text in (committed, printed))
    if words != printed_words:
        return False
    for one, other in zip(NUMBER.findall(committed), NUMBER.findall(printed), strict=True):
        whole = one.isdigit() and other.isdigit()
        a, b = (float(text.replace(",", "")) for text in (one, other))
        if abs(a - b) > 0.15 * max(abs(a), abs(b)) + whole:
            return False
    return True


@pytest.mark.parametrize(
    ("committed", "printed", "same"),
    [
        ("loss 0.0179, 10 skipped\n", "loss 0.0181,  11 skipped\n", True),
        ("1,099,511 -> 2^20, 98.7%", "1,099,511 -> 2^20, 98.3%", True),
        ("7.8e-04  -inf nan", "7.9e-04 -inf nan", True),
        ("loss 0.0179", "loss 0.0279", False),
        ("2^20", "2^14", False),
        ("3 skipped", "5 skipped", False),
        ("an overflow in the backward pass", "an overflow in the forward pass", False),
        ("f32[32,64]", "f32[32,32]", False),
        ("1 2", "1 2 3", False),
    ],
)
def test_what_counts_as_the_same_output(committed, printed, same):
    assert _matches(committed, printed) == same


@EACH
def test_it_is_committed_with_its_outputs(path):
    cells = _code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # the kernel's own machinery warns; what a notebook prints is checked below
@EACH
def test_it_runs_and_prints_what_it_is_committed_with(path, tmp_path):
    committed, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    for was, now in zip(_code_cells(committed), _code_cells(notebook), strict=True):
        shown, expected = _outputs(now), _outputs(was)
        assert not any(kind == "stderr" and "Warning" in text for kind, text in shown), shown
        assert [kind for kind, _ in shown] == [kind for kind, _ in expected], was.source
        for (_, text), (_, old) in zip(shown, expected, strict=True):
            assert _matches(old, text), f"{path.name} shows\n{old}\nwhere its code now prints\n{text}"
