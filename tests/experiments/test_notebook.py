from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # notebooks draw inline
    notebook = nbformat.read(path, as_version=4)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert settings.source.startswith("TINY = False")
    settings.source = settings.source.replace("TINY = False", "TINY = True", 1)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    drawn = notebook.cells[-1].outputs[-1]
    assert "image/png" in drawn["data"]


def test_there_is_a_notebook_for_each_paper():
    papers = {"dp_transformer", "noisy_head", "attention_matrix", "cross_attention"}
    assert papers <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    kept = [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept
