"""Files with damaged fields are read or refused in one line; obvious damage always causes a warning."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT

# 81,000 in total in the long tier, most for formats that other programs write.
COUNTS = {
    "trace": 15_000, "xla": 6_000, "rocprof": 6_000, "ascend": 6_000, "nsight": 10_000, "reduced": 8_000, "log": 7_000,
    "table": 6_000, "run": 4_000,
    "machine": 3_000, "measurements": 3_000, "lengths": 2_000, "rules": 2_000, "condition": 2_000, "names": 1_000,
}  # fmt: skip


def read(reader: str, first: int, count: int) -> None:
    if sys.version_info < (3, 11) and reader == "nsight":
        pytest.skip("sqlite3 of this Python writes no database into memory")
    needed = {"machine": "torch", "measurements": "torch", "names": "bokeh"}
    if reader in needed:
        pytest.importorskip(needed[reader])
    command = [sys.executable, "-m", "tests.fuzz.mutate", reader, str(first), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (reader, done.stdout[-1000:], done.stderr[-3000:])
    assert len(lines) == 1 and lines[0]["read"] == count, "\n".join(
        f"{reader} {line['number']}: {line['problem']}" for line in lines[:-1]
    )


@pytest.mark.parametrize("reader", sorted(COUNTS))
def test_some_damaged_files(reader: str) -> None:
    read(reader, 0, min(40, COUNTS[reader] // 200))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", sorted(COUNTS))
def test_many_damaged_files(reader: str) -> None:
    read(reader, 100, COUNTS[reader])
