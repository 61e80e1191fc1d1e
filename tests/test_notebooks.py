"""The notebooks run from their folder, on what comes with the repository, and were kept with their outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

nbformat = pytest.importorskip("nbformat", reason="the notebook extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook extra is not installed")
pytest.importorskip("torch", reason="the last notebook records")

MEASURE = ("05_your_own_training_step", "07_before_you_buy")
"""Record and time on this machine, or predict: figures that move with every calibration."""
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_seven() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]


# The Jupyter client warns of its own plans and of unencrypted local sockets.
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This checkout, whatever is installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    kept = nbformat.read(path, as_version=4)
    if path.stem not in MEASURE:
        # What a reader sees beside the code is what the code gives today.
        assert _figures(kept) <= _figures(notebook)
    for mine, theirs in zip(notebook.cells, kept.cells, strict=True):
        if mine.cell_type == "code":
            # The kept outputs are of the same kinds: a cell that once drew still does.
            assert _kinds(mine) == _kinds(theirs)
            if "view(" in mine.source:
                # What is kept says so; what is made holds the page, which fetches nothing.
                assert mine.outputs[0].data["text/html"].startswith('<iframe sandbox="allow-scripts')
                assert len(theirs.outputs[0].data["text/html"]) < 1000


def _figures(notebook: Any) -> set[str]:
    """Numbers with a fraction in all that is printed or shown as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    return set(re.findall(r"\d[\d,]*\.\d+", "\n".join(texts)))


def _kinds(cell: Any) -> list[list[str]]:
    return [sorted(output["data"]) for output in cell.outputs if "data" in output]
