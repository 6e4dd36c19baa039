"""scripts/train.ipynb: runs from top to bottom."""

import os

import pytest

from tests import launch

NOTEBOOK = launch.ROOT / "scripts" / "train.ipynb"


@pytest.mark.expensive
@pytest.mark.jobs
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cloudpickle", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # without results in the repository
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(launch.ROOT), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(launch.ROOT)}}).execute()
    by_id = {cell.id: cell for cell in notebook.cells}
    (accuracy,) = [output for output in by_id["train"].outputs if output.output_type == "execute_result"]
    assert float(accuracy.data["text/plain"]) > 0.8
    assert "epoch   5" in "".join(output.get("text", "") for output in by_id["train"].outputs)
    assert any("image/png" in output.get("data", {}) for output in by_id["plot"].outputs)
