"""An untrusted current folder runs no code: no process imports from it, nor uses its configuration files.

The folder contains a module for every name of Python and the installed packages; each leaves a mark when imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.recording.command import HANGS_S, SMALL, environment
from tests.scale.runs import write_ring
from tests.tiers import tiered


@cache
def installed() -> set[str]:
    """Names of the modules that the installed packages bring."""
    return set(packages_distributions())


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write scripts that behave as the installed commands ``ringprof`` and ``torchrun``."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ringprof").write_text("from ringprof.cli import main\nmain()\n")
    (folder / "torchrun").write_text("from torch.distributed.run import main\nmain()\n")
    return folder


def plant(folder: Path, names: set[str]) -> None:
    """Write modules that must not be imported."""
    for name in names - {"ringprof"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(f"print({name!r}, file=open({str(folder / 'MARK')!r}, 'a'))\n")


def finished(program: Path, arguments: list[str], folder: Path) -> str:
    """Run a command in a folder, and return its output; it must succeed without importing a planted module."""
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert not (folder / "MARK").exists(), (folder / "MARK").read_text()
    return done.stdout + done.stderr


@pytest.mark.processes
def test_report_workers_import_nothing_from_the_current_folder(scripts: Path, tmp_path: Path) -> None:
    plant(tmp_path, installed() | sys.stdlib_module_names)
    write_ring(tmp_path, 72, per_host=8)
    printed = finished(scripts / "ringprof", ["report", ".", "--jobs", "2"], tmp_path)
    assert printed.startswith("72 ranks")


RECORD = ["record", *SMALL, "--seq", "128", "--world", "2", "--iters", "1"]


@pytest.mark.processes
def test_local_ranks_import_nothing_from_the_current_folder(scripts: Path, tmp_path: Path) -> None:
    plant(tmp_path, installed() | sys.stdlib_module_names)
    finished(scripts / "ringprof", [*RECORD, "--strategy", "ring"], tmp_path)


@pytest.mark.processes
def test_torchrun_ranks_import_nothing_from_the_current_folder(scripts: Path, tmp_path: Path) -> None:
    """Plant no standard modules: torchrun starts ``python -m ringprof``, before which Python imports its own."""
    plant(tmp_path, installed())
    launch = ["--standalone", "--nproc-per-node", "2", "-m", "ringprof"]
    finished(scripts / "torchrun", [*launch, *RECORD, "--strategy", "ring"], tmp_path)


@pytest.mark.processes
def test_named_strategy_is_imported_from_the_current_folder(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from ringprof.strategies.algorithms.ring import Ring\n\n\nclass Mine(Ring):\n    pass\n"
    )
    assert "mine:Mine" in finished(scripts / "ringprof", [*RECORD, "--strategy", "mine:Mine"], tmp_path)


SETTINGS = {
    "untrusted": b"axes.facecolor: red\ntext.usetex: True\n",
    "terminal": b"\x1b]0;owned\x07: 1\n", "bytes": b"\xff\n",
}  # fmt: skip


@tiered("name", SETTINGS, ["untrusted"], "processes")
def test_plot_ignores_matplotlibrc_of_the_current_folder(
    name: str, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    plots = set()
    for folder in (tmp_path / "plain", tmp_path / name):
        folder.mkdir()
        shutil.copy(ROOT / "tests/data/h200x8-zigzag-131072/rank0.json.gz", folder)
        if folder.name == name:
            (folder / "matplotlibrc").write_bytes(SETTINGS[name])
        printed = finished(scripts / "ringprof", ["plot", "breakdown", "rank0.json.gz", "-o", "plot.png"], folder)
        assert printed == "Wrote plot.png\n"
        plots.add((folder / "plot.png").read_bytes())
    assert len(plots) == 1


@pytest.mark.parametrize("start", [["-m", "ringprof"], ["-P", "-m", "ringprof"]])
def test_python_m_ringprof_imports_nothing_from_the_current_folder(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('untrusted')")
    done = subprocess.run(
        [sys.executable, *start, "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "ringprof" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == ["click.py"]
