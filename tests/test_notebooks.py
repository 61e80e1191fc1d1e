"""The notebooks run from their folder on committed files, and their committed outputs are up to date."""

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
"""Notebooks whose figures change: they time on this machine, or predict with the current calibration."""
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_notebooks_are_numbered_01_to_08() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07", "08"]


# The Jupyter client warns of future changes and of unencrypted local sockets.
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use this checkout even if another ringprof is installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    committed = nbformat.read(path, as_version=4)
    if path.stem not in MEASURE:
        # The committed figures are those that the code prints today.
        assert _figures(committed) <= _figures(notebook)
    for new, old in zip(notebook.cells, committed.cells, strict=True):
        if new.cell_type == "code":
            # The outputs have the same kinds: a cell that drew a plot still does.
            assert _kinds(new) == _kinds(old)
            if "view(" in new.source:
                # The committed output is a short note; the new one is the page, which loads nothing from the network.
                assert new.outputs[0].data["text/html"].startswith('<iframe sandbox="allow-scripts')
                assert len(old.outputs[0].data["text/html"]) < 1000


def _figures(notebook: Any) -> set[str]:
    """Find the numbers with a fraction in all text outputs."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    return set(re.findall(r"\d[\d,]*\.\d+", "\n".join(texts)))


def _kinds(cell: Any) -> list[list[str]]:
    return [sorted(output["data"]) for output in cell.outputs if "data" in output]
