"""Checks of README and docs: examples are the output of commands, figures those of committed runs, links resolve."""

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

import click
import pytest

import ringprof
import ringprof.results.analysis
import ringprof.results.comparison
import ringprof.results.frames
import ringprof.strategies
from ringprof import cli
from ringprof.cli import commands
from ringprof.strategies.kernels.registry import KERNELS
from tests.paths import ROOT
from tests.tiers import tiered

README = (ROOT / "README.md").read_text(encoding="utf-8")
STRATEGIES = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_is_one_page() -> None:
    assert len(README.split()) <= 1000


def test_example_report_equals_the_command_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the example of the README, which leaves lines out at ``...``, with the whole output."""
    assert cli.run(["report", str(ROOT / "traces" / "h200x4-zigzag-262144"), "--width", "80"]) == 0
    output = "\n".join(f"    {line}" if line else "" for line in capsys.readouterr().out.rstrip().split("\n"))
    example = README.partition("## A report\n")[2].partition("\n\n    ")[2].partition("\n\n[Reading a report]")[0]
    parts = f"    {example}".split("\n    ...\n")
    assert len(example.splitlines()) >= 20 and len(parts) == 2
    assert all(part in output for part in parts) and output.startswith(parts[0]), "python scripts/draw_example.py"


NINE = re.findall(
    r"^\| ([a-z-]+)[^|]*\| (\d+) \| (\d+) \| ([\d.]+) % \(([\d.]+) %\) \| (\d+) \|$", STRATEGIES, re.MULTILINE
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
    """Check the statement below the table for every pair."""
    for base, other in combinations([name for name, *_ in NINE[:5]], 2):
        comparison = ringprof.compare(recorded(base), recorded(other))
        (time,) = (difference for difference in comparison.differences if difference.figure == "iteration_ms")
        assert time.verdict == "noise", (base, other)
        assert time.assumed_spread is not None and 0.0095 < time.assumed_spread.share < 0.0105
    text = " ".join(STRATEGIES.split())
    assert "recordings of one program differ by about 1 %" in text
    assert "calls the differences among the first five noise" in text


def test_readme_hop_example_equals_the_committed_run() -> None:
    hops = recorded("zigzag").hops()
    hop = hops[(hops["rank"] == 0) & (hops["hop"] == 1)].iloc[0]
    wait, wire = hop.wait_ns / 1e6, hop.wire_ns / 1e6
    text = " ".join(README.split())
    assert f"hop 1 of rank 0 takes {wait + wire:.1f} ms: {wait:.1f} ms waiting for a peer" in text
    assert f"and {wire:.1f} ms on the wire at {hop.wire_gbps:.0f} GB/s" in text


def test_readme_headline_equals_the_committed_run() -> None:
    assert f"[{ringprof.load(ROOT / 'traces' / 'h200x2-burst-524288-fa3').figures()['tflops']:.0f} TFLOP/s" in README


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("h200x2-decode-1048576", "| {ms:.2f} ms | reads 16 GiB per GPU at {read:,.0f} GB/s, {of_memory:.1%} of"),
        ("h200x2-decode-1048576-window", "| {ms:.2f} ms | reads 1 GiB per GPU at {read:,.0f} GB/s"),
        ("h200x2-ring-prefill-262144", "| {ms:.1f} ms | {tflops:.0f} TFLOP/s per GPU, {tokens:,.0f} tokens/s; "),
        ("h200x2-zigzag-65536-prefix", "(window 4096, prefix 1024: {ms:.1f} ms, {tflops:.0f} TFLOP/s per GPU)"),
        ("h200x2-zigzag-65536-layer", ": {ms:.1f} ms, {tflops:.0f} TFLOP/s per GPU"),
    ],
)
def test_figures_of_workloads_equal_the_committed_runs(name: str, shown: str) -> None:
    run = ringprof.load(ROOT / "traces" / name)
    assert run.run is not None and run.run.timings is not None
    step, summary = run.report()["summary"]["inference"] or {}, run.summary
    figures = {
        "ms": (summary.rates.slowest_median_ns or 0) / 1e6,
        "tflops": summary.rates.tflops,
        "read": step.get("read_gbps") or 0,
        "of_memory": step.get("of_bandwidth") or 0,
        "tokens": step.get("tokens_per_second") or 0,
    }
    text = " ".join((ROOT / "docs" / "workloads.md").read_text(encoding="utf-8").split())
    after = text.partition(f"`traces/{name}`")[2][:150]
    assert shown.format(**figures).replace("%", " %") in after


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    table = README.partition("## Commands\n")[2].partition("\n## ")[0]
    assert f"`{name}`" in table


def code_lines(page: Path) -> list[str]:
    """List the lines of a page's code blocks, without comments; a line that ends in a backslash goes on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.strip().partition("  # ")[0].strip() for line in text.splitlines() if line[:4] == "    "]


def _commands(page: Path) -> list[str]:
    """List the commands of a page that read committed files, compare layouts, or list strategies and kernels."""
    reads = ("report", "compare", "export", "plot", "strategies", "kernels")
    commands = [
        line for line in code_lines(page)
        if line.startswith(tuple(f"ringprof {name}" for name in (*reads, "predict --replay")))
        or (line.startswith("ringprof advise") and "--machine" not in line)
    ]  # fmt: skip
    return [line for line in commands if all(_is_committed(word) for word in line.split() if "/" in word)]


def _is_committed(word: str) -> bool:
    """Return whether a path of a command is in the repository, and not a name that stands for the reader's own run."""
    mine = ("traces/main", "traces/branch", "traces/mine", "traces/profiler", "traces/ddp", "traces/run.json")
    return word.startswith(("traces/", "tests/")) and not word.startswith(mine)


COMMANDS = sorted({command for page in PAGES for command in _commands(page)})


@tiered(
    "command", COMMANDS, [line for line in COMMANDS if not {"--prove", "--cp-sizes"} & {*line.split()}], "processes"
)
def test_commands_of_the_docs_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(command)
    written = [str(tmp_path / word) if word.startswith("out.") else word for word in arguments]
    assert cli.run(written) == 0, capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == sum(word.startswith("out.") for word in arguments)


def test_many_commands_of_the_docs_are_run() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_in_the_docs_exist(page: Path) -> None:
    context = click.Context(commands.group)
    for line in code_lines(page):
        name, *words = line.partition("ringprof ")[2].split() or [""]
        if name in commands.COMMANDS:
            command = commands.group.get_command(context, name)
            assert command is not None
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_option_is_in_the_docs(name: str) -> None:
    """Each option is on some page of docs, in one of its spellings."""
    command = commands.group.get_command(click.Context(commands.group), name)
    assert command is not None
    text = "".join(page.read_text("utf-8") for page in PAGES if page.parent.name == "docs")
    missing = [
        option.opts for option in command.params if isinstance(option, click.Option)
        if not any(re.search(rf"(?<![\w-]){word}(?![\w-])", text) for word in (*option.opts, *option.secondary_opts))
    ]  # fmt: skip
    assert missing == []


def test_python_of_the_readme_compiles() -> None:
    blocks = re.findall(r"^```python\n(.+?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "README.md", "exec")


def test_kernel_table_equals_the_features_of_the_kernels() -> None:
    """The order counts, too: ``auto`` takes the first that fits."""
    yes = {True: "yes", False: "no"}
    rows = [
        f"| `{name}` | {kernel.types()} | {kernel.head_dims()} | {yes[kernel.tested]} | {yes[kernel.takes_windows]} "
        f"| {'in one call' if kernel.varlen else 'one call each'} | {yes[kernel.takes_softcap]} "
        f"| {yes[kernel.has_deterministic_mode]} |"
        for name, kernel in KERNELS.items()
    ]
    table = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").partition("| --- |")[2].partition("\n\n")[0]
    assert table.splitlines()[1:] == rows


def test_every_warning_of_a_report_is_in_the_docs() -> None:
    """Each code that the sources state must be on the page of its kind of input."""
    names = ("metrics", "logs", "without-a-profiler")
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in names)
    folders = [ROOT / "ringprof" / name for name in ("trace", "analysis", "scale", "printed")]
    sources = "".join(path.read_text("utf-8") for folder in folders for path in sorted(folder.rglob("*.py")))
    tables = "".join(re.findall(r"_ODDITIES = \{(.+?)\n\}", sources, re.DOTALL))
    codes = re.findall(r"Notice\(\s*\"([a-z_]+)\"", sources) + re.findall(r"^    \"([a-z_]+)\":", tables, re.MULTILINE)
    assert len(codes) > 50 and "negative_duration" in codes
    assert [code for code in codes if f"`{code}`" not in pages] == []


def test_every_public_name_has_a_docstring() -> None:
    for module in (
        ringprof,
        ringprof.results.analysis,
        ringprof.results.comparison,
        ringprof.results.frames,
        ringprof.strategies,
    ):
        for name, thing in vars(module).items():
            mine = getattr(thing, "__module__", "").startswith("ringprof")
            if not name.startswith("_") and mine and (inspect.isfunction(thing) or inspect.isclass(thing)):
                assert inspect.getdoc(thing), f"{module.__name__}.{name}"


@pytest.mark.processes
def test_site_is_built_without_warnings_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the dev extra is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site" / "docs"
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    reference = (site / "api.html").read_text(encoding="utf-8")
    public = set(ringprof.__all__) - {"__version__"}
    assert [name for name in public if f'id="ringprof.{name}"' not in reference] == []
    assert all(f'id="ringprof.{name}"' in reference for name in ("Analysis.waterfall", "errors.RingprofError"))
    assert 'id="ringprof.strategies.registry.create"' in reference
    loaded = [
        (page.name, address)
        for page in site.glob("*.html")
        for address in re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:)?//", page.read_text("utf-8"))
    ]
    assert loaded == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".rst")} - {"index.md"}
    assert [name for name in sorted(pages) if f"]({name})" not in index] == []


def test_every_file_that_the_docs_link_to_exists() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "traces" / "README.md"]:
        for part in page.read_text(encoding="utf-8").split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_named_in_contributing_exist() -> None:
    named = re.findall(r"`([\w./-]+/[\w.-]*)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 20
    for name in named:
        # NAME is a placeholder; dist/ is created by a build.
        path = ROOT / name if "NAME" not in name else (ROOT / name).parent
        assert path.exists() or name == "dist/", name


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_section_that_the_docs_link_to_exists() -> None:
    pages = PAGES
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
