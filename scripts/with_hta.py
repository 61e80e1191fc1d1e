"""Compare ringprof with HolisticTraceAnalysis, in an environment of its own: it needs a pandas below 3.

    python scripts/with_hta.py               the comparisons of tests/analysis/test_hta.py
    python scripts/with_hta.py benchmark     and how long both take (benchmarks/beside_hta.py)

The environment stays in .venv-matrix/hta/ for the next time; a changed setup.cfg makes it anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-matrix" / "hta"
PACKAGES = ["HolisticTraceAnalysis>=0.5", "pandas>=2.2,<3", "hypothesis", "jsonschema", "pytest", "pytest-timeout"]


def environment() -> str:
    """The environment's interpreter."""
    own, made = FOLDER / "bin" / "python", FOLDER / "made"
    if not made.exists() or made.stat().st_mtime < (ROOT / "setup.cfg").stat().st_mtime:
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        pip = [str(own), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES, str(ROOT)], check=True)
        made.touch()
    return str(own)


def main() -> int:
    own, chosen = environment(), sys.argv[1:]
    if chosen == ["benchmark"]:
        return subprocess.run([own, "benchmarks/beside_hta.py"], cwd=ROOT, check=False).returncode
    # Skipped tests would be no comparison: the reasons are shown, and none may be for want of the package.
    tests = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/analysis/test_hta.py", *chosen]
    done = subprocess.run(tests, cwd=ROOT, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="", end="")
    if "is not here" in done.stdout:
        print("HolisticTraceAnalysis cannot be imported in its own environment", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
