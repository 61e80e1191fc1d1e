"""HolisticTraceAnalysis as a second opinion on the overlap ratio and the temporal breakdown, through ``run.hta()``.

It rounds each event inward to whole microseconds, hence the tolerances. It needs pandas below 3, so it is asked in the
environment that ``make test-processes`` makes for it; where there is none, and it cannot be imported here, it is not
asked.
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
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What it says of every run, by folder."""
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
def test_the_overlap_ratio_is_within_three_tenths_of_a_point(path: Path, said: dict[str, Any]) -> None:
    ours, ratios = analysis(path, window="trace"), said[str(path)]["overlap"]
    assert len(ratios) == len(ours.ranks)
    for rank in ours.attribution.ranks:
        assert rank.breakdown.overlap_ratio is not None
        ratio, off = 100 * rank.breakdown.overlap_ratio, 0.3
        if "copy_engine" in rank.breakdown.kinds:
            # To it a peer-to-peer copy is memory: where copies carry the hops it sees NCCL's kernels alone, if any.
            rest = [kind for name, kind in rank.breakdown.kinds.items() if kind.hidden_ns and name != "copy_engine"]
            time_ns = sum(kind.time_ns for kind in rest)
            ratio = 100 * sum(kind.hidden_ns or 0 for kind in rest) / max(time_ns, 1)
            off += 100 * 2000 * sum(kind.calls for kind in rest) / max(time_ns, 1)
        assert ratio == pytest.approx(ratios[str(rank.rank)], abs=off)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_temporal_breakdown_is_within_two_microseconds_an_activity(path: Path, said: dict[str, Any]) -> None:
    ours = analysis(path, window="trace")
    copies = run_traces_of(ours, path, window="trace")
    for rank in ours.attribution.ranks:
        figures, row = rank.breakdown, said[str(path)]["temporal"][str(rank.rank)]
        # Of each activity up to 2 us is lost to the rounding; what is lost shows as idle there.
        lost = 2 * sum(kind.calls for kind in figures.kinds.values())
        assert figures.wall_ns / 1e3 == pytest.approx(row["kernel_time(us)"], abs=2)
        assert figures.compute_ns / 1e3 == pytest.approx(row["compute_time(us)"], abs=lost)
        # It knows no time blocked on a peer's copies: nothing runs on the device, so it is idle.
        blocked = sum(block.end - block.start for block in copies.blocks(rank.rank))
        beside = figures.exposed_comm_ns - blocked + figures.exposed_memory_ns
        assert beside / 1e3 == pytest.approx(row["non_compute_time(us)"], abs=lost)
        assert (figures.idle_ns + blocked) / 1e3 == pytest.approx(row["idle_time(us)"], abs=lost)


def test_without_it_the_error_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ringprof\[hta\]' 'pandas<3'"):
        analysis(RUNS[0]).hta()


def test_it_is_not_given_what_it_cannot_read(tmp_path):
    with pytest.raises(InputError, match="reads Kineto files only"):
        analysis(export(tmp_path / "one.sqlite", 41)).hta()
