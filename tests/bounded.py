"""Commands in a process of their own that may take so much memory, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

LIMIT = 256 << 20
"""What ringprof is told that it may take; its default is four times as much."""
OF_PYTHON = 700 << 20
"""Addresses that Python, numpy and pandas take for themselves."""

_PROGRAM = """
import contextlib, io, json, resource, sys
from ringprof.cli import run
import ringprof.api, ringprof.report.terminal
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (most, most))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
run(json.loads(sys.argv[2]))
before = peak()
for line in sys.stdin:
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        code = run(json.loads(line))
    print(json.dumps([code, told.getvalue(), peak() - before]), flush=True)
"""


@dataclass(frozen=True)
class Told:
    """How one command ended."""

    code: int
    errors: str
    grown_bytes: int
    """How much more memory the process has had by then than a small report takes."""


def commands(given: Sequence[Sequence[str]], sound: Path, limit: int = LIMIT) -> list[Told]:
    """Carry out command lines one after another in one process; ``sound``: a small trace, to begin with."""
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(limit + OF_PYTHON), json.dumps(["report", str(sound), "-o", os.devnull])],
        input="".join(json.dumps(one) + "\n" for one in given),
        capture_output=True, text=True, env=surroundings, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [Told(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
