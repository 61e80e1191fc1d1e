"""Paths of the repository, its committed runs and the tests' own data."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "traces"
COMMITTED = sorted(path.parent for name in ("cpu*", "h200*") for path in TRACES.glob(f"{name}/run.json"))
"""Committed runs, without the runs that were recorded locally in the same folder."""
VARIED = ("h200x4-zigzag-65536", "h200x4-usp-65536-two-hosts", "cpu4-burst-4096", "h200x2-decode-1048576")
"""Committed runs of different kinds, for what would take long on all of them."""
DATA = ROOT / "tests" / "data"
LOGS = DATA / "logs"
"""Benchmark logs from users."""


def tracked_files() -> list[str]:
    """List the files that git tracks and that exist, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]
