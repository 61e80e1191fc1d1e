"""Measure the run time of commands as whole processes: ``ringprof --help`` and ``ringprof report`` of an 8-rank run.

    python dev/benchmarks/report_command.py [--repeat 11] [FOLDER]

Prints the median, minimum and maximum of the repeats and the limit, and exits with 1 if a median exceeds its limit. The
limits are for a machine with 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "tests" / "data" / "h200x8-zigzag-131072"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=str(EXAMPLE), help="a run with 8 ranks")
    parser.add_argument("--repeat", type=int, default=11)
    options = parser.parse_args()
    commands = (
        (["--help"], 0.25),
        (["report", options.folder], 1.5),
        (["report", options.folder, "--format", "json"], 1.5),
    )
    print(f"{'command':<24}  {'median':>8}  {'least':>8}  {'most':>8}  {'limit':>7}")
    missed = False
    for arguments, limit_s in commands:
        times = [seconds(arguments) for _ in range(options.repeat)]
        median = statistics.median(times)
        missed |= median > limit_s
        label = " ".join(part for part in arguments if part != options.folder)
        print(f"{label:<24}  {median:6.3f} s  {min(times):6.3f} s  {max(times):6.3f} s  {limit_s:5.2f} s")
    return int(missed)


def seconds(arguments: list[str]) -> float:
    """Run a command and return its wall time in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ringprof", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
