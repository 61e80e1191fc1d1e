"""The command ``ringprof report``: text, files, exit codes."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys

import pytest

from ringprof import cli
from tests.analysis.test_real_runs import NVLINK
from tests.paths import DATA, ROOT

FOLDER = str(DATA / NVLINK)
ONE = str(DATA / NVLINK / "rank0.json.gz")


def run(capsys, *args):
    code = cli.run(["report", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_of_a_folder_of_traces(capsys):
    code, out, err = run(capsys, FOLDER)
    assert (code, err) == (0, "")
    assert out.startswith("8 ranks, hosts unknown")


def test_folder_name_is_escaped_for_terminal_and_shell(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, shown in {"\x1b]0;owned\x07": "PATH", "a; touch b": "'a; touch b'"}.items():
        os.symlink(FOLDER, name)
        code, out, err = run(capsys, name)
        assert (code, err) == (0, "")
        assert not set("\x07\x1b") & set(out)
        assert f"next: ringprof report {shown} --html" in out


def test_read_error_names_the_file(capsys):
    """Read a file without a page at address 0, as on a failing disk."""
    assert run(capsys, "/proc/self/mem") == (2, "", "ringprof: /proc/self/mem: Input/output error\n")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["nowhere"], 2), ([ONE, "-o", os.devnull], 0), ([ONE, "--strict"], 2)]
)
def test_unwritable_stderr_keeps_the_exit_code(arguments, code):
    """Keep the exit code, since 1 means that a condition holds."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ringprof", "report", *arguments]
        assert subprocess.run(command, stderr=full, stdout=subprocess.DEVNULL, cwd=ROOT).returncode == code


def test_json_goes_to_a_file(capsys, tmp_path):
    file = tmp_path / "report.json"
    code, out, err = run(capsys, FOLDER, "--format", "json", "-o", str(file))
    assert (code, out) == (0, "")
    assert err == f"Wrote {file}\n"
    assert len(json.loads(file.read_text(encoding="utf-8"))["ranks"]) == 8


def test_strict_makes_warnings_an_error(capsys):
    assert run(capsys, FOLDER, "--strict")[0] == 0
    code, out, err = run(capsys, ONE, "--strict")
    assert code == 2
    assert out.startswith("1 of 8 ranks")
    assert err.startswith("ringprof: 2 warnings, the first: ")
    assert err.count("\n") == 1


def test_hosts_can_be_named(capsys):
    _, out, _ = run(capsys, FOLDER, "--ranks-per-node", "4", "--format", "json")
    assert [rank["host"] for rank in json.loads(out)["ranks"]] == ["host0"] * 4 + ["host1"] * 4


def test_report_of_a_trace_from_a_pipe(capsys, monkeypatch):
    with open(ONE, "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read())))
    code, out, _ = run(capsys, "-", "--format", "json")
    assert code == 0
    assert json.loads(out)["source"] == {"type": "trace", "paths": ["-"]}


def wrong(tmp_path):
    (tmp_path / "empty.json").touch()
    (tmp_path / "words.txt").write_text("no table here\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bare.json").write_text('{"traceEvents": []}', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ("missing.json",),
        ("empty.json",),
        ("words.txt",),
        ("folder",),
        ("bare.json",),
        (ONE, ONE[:-8] + "0.json.gz", "words.txt"),
        ("--format", "yaml", ONE),
        ("--width", "1", ONE),
        ("-", ONE),
        ("-o", "missing/folder/file", ONE),
        (),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, args):
    monkeypatch.chdir(wrong(tmp_path))
    code, _, err = run(capsys, *args)
    assert code == 2
    assert err.startswith("ringprof: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("encoding", "ascii_only"), [("utf-8", False), ("ascii", True), ("latin-1", True)])
def test_report_uses_the_encoding_of_stdout(encoding, ascii_only, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    assert cli.run(["report", FOLDER]) == 0
    text = written.getvalue().decode(encoding)
    assert text.isascii() == ascii_only
    assert "\x1b" not in text


def test_width_option_limits_line_length(capsys):
    _, out, _ = run(capsys, FOLDER, "--width", "100")
    assert 80 < max(map(len, out.splitlines())) <= 100


def test_a_compressed_trace_that_expands_beyond_the_limit_is_refused(tmp_path, capsys):
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b'{"traceEvents": [' + b" " * 200_000 + b"]}")
    code, _, err = run(capsys, str(path), "--max-bytes", "100000")
    assert code == 2
    assert "--max-bytes" in err


@pytest.mark.parametrize("options", [["-o", "x" * 300], ["-o", "/dev/full"], ["--rules", "x" * 300]])
def test_invalid_output_paths_are_a_one_line_error(capsys, options):
    code, _, err = run(capsys, ONE, *options)
    assert code == 2 and err.startswith("ringprof: ") and err.count("\n") == 1


def test_empty_csv_table_has_columns_and_a_note(capsys):
    """Write the memory table of a trace without memory events: no rows, like hops on CPU."""
    code, out, err = run(capsys, ONE, "--csv", "memory")
    assert (code, out.count("\n"), err.count("\n")) == (0, 1, 1) and out.startswith("rank,")
    assert err == "ringprof: memory: no rows, only column names: the traces hold nothing of the kind\n"
