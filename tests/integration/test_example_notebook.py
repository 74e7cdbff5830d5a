"""The example notebook runs from its first cell to its last, and is kept without what it says."""

from pathlib import Path
from typing import Any, Final

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT: Final = Path(__file__).parents[2]
NOTEBOOK: Final = ROOT / "examples" / "notebook.ipynb"

# The kernel is a process of other people's; what they warn of in this one is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def read_notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def execute(notebook: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(directory))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
    )
    client.execute()


def test_it_is_kept_without_outputs() -> None:
    notebook = read_notebook()
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), "clear all outputs before it is committed"


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = read_notebook()
    execute(notebook, tmp_path, monkeypatch)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type in {"error", "stream"}]
    assert sum("text/html" in output.data for output in shown) >= 3


def test_a_cell_that_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = read_notebook()
    notebook.cells = notebook.cells[:2]
    notebook.cells[1].source = "assert 1 == 2"
    with pytest.raises(CellExecutionError):
        execute(notebook, tmp_path, monkeypatch)
