"""First steps of a new user in a fresh clone: ``make demo``, then ``make test``, and both again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

FEW = "-q tests/test_run.py tests/test_docs.py tests/report/test_text.py"
"""Tests to run after the linters: some that read the folder in which a demo stores its run."""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_readme_commands_work_twice_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for _ in range(2):
        for words in (["demo"], ["test", f"PYTEST={FEW}"]):
            command = ["make", *words, f"PYTHON={sys.executable}"]
            done = subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            if words == ["demo"]:
                page = done.stdout.splitlines()[-1].partition("file://")[2]
                assert Path(page) == clone / "traces" / "report.html" and Path(page).is_file()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""
    assert len(list((clone / "traces").glob("2*-zigzag-*/run.json"))) == 2
