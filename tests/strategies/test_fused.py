"""The Triton kernels of `fused` compute in Triton's interpreter what their plain forms do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT


def test_fused_kernels_are_right_in_the_interpreter_of_triton() -> None:
    pytest.importorskip("triton", reason="there is no triton for this Python")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/strategies/fused_checks.py"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
