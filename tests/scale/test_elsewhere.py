"""Traces on other file systems, and cluster workers that read them: the report stays the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof.errors import InputError, RunFormatError, UsageError
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import reduce_trace
from tests.paths import TRACES
from tests.scale.runs import RING, write_ring

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("distributed")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def report_of(*paths: str | Path, **options: Any) -> Any:
    """Return the report without the parts that depend on where the files are."""
    analysis: Any = ringprof.load(paths, **options)
    report = analysis.report()
    for key in ("steps_listed", "annotations"):
        report["summary"].pop(key)
    return report | {"source": None, "steps": None}


def put(system: Any, folder: Path, to: str) -> None:
    for file in folder.iterdir():
        system.pipe(f"{to}/{file.name}", file.read_bytes())


def test_run_on_a_remote_file_system(memory):
    put(memory, RING, "/bucket/mine")
    here = report_of(RING)
    assert report_of("memory://bucket/mine/run.json") == here
    assert report_of("memory://bucket/mine") == here
    assert report_of(f"file://{RING}/run.json") == here


def test_traces_on_a_remote_file_system(memory):
    traces = sorted(RING.glob("rank*.json.gz"))
    for path in traces:
        memory.pipe(f"/loose/{path.name}", path.read_bytes())
    assert report_of("memory://loose") == report_of(*traces)
    assert report_of(*(f"memory://loose/{path.name}" for path in traces)) == report_of(*traces)


def test_reduced_traces_on_a_remote_file_system(memory):
    traces = sorted(RING.glob("rank*.json.gz"))
    for path in traces:
        memory.pipe(f"/small/{path.name[:5]}.ringprof", reduce_trace(read_trace(path)))
    assert report_of("memory://small") == report_of(*traces)


def test_missing_remote_files_are_reported(memory):
    for name in ("memory://nothing/run.json", "memory://nothing"):
        with pytest.raises(InputError, match="no such file"):
            ringprof.load(name)
    with pytest.raises(InputError, match="Protocol not known"):
        ringprof.load("nowhere://bucket/run.json")


@pytest.mark.parametrize("field", ["path", "reduced"])
@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a::memory://other/x", "a\\..\\x", ""])
def test_remote_run_with_paths_outside_its_folder_is_refused(memory, path, field):
    run = json.loads((RING / "run.json").read_text())
    run["traces"][0][field] = path
    memory.pipe("/evil/run.json", json.dumps(run).encode())
    with pytest.raises(RunFormatError, match="leaves the run's folder"):
        ringprof.load("memory://evil/run.json")


@contextmanager
def cluster_of(workers: int, setup: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a scheduler and workers in separate processes, each of which runs ``setup`` first."""
    program = (
        f"{setup}\n"
        "from distributed import LocalCluster; import sys\n"
        "if __name__ == '__main__':\n"
        f"    with LocalCluster(n_workers={workers}, threads_per_worker=1, processes={not setup}, host='127.0.0.1',\n"
        "                      protocol='tcp', dashboard_address=None) as made:\n"
        "        print(made.scheduler_address, flush=True)\n"
        "        sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with cluster_of(2) as (address, _):
        yield address


@pytest.mark.processes
@pytest.mark.parametrize("name", ["h200x4-usp-262144", "cpu4-burst-4096"])
def test_workers_of_a_cluster_read_the_traces(cluster, name):
    assert report_of(TRACES / name, scheduler=cluster) == report_of(TRACES / name)


@pytest.mark.processes
def test_error_on_a_cluster_worker_is_raised_unchanged(cluster, tmp_path):
    bad = tmp_path / "rank4.json"
    bad.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match=r"rank4\.json: nothing to analyse"):
        ringprof.load([*sorted(RING.glob("rank*.json.gz")), bad], scheduler=cluster)


@pytest.mark.processes
def test_workers_find_a_relative_path(cluster, monkeypatch):
    monkeypatch.chdir(TRACES)
    assert report_of(RING.name, scheduler=cluster) == report_of(RING)


@pytest.mark.processes
@pytest.mark.parametrize("address", ["bogus", "http://127.0.0.1:1", "tcp://127.0.0.1:1", "tcp://", ""])
def test_unreachable_scheduler_is_a_one_line_error(address):
    """Check for one line within the time limit; run as a process, because Dask leaves threads behind."""
    program = "import ringprof.scale.dask_cluster as d; d.PATIENCE_S = 1; from ringprof.cli import main; main()"
    command = [sys.executable, "-c", program, "report", str(RING), "--scheduler", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if address else 0)
    assert done.stderr.count("\n") == bool(address), done.stderr


@pytest.mark.processes
def test_a_scheduler_without_workers(monkeypatch):
    monkeypatch.setattr("ringprof.scale.dask_cluster.PATIENCE_S", 2)
    with cluster_of(0) as (address, _), pytest.raises(UsageError, match="has no workers"):
        ringprof.load(RING, scheduler=address)


@pytest.mark.processes
def test_workers_without_ringprof():
    with cluster_of(1, "import sys; sys.modules['ringprof'] = None") as (address, _):
        with pytest.raises(UsageError, match="cannot import this version of ringprof"):
            ringprof.load(RING, scheduler=address)


@pytest.mark.processes
def test_cluster_that_ends_during_the_work(tmp_path):
    paths = write_ring(tmp_path, 40)
    with cluster_of(1) as (address, process):

        def end(what: str, done: int, of: int) -> None:
            if done == 2:
                process.kill()

        with pytest.raises(UsageError, match="the work was not done"):
            ringprof.load(paths, scheduler=address, notify=end)


def test_symbolic_link_out_of_the_folder_is_refused_by_url(tmp_path):
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


def test_file_system_errors_are_one_line(tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"nonsense")
    for name in (f"zip://run.json::file://{tmp_path}/bad.zip", "reference://x/run.json", "data://x"):
        with pytest.raises(InputError) as raised:
            ringprof.load(name)
        assert str(raised.value).startswith(f"{name}: ") and "\n" not in str(raised.value)
