"""Where the repository, its committed runs and the tests' own data lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "traces"
"""The committed runs."""
DATA = ROOT / "tests" / "data"
LOGS = DATA / "logs"
"""Benchmark logs as users have them."""
