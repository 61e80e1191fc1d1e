"""How long ``ringprof report`` takes as a whole process, beside HolisticTraceAnalysis that loads and finds the overlap.

    python benchmarks/beside_hta.py [--repeats 5] [--copies 1 2 4 153]

The traces repeat a recorded rank: 1, 2 and 4 copies are small traces of 1 to 4 MB, 153 are 136 MB. The two take turns;
each line has the medians and their ratio. HTA runs in the environment that scripts/install_hta.py makes.
"""

from __future__ import annotations

import argparse
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


def seconds(command: list[str]) -> float:
    """Wall time of one whole process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4, 153])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hta-python", default=str(ROOT / ".venv-hta" / "bin" / "python"))
    options = parser.parse_args()
    print(f"{'trace':>8}{'ringprof report':>18}{'HTA':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for copies in options.copies:
            path = Path(folder) / f"rank{copies}.json"
            build(path, SAMPLE, copies, shapes=False)
            ours = [sys.executable, "-m", "ringprof", "report", str(path)]
            theirs = [options.hta_python, "-c", HTA, str(path)]
            times = [(seconds(ours), seconds(theirs)) for _ in range(options.repeats)]
            mine, other = (statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"{path.stat().st_size / 1e6:>5.0f} MB{mine:>16.2f} s{other:>8.2f} s{other / mine:>7.1f}x", flush=True
            )


if __name__ == "__main__":
    main()
