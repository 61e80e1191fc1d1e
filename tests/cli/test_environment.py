"""Commands in poor environments: without a writable home, on a plain terminal, with a strict Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringprof import cli
from tests.paths import ROOT, TRACES
from tests.tiers import tiered

RUN = str(TRACES / "h200x4-zigzag-65536")
VARIABLES: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None},
    "no home to write to": {"HOME": f"{__file__}/home"},
    "no folder for temporary files": {"TMPDIR": "/nowhere"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "a terminal of one column": {"COLUMNS": "1"},
    # The lowest versions of packages use functions that others deprecate.
    "warnings are errors": {"PYTHONWARNINGS": "error,ignore::DeprecationWarning"},
    "no assertions, no docstrings": {"PYTHONOPTIMIZE": "2"},
}


def ringprof(arguments: list[str], folder: Path, changes: dict[str, str | None]) -> tuple[int, bytes, str]:
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": None} | changes
    done = subprocess.run(
        [sys.executable, "-m", "ringprof", *arguments], cwd=folder, capture_output=True, check=False,
        env={name: value for name, value in env.items() if value is not None},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the report in a normal environment."""
    return ringprof(["report", RUN], tmp_path_factory.mktemp("plain"), {})[1]


def figures(printed: bytes) -> list[bytes]:
    numbers = re.findall(rb"\d+\.\d+", printed)
    assert len(numbers) > 50
    return numbers


@tiered("name", VARIABLES, ("no home to write to", "ASCII"), "processes")
def test_report_and_plot_in_unusual_environments(name: str, elsewhere: bytes, tmp_path: Path) -> None:
    changes = VARIABLES[name]
    code, printed, errors = ringprof(["report", RUN], tmp_path, changes)
    assert (code, errors) == (0, "")
    # Lines may break elsewhere, bars may be shorter, and characters outside ASCII are replaced.
    assert figures(printed) == figures(elsewhere)
    assert printed.isascii() == ("LC_ALL" in changes)
    assert ringprof(["plot", "steps", RUN, "-o", "steps.svg"], tmp_path, changes) == (0, b"", "Wrote steps.svg\n")


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_output_files_have_the_requested_modes(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        assert cli.run(["export", RUN, "-o", str(tmp_path / "out.json.gz")]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "out.json.gz").stat().st_mode & 0o777 == 0o666 & ~mask
