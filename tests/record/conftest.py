"""Recorded runs that several tests look at: each costs some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringprof.run import Run, read_run
from tests.record.command import SMALL, STRATEGIES, run
from tests.record.two_hosts import TwoHosts, two_hosts


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, str]:
    """A burst run on 4 CPU ranks, two of them emulating a host: folder, run, and what was printed."""
    folder = tmp_path_factory.mktemp("recorded")
    done = run(
        ["record", "--strategy", "burst", *SMALL, "--kv-heads", "1", "--ranks-per-host", "2", "--iters", "2",
         "--controls", "-p", "optimized_backward=true"],
        folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, read_run(folder / "traces/run.json"), done.stderr + done.stdout


@pytest.fixture
def own_strategies(tmp_path: Path) -> Path:
    """A folder with strategies of a user's own in ``mine.py``."""
    (tmp_path / "mine.py").write_text(STRATEGIES)
    return tmp_path


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two network namespaces; skips where they are not permitted."""
    with two_hosts() as found:
        yield found
