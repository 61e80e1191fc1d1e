"""Settings of all tests."""

import gc
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_ALL_START_PROCESSES = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.processes\b", re.MULTILINE)

# On a busy machine, examples may be slow.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell's background jobs ignore Ctrl-C, and processes started by tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Variables of the user's shell that would change results: proxies, the terminal's size and colours, torch's log level,
# Matplotlib's backend, and the checkout of a git hook.
_OF_A_SHELL = """http_proxy https_proxy all_proxy COLUMNS LINES FORCE_COLOR NO_COLOR CLICOLOR CLICOLOR_FORCE MPLBACKEND
TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL TORCH_LOGS GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE"""
for name in _OF_A_SHELL.split():
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)

# On a busy machine every command may take long enough to say how far it is.
os.environ["RINGPROF_PROGRESS_S"] = "3600"

# Tensors here are small: more threads of torch only waste processor time.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need CUDA devices, and these alone")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs without --gpu: ranks are forked, which is impossible from a process that has initialised CUDA."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests all start processes, where those are deselected: some import large packages."""
    if "not processes" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return True if _ALL_START_PROCESSES.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and collected tests, which live to the end, out of garbage collections, and collect less often.

    Collections after every 700 objects took a seventh of the processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("gpu")])
        items[:] = [item for item in items if item.get_closest_marker("gpu")]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: gzip writes the time into them, and test workers must agree on names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None
