"""The notebooks are committed with the outputs that their code prints."""

import itertools
import pathlib
import re

import pytest

nbclient = pytest.importorskip("nbclient", reason="only installed with the group notebooks")
nbformat = pytest.importorskip("nbformat", reason="only installed with the group notebooks")
pytest.importorskip("ipykernel", reason="only installed with the group notebooks")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?")


def _code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def _varies(cell):
    """Tests whether a cell is tagged: on another processor its numbers may differ, but its assertions hold."""
    return "numbers-vary" in cell.metadata.get("tags", [])


def _outputs(cell):
    """Returns the outputs of a cell as (kind, text): parts of one stream joined, pictures without their pixels."""
    outputs = []
    for output in cell.outputs:
        kind = output.get("name") or ", ".join(sorted(output.get("data", {}))) or output.output_type
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if outputs and outputs[-1][0] == kind == output.get("name"):
            outputs[-1] = kind, outputs[-1][1] + text
        else:
            outputs.append((kind, text))
    return outputs


def _words(text):
    return NUMBER.sub("#", text).split()


def _matches(committed, printed):
    """Tests whether two texts have the same words, and numbers within 15 %, or within 1 where both are whole."""
    if _words(committed) != _words(printed):
        return False
    for one, other in zip(NUMBER.findall(committed), NUMBER.findall(printed), strict=True):
        whole = one.isdigit() and other.isdigit()
        a, b = (float(text.replace(",", "")) for text in (one, other))
        if abs(a - b) > 0.15 * max(abs(a), abs(b)) + whole:
            return False
    return True


def test_matches_tolerates_only_rounding():
    assert _matches("1,099,511 -> 2^20, 98.7%, 10 skipped, -inf\n", "1,099,511 -> 2^20,  98.3%, 11 skipped, -inf\n")
    for committed, printed in (("0.0179", "0.0279"), ("2^20", "2^14"), ("3 skipped", "5 skipped"), ("back", "forth")):
        assert not _matches(committed, printed)


@EACH
def test_notebook_is_committed_with_its_outputs(path):
    cells = _code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


def _asserts(cell):
    return bool(re.search(r"^ *assert", cell.source, flags=re.M))


@EACH
def test_cell_with_varying_numbers_asserts_its_claims(path):
    """Or the next cell asserts them, which the site does not show."""
    cells = _code_cells(path)
    for cell, following in itertools.zip_longest(cells, cells[1:]):
        assert not _varies(cell) or _asserts(cell) or (following and _asserts(following)), cell.source


@EACH
def test_site_hides_cells_that_only_plot_or_assert(path):
    """Readers see programs and their results; the code of a figure is one click away."""
    for cell in _code_cells(path):
        draws = "plt.subplots(" in cell.source
        only_asserts = _asserts(cell) and not cell.outputs
        tags = {"hide-input"} if draws else {"remove-cell"} if only_asserts else set()
        assert tags <= set(cell.metadata.get("tags", [])), cell.source


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # the kernel itself warns; the outputs are tested for warnings
@EACH
def test_notebook_prints_its_committed_outputs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    printed_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for committed, printed in zip(_code_cells(path), printed_cells, strict=True):
        expected, outputs = _outputs(committed), _outputs(printed)
        assert not any(kind == "stderr" and "Warning" in text for kind, text in outputs), outputs
        assert [kind for kind, _ in outputs] == [kind for kind, _ in expected], committed.source
        for (_, old), (_, new) in zip(expected, outputs, strict=True):
            same = _words(old) == _words(new) if _varies(committed) else _matches(old, new)
            assert same, f"{path.name} has\n{old}\nwhere its code now prints\n{new}"
