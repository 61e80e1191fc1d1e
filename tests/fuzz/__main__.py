"""``python -m tests.fuzz TARGET``: fuzz one reader, guided by the branches that inputs reach."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ringprof"]):
    from tests.fuzz.targets import TARGETS, one_input

HERE = Path(__file__).parent
SLOWEST_S, MOST_MB, LONGEST = 10, 1024, 1 << 16
"""Of one input: how long it may take, what memory at once, and how many bytes it has at most."""
OWN_MB = 6 * MOST_MB
"""Of the process: the fuzzer keeps half a KB of every input, and has millions in ten minutes."""


def main() -> None:
    """Fuzz until the time is over or something is found, which ends the process with an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--corpus", type=Path, help="where new inputs are kept  [default: tests/fuzz/found/TARGET]")
    parser.add_argument("--merge", action="store_true", help="add to the committed corpus what it lacks of the other")
    options = parser.parse_args()
    committed = HERE / "corpus" / options.target
    found = options.corpus or HERE / "found" / options.target
    for folder in (committed, found):
        folder.mkdir(parents=True, exist_ok=True)
    limits = [f"-timeout={SLOWEST_S}", f"-malloc_limit_mb={MOST_MB}", f"-rss_limit_mb={OWN_MB}"]
    limits += [f"-max_len={LONGEST}", f"-artifact_prefix={found}-"]
    dictionary = HERE / f"{options.target}.dict"
    if dictionary.exists():
        limits.append(f"-dict={dictionary}")
    work = ["-merge=1", str(committed), str(found)] if options.merge else [str(found), str(committed)]
    if not options.merge:
        limits.append(f"-max_total_time={round(60 * options.minutes)}")
    atheris.Setup([sys.argv[0], *limits, *work], lambda data: one_input(options.target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
