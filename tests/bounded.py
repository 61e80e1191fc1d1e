"""Runs commands in a separate process with a memory limit."""

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
"""Memory limit passed to ringprof in bytes; its default is four times as much."""
OF_PYTHON = 700 << 20
"""Address space that Python, numpy and pandas need, in bytes."""

_PROGRAM = """
import contextlib, io, json, resource, sys
from ringprof.cli import run
import ringprof.results.analysis, ringprof.report.terminal
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (most, most))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
run(json.loads(sys.argv[2]))
before = peak()
for line in sys.stdin:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = run(json.loads(line))
    print(json.dumps([code, errors.getvalue(), peak() - before]), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """Exit code, error output and memory of one command."""

    code: int
    errors: str
    grown_bytes: int
    """Peak memory of the process after the command, minus that of a small report."""


def commands(command_lines: Sequence[Sequence[str]], sound: Path, limit: int = LIMIT) -> list[Outcome]:
    """Run command lines one after another in one process, after a report of the small trace ``sound``."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(limit + OF_PYTHON), json.dumps(["report", str(sound), "-o", os.devnull])],
        input="".join(json.dumps(arguments) + "\n" for arguments in command_lines),
        capture_output=True, text=True, env=variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
