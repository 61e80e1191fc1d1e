"""Fixtures of the recorder's tests: a recorded run, which costs some seconds, a user's strategies, and two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringprof.run import Run, read_run
from tests.recording.command import SMALL, STRATEGIES, run
from tests.recording.two_hosts import TwoHosts, two_hosts


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, str]:
    """Record burst on 4 CPU ranks, emulating two ranks per host; return the folder, the run and the printed text."""
    folder = tmp_path_factory.mktemp("recorded")
    done = run(
        ["record", "--strategy", "burst", *SMALL, "--kv-heads", "1", "--ranks-per-node", "2", "--iters", "2",
         "--controls", "-p", "optimized_backward=true"],
        folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, read_run(folder / "traces/run.json"), done.stderr + done.stdout


@pytest.fixture
def strategy_folder(tmp_path: Path) -> Path:
    """Return a folder with a user's strategies in ``mine.py``."""
    (tmp_path / "mine.py").write_text(STRATEGIES)
    return tmp_path


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Yield two network namespaces; skip where they are not permitted."""
    with two_hosts() as namespaces:
        yield namespaces
