"""Command ``python -m tests.fuzz TARGET``: fuzz one reader, guided by branch coverage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ringprof"]):
    from tests.fuzz.targets import TARGETS, one_input

HERE = Path(__file__).parent
SLOWEST_S, MOST_MB, LONGEST = 10, 1024, 1 << 16
"""Limits per input: run time, size of one memory allocation, and number of bytes."""
OWN_MB = 6 * MOST_MB
"""Memory limit of the process: the fuzzer keeps half a KB per input, and has millions of inputs in ten minutes."""


def main() -> None:
    """Fuzz until the time is over, or until a finding ends the process with an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--corpus", type=Path, help="where new inputs are kept  [default: tests/fuzz/found/TARGET]")
    parser.add_argument("--merge", action="store_true", help="add to the committed corpus what it lacks of the other")
    options = parser.parse_args()
    committed = HERE / "corpus" / options.target
    corpus = options.corpus or HERE / "found" / options.target
    for folder in (committed, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    limits = [f"-timeout={SLOWEST_S}", f"-malloc_limit_mb={MOST_MB}", f"-rss_limit_mb={OWN_MB}"]
    limits += [f"-max_len={LONGEST}", f"-artifact_prefix={corpus}-"]
    dictionary = HERE / f"{options.target}.dict"
    if dictionary.exists():
        limits.append(f"-dict={dictionary}")
    work = ["-merge=1", str(committed), str(corpus)] if options.merge else [str(corpus), str(committed)]
    if not options.merge:
        limits.append(f"-max_total_time={round(60 * options.minutes)}")
    atheris.Setup([sys.argv[0], *limits, *work], lambda data: one_input(options.target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
