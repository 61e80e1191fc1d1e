"""Overlap ratio and temporal breakdown compared with those of HolisticTraceAnalysis, through ``run.hta()``.

HolisticTraceAnalysis rounds each event inward to whole microseconds, hence the tolerances. It needs pandas below 3, so
it runs in an environment that ``make test-processes`` makes. Where that environment is missing and the package cannot
be imported here, the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringprof.errors import InputError, MissingExtraError
from tests.analysis.idle_oracle import run_traces_of
from tests.loaded import analysis
from tests.paths import ROOT
from tests.trace.test_nsys import export

RUNS = [
    *sorted(path for path in (ROOT / "tests" / "data").glob("h200*") if path.is_dir()),
    *sorted(path.parent for path in (ROOT / "traces").glob("h200*/run.json")),
]
PYTHONS = (sys.executable, str(ROOT / ".venv-hta" / "bin" / "python"))


def knows_hta(python: str) -> bool:
    command = [python, "-c", "import hta.trace_analysis"]
    return Path(python).exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def hta_figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the figures of HolisticTraceAnalysis for every run, by folder."""
    python = next(filter(knows_hta, PYTHONS), None)
    if python is None:
        pytest.skip("HolisticTraceAnalysis is not here: python scripts/install_hta.py")
    out = tmp_path_factory.mktemp("hta") / "figures.json"
    command = [python, "-m", "tests.analysis.hta_figures", str(out), *map(str, RUNS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_overlap_ratio_is_within_0_3_points_of_hta(path: Path, hta_figures: dict[str, Any]) -> None:
    run, ratios = analysis(path, window="trace"), hta_figures[str(path)]["overlap"]
    assert len(ratios) == len(run.ranks)
    for rank in run.attribution.ranks:
        assert rank.breakdown.overlap_ratio is not None
        ratio, tolerance = 100 * rank.breakdown.overlap_ratio, 0.3
        if "copy_engine" in rank.breakdown.kinds:
            # HTA counts peer-to-peer copies as memory: where copies carry the hops, it sees only NCCL's kernels.
            rest = [kind for name, kind in rank.breakdown.kinds.items() if kind.hidden_ns and name != "copy_engine"]
            time_ns = sum(kind.time_ns for kind in rest)
            ratio = 100 * sum(kind.hidden_ns or 0 for kind in rest) / max(time_ns, 1)
            tolerance += 100 * 2000 * sum(kind.calls for kind in rest) / max(time_ns, 1)
        assert ratio == pytest.approx(ratios[str(rank.rank)], abs=tolerance)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_temporal_breakdown_is_within_2_us_per_activity_of_hta(path: Path, hta_figures: dict[str, Any]) -> None:
    run = analysis(path, window="trace")
    copies = run_traces_of(run, path, window="trace")
    for rank in run.attribution.ranks:
        breakdown, row = rank.breakdown, hta_figures[str(path)]["temporal"][str(rank.rank)]
        # Rounding loses up to 2 us of each activity, which HTA counts as idle.
        lost = 2 * sum(kind.calls for kind in breakdown.kinds.values())
        assert breakdown.wall_ns / 1e3 == pytest.approx(row["kernel_time(us)"], abs=2)
        assert breakdown.compute_ns / 1e3 == pytest.approx(row["compute_time(us)"], abs=lost)
        # HTA counts time blocked on a peer's copies as idle, since nothing runs on the device.
        blocked = sum(block.end - block.start for block in copies.blocks(rank.rank))
        beside = breakdown.exposed_comm_ns - blocked + breakdown.exposed_memory_ns
        assert beside / 1e3 == pytest.approx(row["non_compute_time(us)"], abs=lost)
        assert (breakdown.idle_ns + blocked) / 1e3 == pytest.approx(row["idle_time(us)"], abs=lost)


def test_missing_hta_error_shows_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[hta\]' 'pandas<3'"):
        analysis(RUNS[0]).hta()


def test_hta_refuses_traces_other_than_kineto(tmp_path):
    with pytest.raises(InputError, match="reads Kineto files only"):
        analysis(export(tmp_path / "one.sqlite", 41)).hta()
