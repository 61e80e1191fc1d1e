"""Build the reference of the Python API from its docstrings: ``python scripts/build_docs.py [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc

import ringprof

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "ringprof",
    "ringprof.api",
    "ringprof.comparison",
    "ringprof.kernel_tables.table_analysis",
    "ringprof.training",
    "ringprof.frames",
    "ringprof.run",
    "ringprof.errors",
    "ringprof.analysis.steps.steps",
    "ringprof.analysis.findings.waterfall",
    "ringprof.analysis.findings.conditions",
    "ringprof.report.plots",
    "ringprof.trace.reduced",
    "ringprof.strategies",
    "ringprof.strategies.base",
    "ringprof.strategies.registry",
    "ringprof.record.capture",
    "ringprof.record.check.result",
)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    # The package loads its public names lazily; pdoc needs them in the module.
    vars(ringprof).update({name: getattr(ringprof, name) for name in ringprof.__all__})
    pdoc.pdoc(*MODULES, output_directory=folder)
    print(f"open {folder}/index.html")


if __name__ == "__main__":
    main()
