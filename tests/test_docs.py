"""What the README promises: its example is what the command prints, and every command is documented."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ringprof
import ringprof.api
import ringprof.frames
import ringprof.side_by_side
import ringprof.strategies
from ringprof import cli
from ringprof.cli import commands
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_report_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(ROOT / "traces" / "h200x4-zigzag-262144"), "--width", "80"]) == 0
    indented = "\n".join(f"    {line}" if line else "" for line in capsys.readouterr().out.rstrip().split("\n"))
    assert indented in README


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"ringprof {name}" in README


def _commands(page: str) -> list[str]:
    """Indented lines of a page that read what comes with the repository, or list what there is."""
    lines = [
        line.strip() for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if line[:4] == "    "
    ]
    reads = ("report", "compare", "export", "plot", "logs", "strategies", "balance", "kernels")
    return [line for line in lines if line.split()[0] == "ringprof" and line.split()[1] in reads]


@pytest.mark.parametrize("command", [*_commands("guides.md"), *_commands("logs.md"), *_commands("workloads.md")])
def test_the_guides_commands_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(command)
    written = [str(tmp_path / word) if word.startswith("out.") else word for word in arguments]
    assert cli.run(written) == 0, capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == sum(word.startswith("out.") for word in arguments)


def test_every_public_name_says_what_it_does() -> None:
    for module in (ringprof, ringprof.api, ringprof.side_by_side, ringprof.frames, ringprof.strategies):
        for name, thing in vars(module).items():
            mine = getattr(thing, "__module__", "").startswith("ringprof")
            if not name.startswith("_") and mine and (inspect.isfunction(thing) or inspect.isclass(thing)):
                assert inspect.getdoc(thing), f"{module.__name__}.{name}"


@pytest.mark.long
def test_the_reference_is_built_from_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    first = (tmp_path / "ringprof.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in first for name in ringprof.__all__) and "traces/run.json" in first
    for module, names in (("api", ("Analysis", "waterfall", "between")), ("side_by_side", ("compare", "SideBySide"))):
        page = (tmp_path / "ringprof" / f"{module}.html").read_text(encoding="utf-8")
        assert all(name in page for name in names)
    assert (tmp_path / "ringprof" / "strategies" / "registry.html").is_file()


def test_every_file_that_the_docs_link_to_exists() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "traces" / "README.md"]:
        for part in page.read_text(encoding="utf-8").split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
