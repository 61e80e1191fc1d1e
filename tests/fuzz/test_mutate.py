"""Files with damaged fields are read or refused in one line; obvious damage always causes a warning."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.paths import ROOT

# 81,000 in total in the long tier, most for formats that other programs write.
COUNTS = {
    "trace": 15_000, "xla": 6_000, "rocprof": 6_000, "ascend": 6_000, "nsight": 10_000, "reduced": 8_000, "log": 7_000,
    "table": 6_000, "run": 4_000,
    "machine": 3_000, "measurements": 3_000, "lengths": 2_000, "rules": 2_000, "condition": 2_000, "names": 1_000,
}  # fmt: skip


NEEDED = {"machine": "torch", "measurements": "torch", "names": "bokeh"}
FEW = {reader: min(5, count // 200) for reader, count in COUNTS.items()}


def can_read(reader: str) -> bool:
    return reader not in NEEDED or find_spec(NEEDED[reader]) is not None


def read(first: int, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Read files by each reader in one process, and return the lines that it prints."""
    arguments = [word for reader, count in counts.items() for word in (reader, str(first), str(count))]
    command = [sys.executable, "-m", "tests.fuzz.mutate", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reader: str, count: int, lines: list[dict[str, Any]]) -> None:
    """Assert that ``reader`` has read all of its files without a problem."""
    if not can_read(reader):
        pytest.skip("needs a newer Python or a package that is not installed")
    *problems, summary = (line for line in lines if line["reader"] == reader)
    assert not problems, "\n".join(f"{reader} {line['number']}: {line['problem']}" for line in problems)
    assert summary["read"] == count


@pytest.fixture(scope="module")
def few_files() -> list[dict[str, Any]]:
    """Read a few files by each reader, all in one process, and return the printed lines."""
    return read(0, {reader: count for reader, count in FEW.items() if can_read(reader)})


@pytest.mark.parametrize("reader", sorted(COUNTS))
def test_some_damaged_files_are_read_or_refused(reader: str, few_files: list[dict[str, Any]]) -> None:
    check(reader, FEW[reader], few_files)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", sorted(COUNTS))
def test_many_damaged_files_are_read_or_refused(reader: str) -> None:
    counts = {reader: COUNTS[reader]} if can_read(reader) else {}
    check(reader, COUNTS[reader], read(0, counts))
