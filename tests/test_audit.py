"""Output of `make audit` for packages that no database has, and for an unreachable database."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import ROOT

AUDIT = ROOT / "scripts" / "audit.py"
SCRIPT = runpy.run_path(str(AUDIT))
SOUND = {"name": "click", "version": "8.1", "vulns": []}
HOLED = {"name": "jinja2", "version": "3.1.0", "vulns": [{"id": "PYSEC-1"}, {"id": "PYSEC-2"}]}
UNKNOWN = {"name": "torch", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "lines", "code"),
    [
        ([SOUND], ["audited: 1 of 1 packages, 0 known holes"], 0),
        (
            [SOUND, HOLED, UNKNOWN],
            [
                "audited: 2 of 3 packages, 2 known holes",
                "jinja2 3.1.0: PYSEC-1",
                "jinja2 3.1.0: PYSEC-2",
                "NOT AUDITED, in no database: torch",
            ],
            1,
        ),
        ([UNKNOWN, UNKNOWN], ["NOT AUDITED: no database of vulnerabilities could be reached"], 0),
        ([], ["NOT AUDITED: no database of vulnerabilities could be reached"], 0),
    ],
)
def test_audit_reports_what_could_not_be_audited(packages: list[dict[str, Any]], lines: list[str], code: int) -> None:
    assert SCRIPT["verdict"](packages) == (lines, code)


@pytest.mark.parametrize("answer", ["", 'print(\'{"dependencies": [{"name": "a", "skip_reason": "b"}]}\')'])
def test_audit_without_a_database_ends_with_not_audited(answer: str, tmp_path: Path) -> None:
    """Use a pip-audit without output, as without a network, or one that finds no package, as with a mirror's index."""
    (tmp_path / "pip_audit.py").write_text(answer)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, AUDIT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "NOT AUDITED: no database of vulnerabilities could be reached"


def affected(*versions: str, events: tuple[dict[str, str], ...] = (), name: str = "Some.Package") -> dict[str, Any]:
    ranges = [{"type": "GIT", "events": [{"introduced": "0"}]}, {"type": "ECOSYSTEM", "events": list(events)}]
    return {"package": {"name": name, "ecosystem": "PyPI"}, "versions": list(versions), "ranges": ranges}


_PARTS = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(st.lists(_PARTS, min_size=1, max_size=6, unique=True), st.booleans(), _PARTS)
def test_version_is_affected_between_two_events(
    versions: list[tuple[int, int]], last: bool, version: tuple[int, int]
) -> None:
    """Compare with pairs of numbers; the last range has no end if the number of events is odd."""
    kinds = ("introduced", "last_affected" if last else "fixed")
    bounds = sorted(versions)
    events = tuple({kinds[index % 2]: f"{x}.{y}"} for index, (x, y) in enumerate(bounds))
    ends = [*bounds[1::2], (99, 99)]
    truth = any(
        begin <= version and (version <= end if last else version < end)
        for begin, end in zip(bounds[::2], ends, strict=False)
    )
    affects = SCRIPT["affects"]
    for given_events in (events, events[::-1]):
        assert affects(affected(events=given_events), f"{version[0]}.{version[1]}") == truth


@pytest.mark.parametrize(("version", "hit"), [("2.5.1", True), ("2.6.0", True), ("2.6.1", False), ("2.13.0", False)])
def test_affected_range_with_an_invalid_version_bound(version: str, hit: bool) -> None:
    """Use a bound that is not a valid version, as in PYSEC-2025-189 of torch."""
    events = ({"introduced": "0"}, {"last_affected": "2.6.0-cu124"})
    assert SCRIPT["affects"](affected(events=events), version) == hit


def test_audit_with_a_local_database(tmp_path: Path) -> None:
    """Use records in OSV's export format for this project's pins: listed, in a range, withdrawn, fixed, unrelated."""
    pins = SCRIPT["pinned"]()
    assert len(pins) == sum("==" in line for line in (ROOT / "constraints.txt").read_text().splitlines())
    everything = ({"introduced": "0"},)
    records: dict[str, dict[str, Any]] = {
        "LISTED": {"affected": [affected(pins["pytest"], name="PyTest")]},
        "RANGE": {"affected": [affected(events=everything, name="pip_audit")]},
        "WITHDRAWN": {"affected": [affected(events=everything, name="torch")], "withdrawn": "2026-01-01T00:00:00Z"},
        "FIXED": {"affected": [affected(events=({"introduced": "0"}, {"fixed": pins["numpy"]}), name="numpy")]},
        "UNRELATED": {"affected": [affected(events=everything)]},
    }
    database = tmp_path / "all.zip"
    with zipfile.ZipFile(database, "w") as archive:
        for number, (name, record) in enumerate(records.items()):
            dated = {"id": name, "modified": f"2026-0{number + 1}-01T00:00:00Z", **record}
            archive.writestr(f"{name}.json", json.dumps(dated))
    done = subprocess.run([sys.executable, AUDIT, database], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [
            "5 records, the newest of 2026-05-01",
            f"audited: {len(pins)} of {len(pins)} packages, 2 known holes",
            f"pip-audit {pins['pip-audit']}: RANGE",
            f"pytest {pins['pytest']}: LISTED",
        ],
    )
    database.write_text("no archive")
    done = subprocess.run([sys.executable, AUDIT, database], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{database}: File is not a zip file\n")
