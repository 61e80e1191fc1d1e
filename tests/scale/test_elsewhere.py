"""Traces that lie elsewhere, and workers elsewhere that read them: the report stays the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof.errors import InputError, RunFormatError, UsageError
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import reduce_trace
from tests.scale.runs import RING, RUNS

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("distributed")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def report_of(*paths: str | Path, **how: Any) -> Any:
    """What the report says but for where the files are."""
    analysis: Any = ringprof.load(paths, **how)
    report = analysis.report()
    report["summary"].pop("steps_listed")
    return report | {"source": None, "steps": None}


def put(system: Any, folder: Path, to: str) -> None:
    for file in folder.iterdir():
        system.pipe(f"{to}/{file.name}", file.read_bytes())


def test_a_run_in_another_file_system(memory):
    put(memory, RING, "/bucket/mine")
    here = report_of(RING)
    assert report_of("memory://bucket/mine/run.json") == here
    assert report_of("memory://bucket/mine") == here
    assert report_of(f"file://{RING}/run.json") == here


def test_traces_in_another_file_system(memory):
    traces = sorted(RING.glob("rank*.json.gz"))
    for path in traces:
        memory.pipe(f"/loose/{path.name}", path.read_bytes())
    assert report_of("memory://loose") == report_of(*traces)
    assert report_of(*(f"memory://loose/{path.name}" for path in traces)) == report_of(*traces)


def test_reduced_traces_in_another_file_system(memory):
    traces = sorted(RING.glob("rank*.json.gz"))
    for path in traces:
        memory.pipe(f"/small/{path.name[:5]}.ringprof", reduce_trace(read_trace(path)))
    assert report_of("memory://small") == report_of(*traces)


def test_what_is_not_there(memory):
    for name in ("memory://nothing/run.json", "memory://nothing"):
        with pytest.raises(InputError, match="no such file"):
            ringprof.load(name)
    with pytest.raises(InputError, match="Protocol not known"):
        ringprof.load("nowhere://bucket/run.json")


@pytest.mark.parametrize("field", ["path", "reduced"])
@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a::memory://other/x", "a\\..\\x", ""])
def test_a_run_elsewhere_leads_nowhere_else(memory, path, field):
    run = json.loads((RING / "run.json").read_text())
    run["traces"][0][field] = path
    memory.pipe("/evil/run.json", json.dumps(run).encode())
    with pytest.raises(RunFormatError, match="leaves the run's folder"):
        ringprof.load("memory://evil/run.json")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A scheduler and two workers, in processes of their own."""
    program = (
        "from distributed import LocalCluster; import sys\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host='127.0.0.1') as made:\n"
        "        print(made.scheduler_address, flush=True)\n"
        "        sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    yield process.stdout.readline().strip()
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.mark.parametrize("name", ["h200x4-usp-262144", "cpu4-burst-4096"])
def test_workers_of_a_cluster_read_the_traces(cluster, name):
    assert report_of(RUNS / name, scheduler=cluster) == report_of(RUNS / name)


def test_an_error_on_a_cluster_is_the_same_error(cluster, tmp_path):
    bad = tmp_path / "rank4.json"
    bad.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match=r"rank4\.json: nothing to analyse"):
        ringprof.load([*sorted(RING.glob("rank*.json.gz")), bad], scheduler=cluster)


def test_no_scheduler_there():
    with pytest.raises(UsageError, match="no Dask scheduler answers there"):
        ringprof.load(RING, scheduler="tcp://127.0.0.1:1")


def test_a_link_out_of_the_folder_is_refused_by_url_too(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RING, folder)
    shutil.move(folder / "rank0.json.gz", tmp_path / "rank0.json.gz")
    (folder / "rank0.json.gz").symlink_to(tmp_path / "rank0.json.gz")
    for name in (folder / "run.json", f"file://{folder}/run.json"):
        with pytest.raises(RunFormatError, match="through a link"):
            ringprof.load(name)
    (folder / "rank0.json.gz").unlink()
    (folder / "rank0.json.gz").symlink_to("rank0.json.gz")
    with pytest.raises(RunFormatError, match="in a circle"):
        ringprof.load(folder / "run.json")


def test_whatever_a_file_system_raises_is_one_line(tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"nonsense")
    for name in (f"zip://run.json::file://{tmp_path}/bad.zip", "reference://x/run.json", "data://x"):
        with pytest.raises(InputError) as raised:
            ringprof.load(name)
        assert str(raised.value).startswith(f"{name}: ") and "\n" not in str(raised.value)
