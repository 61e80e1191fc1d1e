"""Files that commands write are complete, or unchanged."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ringprof import cli
from ringprof.cli.write import written
from ringprof.errors import InputError
from tests.paths import ROOT, TRACES

RUN = str(TRACES / "h200x4-zigzag-65536")


def test_output_replaces_an_existing_file_atomically(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "out.json", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to("out.json")
    with pytest.raises(KeyboardInterrupt), written(link) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert (file.read_text(), capsys.readouterr().err) == ("before", "")
    with written(link) as temporary:
        temporary.write_text("after")
        assert file.read_text() == "before"
    assert file.read_text() == link.read_text() == "after" and link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "out.json"]


def test_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    with written(tmp_path / "out") as temporary:
        temporary.write_text("")
    (tmp_path / "usual").write_text("")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_write_error_names_the_path_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no" / "out.json"
    with pytest.raises(InputError, match=f"^{path}: cannot be written: No such file or directory$"), written(path):
        pytest.fail("nothing can be written")


@pytest.mark.parametrize(
    "command",
    [["report", "-o"], ["report", "--html"], ["compare", RUN, "--html"], ["export", "-o"], ["plot", "timeline", "-o"],
     ["calibrate", "-o"], ["advise", "--machine", "h100", "--seq", "64", "--html"],
     ["bench", "--strategies", "ring", "--seq", "64", "--html"]],
    ids=" ".join,
)  # fmt: skip
def test_unwritable_output_is_refused_before_the_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is to be read is not there, either: what is refused first is the output."""
    path = tmp_path / "no" / "out.png"
    work = [] if command[0] in ("advise", "bench") else ["no-such-run"]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.run([*command, str(path), *work]) == 2
    assert capsys.readouterr().err == f"ringprof: {path}: cannot be written: No such file or directory\n"


def test_missing_pyarrow_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.run(["report", "no-such-run", "--parquet", "hops", "-o", str(tmp_path / "hops.parquet")]) == 2
    assert "Parquet files need pyarrow" in capsys.readouterr().err


def test_plot_and_calibration_have_a_default_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(Path(RUN).resolve())
    monkeypatch.chdir(tmp_path)
    assert cli.run(["plot", "breakdown", run]) == 0
    assert (tmp_path / "breakdown.png").read_bytes().startswith(b"\x89PNG")
    pytest.importorskip("torch")
    assert cli.run(["calibrate", run]) == 0
    assert json.loads((tmp_path / "machine.json").read_text())["device"] == "NVIDIA H200"
    assert "Wrote machine.json: ringprof predict --machine machine.json" in capsys.readouterr().err


def test_output_to_dev_stdout_writes_to_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringprof", "report", RUN, "--format", "json", "-o", "/dev/stdout"],
        capture_output=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith(b"{")


def test_gzip_export_contains_its_file_name(tmp_path: Path) -> None:
    assert cli.run(["export", RUN, "-o", str(tmp_path / "merged.json.gz")]) == 0
    packed = (tmp_path / "merged.json.gz").read_bytes()
    assert packed[10:22] == b"merged.json\0" and gzip.decompress(packed).startswith(b"{")


def test_full_disk_leaves_the_existing_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("before")
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "_", sys.executable, "-m", "ringprof", "report", RUN,
         "--format", "json", "-o", str(file)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"ringprof: {file}: cannot be written: File too large\n")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "stream", "code"),
    [
        (["report", RUN, "--fail-if", "exposed_comm < 0"], "stdout", 141),
        (["--help"], "stdout", 141),
        (["kernels", "--help"], "stdout", 141),
        (["report", "/no/such"], "stdout", 2),
        (["report", "/no/such"], "stderr", 2),
        (["report", RUN, "--fail-if", "exposed_comm > 0"], "stderr", 1),
    ],
)
def test_closed_pipe_is_not_exit_code_1(arguments: list[str], stream: str, code: int, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.Popen(
        [sys.executable, "-m", "ringprof", *arguments], cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writing if stream == "stdout" else subprocess.DEVNULL,
        stderr=writing if stream == "stderr" else subprocess.PIPE,
    )  # fmt: skip
    os.close(writing)
    _, errors = done.communicate()
    assert done.returncode == code
    assert (errors or b"").count(b"\n") == (stream == "stdout" and code == 2), errors
