"""Where the repository, its committed runs and the tests' own data lie."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "traces"
COMMITTED = sorted(path.parent for name in ("cpu*", "h200*") for path in TRACES.glob(f"{name}/run.json"))
"""The runs that come with the repository; beside them lies what was recorded here."""
DATA = ROOT / "tests" / "data"
LOGS = DATA / "logs"
"""Benchmark logs as users have them."""


def tracked_files() -> list[str]:
    """What git tracks and the disk holds, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]
