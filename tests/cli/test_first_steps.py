"""First steps and mistakes: messages of the command line for missing, misspelt or unknown arguments."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlparse

import pytest

from ringprof import cli
from tests.loaded import analysis
from tests.paths import ROOT, TRACES

RUN = str(TRACES / "h200x4-zigzag-65536")
SORTED = "steps, idle, kernels, gemms, collectives, layers, annotations, hops"
COMMANDS = [
    ["report", RUN], ["report", str(TRACES), "--csv", "runs"], ["record", "--strategy", "ring", "--seq", "256"],
]  # fmt: skip
OTHER = str(TRACES / "h200x4-zigzag-65536-copied")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run([*arguments])
    return code, *capsys.readouterr()


def test_command_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ringprof") and "\n  report " in out and len(out.splitlines()) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reprot", RUN], "no command 'reprot' (did you mean 'report'?); there are: report, "),
        (["help", "predct"], "no command 'predct' (did you mean 'predict'?); there are: report, "),
        (["report", "--json"], "No such option '--json'. (use --format json; see: ringprof report --help)"),
        (["compare", "--csv"], "(use --format csv; see: "),
        (["report", RUN, "--csv", "brekdown"], "(did you mean 'breakdown'?)"),
        (
            ["report", RUN, "--top", "5"],
            f"--top 5: limits {SORTED}: add one of them with --show",
        ),
        (
            ["report", RUN, "--all"],
            f"--all: completes {SORTED}: add one of them with --show",
        ),
        (["report", RUN.replace("traces", "tracs")], "no such file or folder (did you mean 'traces'?)"),
        (["plot", "timline", RUN], "(did you mean 'timeline'?)"),
        (["predict", "--strategy", "ring_attention", "--seq", "64", "--machine", "h100"], "(did you mean 'ring'?)"),
        (
            ["predict", "--strategy", "ring", "--seq", "64", "--machine", "h10"],
            "no machine 'h10' (did you mean 'h100'?)",
        ),
        (["predict", "--strategy", "ring", "--seq", "64", "--machine", "h100", "--kernel", "cudn"], "mean 'cudnn'?)"),
        (
            ["predict", "--strategy", "usp", "--seq", "64", "--machine", "h100", "-p", "ulises_degree=2"],
            "no parameter 'ulises_degree' (did you mean 'ulysses_degree'?)",
        ),
        (["advise", "--strategy", "zigag", "--seq", "64", "--machine", "h100"], "(did you mean 'zigzag'?)"),
        (["record", "--strategy", "zigzg", "--seq", "64"], "no strategy 'zigzg' (did you mean 'zigzag'?)"),
        (
            ["check", "tets.cli:f", "--layout", "zigzag"],
            "no module 'tets' is installed or in the current folder (did you mean 'tests'?)",
        ),
        (["record", "--strategy", "nomodule:C", "--seq", "64"], "no module 'nomodule' is installed or in the"),
        (["calibrate", "--parts", "link"], "(did you mean 'links'?)"),
        (["record", "--strategy", "zigzag", "--seq", "64", "--nproc", "2"], "--world sets the number of ranks"),
        (["bench", "--strategies", "zigzag", "--seq", "64", "--gpus=2"], "--world sets the number of ranks"),
        (["report", RUN, OTHER], f"set them side by side with: ringprof compare {quote(RUN)} {quote(OTHER)}"),
        (["report", f"{RUN}/run.json", OTHER], "these are 2 runs"),
        (["report", RUN, "--sort", "exposed"], "add one of them with --show"),
        (
            ["report", RUN, "--show", "steps", "--sort", "exposd"],
            "no such column (did you mean 'exposed'?); there are: block, ",
        ),
    ],
)
def test_misspelled_argument_error_suggests_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_missing_run_error_explains_how_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["report"], ["export", "-o", "out.json"]):
        code, _, err = run(capsys, *command)
        assert code == 2 and "no run here yet: give a path, or record one" in err


def test_hints_quote_the_path_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUN, tmp_path / "a run")
    monkeypatch.chdir(tmp_path)
    for path in ("a run", str(tmp_path / "a run")):
        assert "\nnext: ringprof report 'a run' --html report.html" in run(capsys, "report", path)[1]
    monkeypatch.chdir(ROOT / "docs")
    assert f"next: ringprof report '{tmp_path}/a run' --html" in " ".join(
        run(capsys, "report", str(tmp_path / "a run"))[1].split()
    )


@pytest.mark.parametrize(
    ("variables", "colour"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "0"}, False),
     ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({"FORCE_COLOR": "1", "TERM": "dumb"}, True)],
)  # fmt: skip
def test_colour_can_be_forced_and_disabled(
    variables: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, _ = run(capsys, "report", RUN)
    assert code == 0 and ("\x1b[1m" in out) is colour


def test_pipe_gets_all_columns_and_terminal_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    command = ["report", str(TRACES / "h200x4-burst-65536-two-hosts"), "--show", "hops", "--all"]
    piped, narrow = (run(capsys, *command, *more)[1] for more in ([], ["--width", "80"]))
    assert "to  from     MB" in piped and "no room" not in piped and "…" not in piped
    assert "no room for" in narrow and max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("frame", ["breakdown", "iterations", "steps", "kernels", "annotations", "hops", "waterfall"])
def test_every_frame_can_be_written_as_csv(frame: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "frame.csv"
    assert run(capsys, "report", RUN, "--csv", frame, "-o", str(out))[:2] == (0, "")
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    expected = getattr(analysis(RUN), frame)()
    assert list(rows[0]) == list(expected.columns) and len(rows) == len(expected)
    if frame == "hops":
        assert {(row["rank"], row["send_to"], row["receive_from"]) for row in rows} == {
            ("0", "1", "3"), ("1", "2", "0"), ("2", "3", "1"), ("3", "0", "2")
        }  # fmt: skip
    for column in ("wall_ns", "time_ns", "start_ns", "exposed_ns"):
        if column in expected:
            assert [int(row[column]) if row[column] else None for row in rows] == [
                None if value is None else int(value) for value in expected[column].astype(object).where(
                    expected[column].notna(), None)
            ]  # fmt: skip


@pytest.mark.usefixtures("scratch")
def test_open_option_opens_the_page_in_a_browser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return len(opened) == 1

    monkeypatch.setattr(webbrowser, "open", open_page)
    assert run(capsys, "report", RUN, "--open")[0] == 0
    page = Path(unquote(urlparse(opened[0]).path))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    code, _, err = run(capsys, "report", RUN, "--open", "--html", str(page))
    assert code == 0 and f"no browser is available here: open {page}" in err


@pytest.mark.usefixtures("scratch")
def test_temporary_page_is_removed_by_a_later_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The browser reads the page when it likes, so the page stays for an hour."""
    monkeypatch.setattr(webbrowser, "open", lambda _: True)
    for number in (1, 2):
        assert run(capsys, "report", RUN, "--open")[0] == 0
        assert len(list(tmp_path.glob("ringprof-*/report.html"))) == number
    hours_ago = time.time() - 7200
    for folder in tmp_path.glob("ringprof-*"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        os.utime(folder, (hours_ago, hours_ago))
    assert run(capsys, "report", RUN, "--open")[0] == 0
    (page,) = tmp_path.glob("ringprof-*/report.html")
    assert page.stat().st_mtime > hours_ago + 3600


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Temporary files lie in the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("start", [["-m", "ringprof"], ["-c", "from ringprof.cli import main; main()"]])
@pytest.mark.parametrize("arguments", COMMANDS)
def test_removed_current_folder_is_a_named_error(start: list[str], arguments: list[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    process = subprocess.run(
        ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), sys.executable, *start, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    sentence = f"ringprof: {gone}: the current folder has been removed: change to another one with cd\n"
    assert (process.returncode, process.stdout, process.stderr) == (2, "", sentence)


def test_error_line_contains_no_terminal_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (a)")
        database.execute("PRAGMA writable_schema = 1")
        database.execute("UPDATE sqlite_master SET name = ?, sql = 'CREATE TBLE x'", ("\x1b]0;title\x07\u202e\x1b[2J",))
        database.commit()
    code, out, err = run(capsys, "report", str(path))
    assert (code, out) == (2, "") and err.startswith("ringprof: ") and err.endswith("\n")
    assert err[:-1].isprintable() and "]0;title" in err
