"""An output that cannot be written, fills up while the ranks run, or is written by two recordings at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ringprof.run import read_run
from tests.recording.command import HANGS_S, RINGPROF, SMALL, TORCHRUN, environment, run, started_in, wait_until

pytestmark = pytest.mark.processes

RECORD = ["record", "--strategy", "mine:Slow", *SMALL, "--world", "2", "--iters", "6", "--no-verify"]
MOUNT = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]


@pytest.fixture
def earlier(strategy_folder: Path) -> Path:
    """A folder with an earlier run."""
    if subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")
    return strategy_folder


def start(folder: Path, mount: str, program: list[str]) -> subprocess.Popen[str]:
    """Start in a new mount namespace, after ``mount``."""
    with (folder / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            [*MOUNT, f'{mount} && cd . && exec "$@"', "sh", *program], cwd=folder, text=True, stderr=stderr,
            stdout=subprocess.DEVNULL, env=environment(TMPDIR=str(folder)), start_new_session=True,
        )  # fmt: skip


def under_way(folder: Path) -> None:
    wait_until(lambda: "iterations" in (folder / "stderr.txt").read_text())


def seen_by(process: subprocess.Popen[str], folder: Path) -> Path:
    """The folder as this process sees it, in its mount namespace."""
    return Path(f"/proc/{process.pid}/root{folder}")


def fill(folder: Path) -> None:
    """Write until the disk is full."""
    with (folder / "filling").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)) == 1 << 16:
                pass
        except OSError:
            return


def one_line(folder: Path) -> str:
    (line,) = [line for line in (folder / "stderr.txt").read_text().splitlines() if line.startswith("ringprof: ")]
    assert "/ringprof/record" not in (folder / "stderr.txt").read_text()
    return line


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["own ranks", "torchrun"])
def test_a_disk_that_fills_up_while_the_ranks_run(earlier: Path, launcher: list[str]) -> None:
    program = [*launcher, "-m", "ringprof", *RECORD] if launcher else [*RINGPROF, *RECORD]
    traces = earlier / "traces"
    traces.mkdir()
    process = start(earlier, f"mount -t tmpfs -o size=12m none '{traces}' && mkdir '{traces}/old'", program)
    under_way(earlier)
    inside = seen_by(process, traces)
    held = os.open(inside, os.O_RDONLY)
    fill(Path(f"/proc/self/fd/{held}"))
    code = process.wait(HANGS_S)
    wait_until(lambda: not started_in(earlier))
    assert code == (1 if launcher else 3)
    assert "No space left on device" in one_line(earlier)
    # torchrun's runs keep their log beside the runs, if there is room, else with the temporary files.
    left = sorted(name for name in os.listdir(held) if not name.endswith(".failed.log"))
    os.close(held)
    assert left == ["filling", "old"]
    log = Path(one_line(earlier).split("log: ")[1])
    assert log.parent.is_relative_to(earlier) and (launcher or "No space left" in log.read_text())


def test_an_output_on_a_read_only_disk_is_refused_before_the_work(earlier: Path) -> None:
    traces = earlier / "traces"
    traces.mkdir()
    process = start(earlier, f"mount -t tmpfs -o ro none '{traces}'", [*RINGPROF, *RECORD])
    assert process.wait(HANGS_S) == 2
    assert "cannot write the run here: Read-only file system" in one_line(earlier)


@pytest.mark.long
def test_output_folder_removed_during_the_run(strategy_folder: Path) -> None:
    process = start_alone(strategy_folder)
    under_way(strategy_folder)
    shutil.rmtree(strategy_folder / "traces")
    assert process.wait(HANGS_S) == 3
    wait_until(lambda: not started_in(strategy_folder))
    assert "No such file or directory" in one_line(strategy_folder)
    assert not (strategy_folder / "traces").exists()


@pytest.mark.long
def test_two_recordings_on_one_output_at_once(tmp_path: Path) -> None:
    record = [*RINGPROF, "record", "--strategy", "ring", *SMALL, "--world", "2", "--iters", "2"]
    both = [subprocess.Popen(record, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(HANGS_S) for process in both] == [0, 0]
    folders = sorted(path.name for path in (tmp_path / "traces").iterdir() if path.is_dir())
    runs = [read_run(tmp_path / "traces" / name / "run.json") for name in folders]
    assert len(runs) == 2 and [run.name for run in runs] == folders
    newest = read_run(tmp_path / "traces/run.json")
    assert newest.name in folders and all((tmp_path / "traces" / trace.path).exists() for trace in newest.traces)
    assert not list((tmp_path / "traces").glob(".*"))


@pytest.mark.long
def test_partial_run_of_a_killed_recording_is_removed_by_the_next(strategy_folder: Path) -> None:
    """All processes are killed at once, so none can remove the half-written run."""
    traces = strategy_folder / "traces"
    process = start_alone(strategy_folder)
    under_way(strategy_folder)
    for pid in started_in(strategy_folder):
        os.kill(pid, signal.SIGSTOP)
    for pid in started_in(strategy_folder):
        os.kill(pid, signal.SIGKILL)
    process.wait(HANGS_S)
    wait_until(lambda: not started_in(strategy_folder))
    assert [path.suffix for path in traces.iterdir()] == [".partial"]
    done = run(["record", "--strategy", "ring", *SMALL, "--world", "1", "--iters", "1"], strategy_folder)
    assert done.returncode == 0 and not list(traces.glob(".*"))


def start_alone(folder: Path) -> subprocess.Popen[str]:
    with (folder / "stderr.txt").open("w") as stderr:
        return subprocess.Popen([*RINGPROF, *RECORD], cwd=folder, env=environment(TMPDIR=str(folder)), stderr=stderr,
                                text=True)  # fmt: skip


CAPTURE = """
import os
import signal
import sys

import torch
import torch.distributed as dist

import ringprof

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    with ringprof.capture("traces/mine"):
        if rank == 1 and sys.argv[1] == "raise":
            raise ArithmeticError("mine")
        if rank == int(sys.argv[2]) and sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(8))
except BaseException as error:
    print("raised:", rank, type(error).__name__, flush=True)
    os._exit(1)
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "on"), [("raise", 1), ("die", 1), ("die", 0)])
def test_capture_with_a_failing_rank(tmp_path: Path, how: str, on: int) -> None:
    (tmp_path / "own.py").write_text(CAPTURE)
    done = run(["own.py", how, str(on)], tmp_path, TORCHRUN)
    assert done.returncode == 1
    wait_until(lambda: not started_in(tmp_path))
    assert "raised: 1 ArithmeticError" in done.stdout or how == "die"
    assert not list(tmp_path.glob("traces/mine*")), "there is no run"
    if on == 0:
        # The writer itself is dead: what it left is cleared by the next capture of that name.
        assert [path.name for path in (tmp_path / "traces").iterdir()] == [".mine.partial"]
    else:
        assert list((tmp_path / "traces").iterdir()) == []
    (tmp_path / "own.py").write_text(CAPTURE.replace("os._exit(1)", "raise") + "\nos._exit(0)\n")
    again = run(["own.py", "nothing", "0"], tmp_path, TORCHRUN)
    assert again.returncode == 0, again.stderr
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["mine"]


NOT_UTF_8 = os.fsdecode(b"bad\xff")
QUICK = ["record", "--strategy", "ring", *SMALL, "--seq", "128", "--world", "2", "--iters", "1"]


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(RINGPROF, id="own ranks"),
     pytest.param([*TORCHRUN, "-m", "ringprof"], id="torchrun", marks=pytest.mark.long)],
)  # fmt: skip
def test_output_folder_with_a_name_that_is_not_utf_8(tmp_path: Path, launcher: list[str]) -> None:
    """Where the command runs, where it writes to, and among its arguments."""
    folder = tmp_path / NOT_UTF_8
    folder.mkdir()
    done = subprocess.run(
        [*launcher, *QUICK, "-o", str(folder / "traces" / NOT_UTF_8)], cwd=folder, env=environment(),
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_run(folder / "traces" / NOT_UTF_8).topology.world_size == 2
    assert not list((folder / "traces").glob(".*"))


def test_unwritable_output_that_is_not_utf_8_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / NOT_UTF_8).write_text("no run")
    done = subprocess.run(
        [*RINGPROF, *QUICK, "-o", NOT_UTF_8], cwd=tmp_path, env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert b"exists and is not a ringprof run" in done.stderr


@pytest.mark.parametrize(
    "closed", [">&- 2>&- <&-", *(pytest.param(stream, marks=pytest.mark.long) for stream in (">&-", "2>&-", "<&-"))]
)
def test_closed_standard_streams_do_not_fail_a_recording(tmp_path: Path, closed: str) -> None:
    command = ["bash", "-c", f'"$@" {closed}', "_", *RINGPROF, *QUICK]
    env = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "traces/run.json").verification is not None
    assert not list(tmp_path.glob("ringprof-*"))
