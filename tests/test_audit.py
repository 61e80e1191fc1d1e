"""What `make audit` says of packages that no database has, or of a database that cannot be reached."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

AUDIT = ROOT / "scripts" / "audit.py"
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
def test_what_could_not_be_audited_is_said(packages: list[dict[str, Any]], lines: list[str], code: int) -> None:
    assert runpy.run_path(str(AUDIT))["verdict"](packages) == (lines, code)


@pytest.mark.parametrize("answer", ["", 'print(\'{"dependencies": [{"name": "a", "skip_reason": "b"}]}\')'])
def test_without_a_database_its_last_line_says_so(answer: str, tmp_path: Path) -> None:
    """A pip-audit that says nothing, as without a network, or that found no package, as a mirror's index makes it."""
    (tmp_path / "pip_audit.py").write_text(answer)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, AUDIT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "NOT AUDITED: no database of vulnerabilities could be reached"
