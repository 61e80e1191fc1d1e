"""The notebooks run from their folder, on what comes with the repository, and were kept with their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

nbformat = pytest.importorskip("nbformat", reason="the notebook extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook extra is not installed")
pytest.importorskip("torch", reason="the last notebook records")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_seven() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]


# The Jupyter client warns of its own plans and of unencrypted local sockets.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This checkout, whatever is installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    kept = nbformat.read(path, as_version=4)
    for mine, theirs in zip(notebook.cells, kept.cells, strict=True):
        if mine.cell_type == "code":
            # The kept outputs are of the same kinds: a cell that once drew still does.
            assert _kinds(mine) == _kinds(theirs)
            if "view(" in mine.source:
                # What is kept says so; what is made holds the page, which fetches nothing.
                assert mine.outputs[0].data["text/html"].startswith('<iframe sandbox="allow-scripts')
                assert len(theirs.outputs[0].data["text/html"]) < 1000


def _kinds(cell: Any) -> list[list[str]]:
    return [sorted(output["data"]) for output in cell.outputs if "data" in output]
