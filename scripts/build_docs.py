"""Build the reference of the Python API from its docstrings: ``python scripts/build_docs.py [FOLDER]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "ringprof.api",
    "ringprof.side_by_side",
    "ringprof.kernel_tables.table_analysis",
    "ringprof.capturing",
    "ringprof.frames",
    "ringprof.run",
    "ringprof.errors",
    "ringprof.analysis.steps.steps",
    "ringprof.analysis.findings.waterfall",
    "ringprof.analysis.findings.figures",
    "ringprof.report.plots",
    "ringprof.trace.reduced",
    "ringprof.strategies",
    "ringprof.strategies.base",
    "ringprof.strategies.registry",
    "ringprof.record.capture",
)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build" / "docs")
    subprocess.run([sys.executable, "-m", "pdoc", *MODULES, "-o", folder], check=True, cwd=ROOT)
    print(f"open {folder}/index.html")


if __name__ == "__main__":
    main()
