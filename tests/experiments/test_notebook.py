from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(ROOT / "experiments" / "notebooks" / "quickstart.ipynb", as_version=4)
    changed = 0
    for cell in notebook.cells:
        for old, new in (
            ('"configs/quickstart.py"  #', '"configs/quickstart.py:tiny"  #'),
            ('"runs/notebook"', repr(str(tmp_path / "run"))),
        ):
            changed += old in cell.source
            cell.source = cell.source.replace(old, new)
    assert changed == 2
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert (tmp_path / "run" / "result.json").exists()
    last = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    weights = [float(word) for word in last.split("[")[1].split("]")[0].split(",")]
    assert all(abs(w - t) < 0.7 for w, t in zip(weights, (1, -2, 3), strict=True))
