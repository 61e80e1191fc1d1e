"""Inputs found by fuzzing are read again in every test run; the long tier fuzzes further."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, one_input

CORPUS = Path(__file__).parent / "corpus"
MINUTES = float(os.environ.get("RINGPROF_FUZZ_MINUTES", "10"))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_corpus_inputs_are_handled_in_bounded_time(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        begin = time.process_time()
        one_input(target, path.read_bytes())
        assert time.process_time() - begin < 10, path


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 300_000


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 120)
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this Python or system")
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_fuzzing_finds_no_crash(target: str, tmp_path: Path) -> None:
    """Fuzz each target for ten minutes, or for RINGPROF_FUZZ_MINUTES."""
    command = [sys.executable, "-m", "tests.fuzz", target, "--minutes", str(MINUTES), "--corpus", str(tmp_path / "new")]
    done = subprocess.run(command, cwd=CORPUS.parents[2], capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr
