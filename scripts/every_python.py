"""Test the analysis side on every Python from 3.10 to 3.13 that is installed, with pandas 2.2 and 3, without torch.

Each gets a throw-away environment in .venv-matrix/. Pythons that are not here are named, not skipped in silence.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# pandas 3 needs Python 3.11.
MATRIX = [
    ("3.10", "pandas==2.2.*"),
    ("3.11", "pandas==2.2.*"),
    ("3.11", "pandas>=3,<4"),
    ("3.12", "pandas>=3,<4"),
    ("3.13", "pandas>=3,<4"),
]
TESTS = ["trace", "analysis", "report", "cli", "scale", "fuzz", "test_trust.py"]


def find_python(version: str) -> str | None:
    """An interpreter of exactly this version: on PATH, or under a pyenv root."""
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        probe = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        found = subprocess.run(probe, capture_output=True, text=True, check=False)
        if found.stdout.strip() == version:
            return candidate
    return None


def test_one(python: str, version: str, pandas: str) -> bool:
    folder = ROOT / ".venv-matrix" / f"{version}-{pandas[8]}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    packages = ["hypothesis", "jsonschema", "pytest", "pytest-timeout", pandas]
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *packages, str(ROOT)], check=True, capture_output=True)
    command = [own, "-m", "pytest", "-q", "-m", "not long", *(f"tests/{name}" for name in TESTS)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    failed = []
    for version, pandas in MATRIX:
        python = find_python(version)
        if python is None:
            print(f"== Python {version}: not installed here, not tested", flush=True)
            continue
        print(f"== Python {version}, {pandas}", flush=True)
        if not test_one(python, version, pandas):
            failed.append(f"{version} with {pandas}")
    print("== every Python passed" if not failed else f"== failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
