"""Every notebook runs from top to bottom, and is committed with the outputs of such a run."""

import pathlib

import pytest

nbclient = pytest.importorskip("nbclient", reason="only installed with the notebooks extra")
nbformat = pytest.importorskip("nbformat", reason="only installed with the notebooks extra")
pytest.importorskip("ipykernel", reason="only installed with the notebooks extra")

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_committed_with_its_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.mark.filterwarnings("default")  # the kernel's own machinery warns; what a notebook prints is checked below
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    printed = [
        o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs if o.get("name") == "stderr"
    ]
    assert not any("Warning" in o.text for o in printed), printed
