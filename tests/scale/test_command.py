"""``ringprof report`` of more ranks than memory holds at once, run as a command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ringprof.run import RankTrace, parse_run, write_run
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import MAGIC, reduce_trace
from tests.scale.runs import RING, write_ring

WORLD = 72


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_ring(folder, WORLD, per_host=8)
    return folder


def command(*arguments: str | Path, scratch: Path) -> list[str]:
    scratch.mkdir(exist_ok=True)
    return [sys.executable, "-m", "ringprof", "report", *map(str, arguments)]


def report(*arguments: str | Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command_line = command(*arguments, scratch=scratch)
    return subprocess.run(command_line, capture_output=True, text=True, env=environment, check=False)


def leftover_folders(scratch: Path) -> list[Path]:
    """Return the folders that the command left in the temporary folder."""
    return sorted(scratch.glob("ringprof-*"))


def test_a_report_of_many_ranks(many, tmp_path):
    done = report(many, "--show", "steps", "--format", "terminal", scratch=tmp_path / "scratch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{WORLD} ranks") and "ring steps" in done.stdout
    assert leftover_folders(tmp_path / "scratch") == []


def running(scratch: Path) -> list[int]:
    """Return the processes that were started with this temporary folder."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def obey_signals() -> None:
    """Restore default signal handling: a test run in the background, or under nohup, passes on ignored signals."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def signalled_report(many: Path, scratch: Path, jobs: str, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a report while it explains ranks; return its exit code and error output."""
    process = subprocess.Popen(
        command(many, "--jobs", jobs, scratch=scratch),
        env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=obey_signals,
    )  # fmt: skip
    while not list(scratch.glob("ringprof-*/transfers*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    return process.returncode, errors


@pytest.mark.processes
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_report_of_many_ranks_without_leftovers(many, tmp_path, jobs, number):
    code, errors = signalled_report(many, tmp_path / "scratch", jobs, number)
    assert code == 128 + number and "Traceback" not in errors, errors
    assert leftover_folders(tmp_path / "scratch") == []
    # A process that survives makes the test run into its time limit.
    while running(tmp_path / "scratch"):
        time.sleep(0.05)


@pytest.mark.processes
def test_scratch_files_of_a_killed_report_are_removed_by_the_next(many, tmp_path):
    code, _ = signalled_report(many, tmp_path / "scratch", "1", signal.SIGKILL)
    assert code == -signal.SIGKILL and len(leftover_folders(tmp_path / "scratch")) == 1
    assert report(many, scratch=tmp_path / "scratch").returncode == 0
    assert leftover_folders(tmp_path / "scratch") == []


@pytest.mark.processes
def test_full_disk_for_scratch_files_is_a_one_line_error(many, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "_", *command(many, "--jobs", "1", scratch=tmp_path / "unused")],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "TMPDIR" in done.stderr and "File too large" in done.stderr and leftover_folders(tmp_path) == []


@pytest.mark.processes
def test_damaged_trace_in_a_folder_of_many_is_left_out(many, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(many, folder)
    (folder / "rank40.ringprof").write_bytes(MAGIC + b"nothing")
    (folder / "rank7.ringprof").write_bytes(b"")
    done = report(folder, scratch=tmp_path / "scratch")
    assert done.returncode == 0 and done.stdout.startswith("70 of 72 ranks"), done.stderr
    warnings = json.loads(report(folder, "--format", "json", scratch=tmp_path / "scratch").stdout)["warnings"]
    (message,) = [warning["message"] for warning in warnings if warning["code"] == "left_out"]
    assert message.endswith(f"are left out: {folder}/rank7.ringprof: the file is empty, and 1 more")
    assert report(folder, "--strict", scratch=tmp_path / "scratch").returncode == 2


@pytest.mark.processes
def test_damaged_trace_among_named_files_is_a_one_line_error(many, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(many, folder)
    (folder / "rank40.ringprof").write_bytes(MAGIC + b"nothing")
    done = report(*sorted(folder.iterdir()), scratch=tmp_path / "scratch")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "rank40.ringprof: damaged reduced trace" in done.stderr
    assert leftover_folders(tmp_path / "scratch") == []


def without_hint(done):
    """Return the report without its last line, which names the path."""
    return done.stdout.rpartition("\nnext: ")[0]


def test_recorded_run_is_reported_from_reduced_traces_alone(tmp_path):
    """Check that ``run.json`` and the reduced traces alone give the same report."""
    run = parse_run((RING / "run.json").read_bytes(), "run.json")
    entries = [
        RankTrace(rank=t.rank, path=t.path, reduced=f"rank{t.rank}.ringprof", size_bytes=(RING / t.path).stat().st_size)
        for t in run.traces
    ]
    write_run(replace(run, traces=entries), tmp_path / "run.json")
    for entry in entries:
        assert entry.reduced is not None
        (tmp_path / entry.reduced).write_bytes(reduce_trace(read_trace(RING / entry.path)))
    apart, whole = (report(path, scratch=tmp_path / "scratch") for path in (tmp_path / "run.json", RING / "run.json"))
    assert apart.returncode == 0 and without_hint(apart) == without_hint(whole)
    # A trace that was rewritten after it was reduced is read itself.
    other = RING.parent / "h200x4-burst-262144" / "rank1.json.gz"
    shutil.copy(other, tmp_path / "rank1.json.gz")
    done = report(tmp_path / "run.json", scratch=tmp_path / "scratch")
    assert done.returncode == 0 and without_hint(done) != without_hint(whole)
    shutil.copy(RING / "rank1.json.gz", tmp_path / "rank1.json.gz")
    assert without_hint(report(tmp_path / "run.json", scratch=tmp_path / "scratch")) == without_hint(whole)
    (tmp_path / "rank1.json.gz").unlink()
    # A reduced trace of another version is not read: then the trace itself is needed.
    (tmp_path / "rank2.ringprof").write_bytes(b"ringprof.trace/9\n")
    done = report(tmp_path / "run.json", scratch=tmp_path / "scratch")
    assert done.returncode == 0 and done.stdout.startswith("3 of 4 ranks")
    assert "rank2.json.gz: No such file or directory [left_out]" in " ".join(done.stdout.split())
    for path in tmp_path.glob("*.ringprof"):
        path.unlink()
    assert "rank0.json.gz: No such file" in report(tmp_path / "run.json", scratch=tmp_path / "scratch").stderr
