"""Compare the run time of ``ringprof report`` with HolisticTraceAnalysis, which loads the trace and finds the overlap.

    python dev/benchmarks/beside_hta.py [--repeats 5] [--copies 1 2 4 153]

Both are timed as whole processes. The traces repeat a recorded rank: 1, 2 and 4 copies are small traces of 1 to 4 MB,
153 are 136 MB. The runs are interleaved. Each line has the medians and their ratio: of wall time, and of CPU time,
which depends far less on the load of the machine. HTA runs in the environment that scripts/install_hta.py creates. Both
start from compiled modules, as after an installation with pip.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from trace_reader import ROOT, SAMPLE, build

HTA = """
import logging, os, sys, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
analysis.get_comm_comp_overlap(visualize=False)
"""


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command and return its wall time and CPU time in seconds, including its child processes."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    wall, after = time.perf_counter() - started, os.times()
    return wall, (after.children_user + after.children_system) - (before.children_user + before.children_system)


def row(times: list[tuple[float, float]]) -> str:
    """Format the median times of ringprof and HTA, and their ratio."""
    ringprof, hta = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{ringprof:>16.2f} s{hta:>8.2f} s{hta / ringprof:>7.1f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4, 153])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hta-python", default=str(ROOT / ".venv-hta" / "bin" / "python"))
    options = parser.parse_args()
    compileall.compile_dir(ROOT / "ringprof", quiet=2)
    print(f"{'trace':>8}{'ringprof report':>18}{'HTA':>10}{'ratio':>8}{'CPU: ringprof':>18}{'HTA':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for copies in options.copies:
            path = Path(folder) / f"rank{copies}.json"
            build(path, SAMPLE, copies, shapes=False)
            report = [sys.executable, "-m", "ringprof", "report", str(path)]
            hta = [options.hta_python, "-c", HTA, str(path)]
            pairs = [(seconds(report), seconds(hta)) for _ in range(options.repeats)]
            wall, cpu = ([(ours[kind], theirs[kind]) for ours, theirs in pairs] for kind in (0, 1))
            print(f"{path.stat().st_size / 1e6:>5.0f} MB{row(wall)}{row(cpu)}", flush=True)


if __name__ == "__main__":
    main()
