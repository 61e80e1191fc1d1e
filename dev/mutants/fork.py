"""Copy the checkout, and run pytest in a fork that works in a copy."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import coverage
import pytest
from sample import ROOT

MEMORY = 6 << 30


def preload() -> None:
    """Import slow modules once, so that no fork has to."""
    for name in ("bokeh.plotting", "jinja2", "jsonschema", "matplotlib.figure", "pandas", "torch"):
        with suppress(ImportError):
            import_module(name)


def copy_checkout(target: Path) -> None:
    """Copy the files that git lists, including changes that are not committed."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children; unlike wall time, other load adds nothing."""
    return sum(os.times()[:4])


class Watch:
    """Pytest plugin that tells coverage which test runs, and keeps each test's CPU time and the failed tests."""

    def __init__(self, cover: coverage.Coverage | None = None) -> None:
        self.cover = cover
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if self.cover:
            self.cover.switch_context(item.nodeid)
        begin = _cpu_seconds()
        result = yield
        self.seconds[item.nodeid] = _cpu_seconds() - begin
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_pytest(tree: Path, arguments: list[str], watch: Watch) -> int:
    """Run pytest on the code and tests of ``tree``, without output. Call it in a fork: it changes this process."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    quiet = os.open(tree / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    options = ["-q", "-m", "not long", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--rootdir", str(tree)]
    return int(pytest.main([*options, *arguments], plugins=[watch]))


def in_fork(function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> bool:
    """Run ``function`` in a fork with its own process group; return whether it ended within the limit.

    All processes of the group are killed at the end.
    """

    def run() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(limit_s)
    in_time = process.exitcode is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return in_time
