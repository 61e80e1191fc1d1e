"""HolisticTraceAnalysis as a second opinion on the overlap ratio and the temporal breakdown, through ``run.hta()``.

It rounds each event inward to whole microseconds, hence the tolerances. It needs pandas below 3, so `make test` gives
it an environment of its own, `.venv/hta` (or another Python that has it, by HTA_PYTHON); where it cannot be had, the
tests that need it are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringprof
from ringprof.errors import InputError, MissingExtraError
from tests.loaded import analysis
from tests.paths import ROOT
from tests.trace.test_nsys import export

PYTHONS = [os.environ.get("HTA_PYTHON", ""), sys.executable, str(Path(sys.prefix, "hta", "bin", "python"))]
RUNS = [
    *sorted(path for path in (ROOT / "tests" / "data").glob("h200*") if path.is_dir()),
    *sorted(path.parent for path in (ROOT / "traces").glob("h200*/run.json"))[::3],
]


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, dict[str, float]]]:
    """HolisticTraceAnalysis's figures by run and rank, from the Python that has it."""
    python = next((one for one in PYTHONS if has_hta(one)), None)
    if python is None:
        pytest.skip("HolisticTraceAnalysis (with pandas below 3) is not here: make .venv/.hta")
    runs = {path.name: {rank.rank: rank.path for rank in whole(path).attribution.ranks} for path in RUNS}
    command = [python, str(Path(__file__).with_name("hta_figures.py"))]
    done = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout)
    return found


def has_hta(python: str) -> bool:
    command = [python, "-c", "import hta.trace_analysis"]
    return Path(python).is_file() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def whole(path: Path) -> ringprof.Analysis:
    """It knows no marked iterations: both look at the whole trace."""
    return analysis(path, window="trace")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_overlap_ratio_is_within_three_tenths_of_a_point(path, theirs):
    for rank in whole(path).attribution.ranks:
        ratio = theirs[path.name][str(rank.rank)]["overlap"]
        assert rank.breakdown.overlap_ratio is not None
        if "copy_engine" in rank.breakdown.kinds:
            # To it a peer-to-peer copy is memory: where copies carry the hops it finds nothing to overlap.
            assert ratio == 0
            continue
        assert 100 * rank.breakdown.overlap_ratio == pytest.approx(ratio, abs=0.3)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_temporal_breakdown_is_within_two_microseconds_an_activity(path, theirs):
    for rank in whole(path).attribution.ranks:
        figures, row = rank.breakdown, theirs[path.name][str(rank.rank)]
        # Of each activity up to 2 us is lost to the rounding; what is lost shows as idle there.
        lost = 2 * sum(kind.calls for kind in figures.kinds.values())
        assert figures.wall_ns / 1e3 == pytest.approx(row["kernel_time(us)"], abs=2)
        assert figures.compute_ns / 1e3 == pytest.approx(row["compute_time(us)"], abs=lost)
        beside = figures.exposed_comm_ns + figures.exposed_memory_ns
        assert beside / 1e3 == pytest.approx(row["non_compute_time(us)"], abs=lost)
        assert figures.idle_ns / 1e3 == pytest.approx(row["idle_time(us)"], abs=lost)


def test_without_it_the_error_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ringprof\[hta\]' 'pandas<3'"):
        analysis(RUNS[0]).hta()


def test_it_is_not_given_what_it_cannot_read(tmp_path):
    with pytest.raises(InputError, match="reads Kineto files only"):
        analysis(export(tmp_path / "one.sqlite", 41)).hta()
