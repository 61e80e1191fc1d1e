"""Test the analysis side on every installed Python from 3.11 to 3.13, with pandas 2.2 and 3, without torch.

One row has the lowest version of each package that setup.cfg allows. The last row runs the strategies' tests on CPU
with torch 2.15, which downloads some gigabytes.

Each row gets a temporary environment in .venv-matrix/, which is kept only if its tests fail. Missing Pythons are
listed, not silently skipped.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOWEST = "the lowest versions"
ANALYSIS = ("trace", "analysis", "report", "cli", "scale", "fuzz", "test_trust.py")


class Row(NamedTuple):
    """One environment, and the tests that run in it."""

    python: str
    packages: str
    extras: str = ""
    """Extras of ringprof to install, in brackets."""
    tests: tuple[str, ...] = ANALYSIS
    """Paths under tests/."""


MATRIX = [
    Row("3.11", "pandas==2.2.*"),
    Row("3.11", "pandas>=3,<4"),
    Row("3.12", "pandas>=3,<4"),
    Row("3.13", "pandas>=3,<4"),
    Row("3.11", LOWEST),
    Row("3.12", "torch==2.15.*", "[record]", ("strategies",)),
]


def find_python(version: str) -> str | None:
    """Find an interpreter of exactly this version on PATH or under a pyenv root."""
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        probe = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


def lowest() -> list[str]:
    """List ringprof's requirements, each pinned to the lowest version that it allows."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return [line.replace(">=", "==") for line in config["options"]["install_requires"].split()]


def test_one(python: str, row: Row) -> bool:
    """Run a row's tests with ``python``, in a fresh environment; return whether they pass."""
    folder = ROOT / ".venv-matrix" / re.sub("[^0-9a-z.]+", "-", f"{row.python}-{row.packages}")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    packages = lowest() if row.packages == LOWEST else [row.packages]
    tools = ["hypothesis", "jsonschema", "pytest", "pytest-timeout"]
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *tools, *packages, f"{ROOT}{row.extras}"], check=True, capture_output=True)
    # Old packages call functions that newer ones have deprecated.
    quiet = ["-W", "ignore::DeprecationWarning"] if row.packages == LOWEST else []
    command = [own, "-m", "pytest", "-q", "-m", "not long", *quiet, *(f"tests/{name}" for name in row.tests)]
    passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    if passed:
        shutil.rmtree(folder)
    return passed


def main() -> int:
    failed, absent = [], []
    for row in MATRIX:
        python = find_python(row.python)
        if python is None:
            absent.append(row.python)
            continue
        print(f"== Python {row.python}, {row.packages}", flush=True)
        if not test_one(python, row):
            failed.append(f"{row.python} with {row.packages}")
    print("== every Python that is here passed" if not failed else f"== failed: {', '.join(failed)}")
    if absent:
        print(f"== NOT TESTED, not installed here: {', '.join(dict.fromkeys(absent))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
