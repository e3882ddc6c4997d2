import re
from importlib.util import find_spec
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
    for block in re.findall("```python\n(.*?)```", notebook.cells[-1].source, re.DOTALL):
        compile(block, path.name, "exec")
        if all(find_spec(package) for package in ("torch", "transformers", "peft")):
            notebook.cells.append(nbformat.v4.new_code_cell(block))
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)


def test_there_is_a_notebook_for_each_paper():
    papers = {"dp_transformer", "noisy_head", "attention_matrix", "cross_attention"}
    assert papers <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    kept = [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept
