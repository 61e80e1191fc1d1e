"""Checks of the README: its example is the output of the command, and every command is documented."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import ringprof
import ringprof.api
import ringprof.comparison
import ringprof.frames
import ringprof.strategies
from ringprof import cli
from ringprof.cli import commands
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_report_equals_the_command_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(ROOT / "traces" / "h200x4-zigzag-262144"), "--width", "80"]) == 0
    indented = "\n".join(f"    {line}" if line else "" for line in capsys.readouterr().out.rstrip().split("\n"))
    assert indented in README


NINE = re.findall(
    r"^\| ([a-z-]+)[^|]*\| (\d+) \| (\d+) \| ([\d.]+) % \(([\d.]+) %\) \| (\d+) \|$", README, re.MULTILINE
)


@cache
def recorded(strategy: str) -> ringprof.Analysis:
    return ringprof.load(ROOT / "traces" / f"h200x4-{strategy}-262144")


def test_strategy_table_equals_the_committed_runs() -> None:
    shown = {}
    for name, *_ in NINE:
        figures, summary = recorded(name).figures(), recorded(name).summary
        rates, memory = (figures["tflops"], figures["block_tflops"]), figures["peak_memory_bytes"] / 2**20
        shares = (f"{100 * share:.1f}" for share in (summary.exposed_mean, summary.exposed_worst))
        shown[name] = (*(f"{rate:.0f}" for rate in rates), *shares, f"{memory:.0f}")
    assert shown == {name: tuple(row) for name, *row in NINE} and len(shown) == 9


def test_first_five_strategies_of_the_table_do_not_differ() -> None:
    """Check the README's statement below its table for every pair."""
    for base, other in combinations([name for name, *_ in NINE[:5]], 2):
        comparison = ringprof.compare(recorded(base), recorded(other))
        (time,) = (difference for difference in comparison.differences if difference.figure == "iteration_ms")
        assert time.verdict == "noise", (base, other)
        assert time.assumed_spread is not None and 0.0095 < time.assumed_spread.share < 0.0105
    assert "recordings of one program differ by about 1 %" in README and "first five noise" in README


def test_readme_hop_example_equals_the_committed_run() -> None:
    hops = recorded("zigzag").hops()
    hop = hops[(hops["rank"] == 0) & (hops["hop"] == 1)].iloc[0]
    wait, wire = hop.wait_ns / 1e6, hop.wire_ns / 1e6
    assert f"why does this send/recv take {wait + wire:.1f} ms?" in README
    assert f"{wait:.1f} ms waiting for a peer, {wire:.1f} ms on the wire at {hop.wire_gbps:.0f} GB/s; " in README


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"ringprof {name}" in README


def _commands(page: str) -> list[str]:
    """List the indented commands of a page that read committed files, or list strategies and kernels."""
    lines = [
        line.strip() for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if line[:4] == "    "
    ]
    reads = ("report", "compare", "export", "plot", "logs", "strategies", "balance", "kernels")
    return [line for line in lines if line.split()[0] == "ringprof" and line.split()[1] in reads]


@pytest.mark.parametrize("command", [*_commands("guides.md"), *_commands("logs.md"), *_commands("workloads.md")])
def test_commands_of_the_guide_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(command)
    written = [str(tmp_path / word) if word.startswith("out.") else word for word in arguments]
    assert cli.run(written) == 0, capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == sum(word.startswith("out.") for word in arguments)


def test_every_public_name_has_a_docstring() -> None:
    for module in (ringprof, ringprof.api, ringprof.comparison, ringprof.frames, ringprof.strategies):
        for name, thing in vars(module).items():
            mine = getattr(thing, "__module__", "").startswith("ringprof")
            if not name.startswith("_") and mine and (inspect.isfunction(thing) or inspect.isclass(thing)):
                assert inspect.getdoc(thing), f"{module.__name__}.{name}"


@pytest.mark.long
def test_reference_pages_are_built_from_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    first = (tmp_path / "ringprof.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in first for name in ringprof.__all__) and "traces/run.json" in first
    for module, names in (
        ("api", ("Analysis", "waterfall", "between")),
        ("comparison", ("compare", "RunComparison")),
    ):
        page = (tmp_path / "ringprof" / f"{module}.html").read_text(encoding="utf-8")
        assert all(name in page for name in names)
    assert (tmp_path / "ringprof" / "strategies" / "registry.html").is_file()


def test_every_file_that_the_docs_link_to_exists() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "traces" / "README.md"]:
        for part in page.read_text(encoding="utf-8").split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_section_that_the_docs_link_to_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    anchors = {
        page: {slug(title) for title in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)}
        for page in pages
    }
    links = [
        (page, (page.parent / target).resolve() if target else page, anchor)
        for page in pages
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", page.read_text("utf-8"))
    ]
    assert len(links) > 40
    assert [(page.name, target.name, anchor) for page, target, anchor in links if anchor not in anchors[target]] == []
