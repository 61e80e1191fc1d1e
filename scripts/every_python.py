"""Test the analysis side on every Python from 3.10 to 3.13 that is installed, with pandas 2.2 and 3, without torch.

One more row has the lowest version of each package that setup.cfg allows.

Each row gets a temporary environment in .venv-matrix/. Missing Pythons are listed, not silently skipped.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOWEST = "the lowest versions"
# pandas 3 needs Python 3.11.
MATRIX = [
    ("3.10", "pandas==2.2.*"),
    ("3.11", "pandas==2.2.*"),
    ("3.11", "pandas>=3,<4"),
    ("3.12", "pandas>=3,<4"),
    ("3.13", "pandas>=3,<4"),
    ("3.11", LOWEST),
]
TESTS = ["trace", "analysis", "report", "cli", "scale", "fuzz", "test_trust.py"]


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


def test_one(python: str, version: str, packages: str) -> bool:
    folder = ROOT / ".venv-matrix" / re.sub("[^0-9a-z.]+", "-", f"{version}-{packages}")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    chosen = lowest() if packages == LOWEST else [packages]
    tools = ["hypothesis", "jsonschema", "pytest", "pytest-timeout"]
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *tools, *chosen, str(ROOT)], check=True, capture_output=True)
    # Old packages call functions that newer ones have deprecated.
    quiet = ["-W", "ignore::DeprecationWarning"] if packages == LOWEST else []
    command = [own, "-m", "pytest", "-q", "-m", "not long", *quiet, *(f"tests/{name}" for name in TESTS)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    failed, absent = [], []
    for version, packages in MATRIX:
        python = find_python(version)
        if python is None:
            absent.append(version)
            continue
        print(f"== Python {version}, {packages}", flush=True)
        if not test_one(python, version, packages):
            failed.append(f"{version} with {packages}")
    print("== every Python that is here passed" if not failed else f"== failed: {', '.join(failed)}")
    if absent:
        print(f"== NOT TESTED, not installed here: {', '.join(dict.fromkeys(absent))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
