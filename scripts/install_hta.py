"""Install HolisticTraceAnalysis into an environment of its own, .venv-hta/: it needs a pandas below 3.

``tests/analysis/test_hta.py`` compares its results with ringprof's. If it cannot be installed (without a package index,
or on an unsupported Python), a message says so and the comparisons are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-hta"
PACKAGES = ["HolisticTraceAnalysis>=0.5", "pandas>=2.2,<3"]


def main() -> int:
    print("installing HolisticTraceAnalysis into an environment of its own, to compare with", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*pip, *PACKAGES, "--editable", str(ROOT)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        print(f"it cannot be installed here, so the comparisons with it are skipped: {lines[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
