"""SKILL.md, followed literally: its commands on CPU ranks, and what it says to read on committed runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringprof import cli
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.cli import commands
from tests.paths import ROOT, TRACES
from tests.report.schema_walk import SCHEMA, alternatives

SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```bash\n(.*?)^```", SKILL, re.MULTILINE | re.DOTALL)
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}


def shell(script: str, folder: Path) -> str:
    """Run a script with bash; return what it prints."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_the_commands_run_as_they_are_written(tmp_path: Path) -> None:
    assert len(BLOCKS) == 3
    printed = shell("\n".join(BLOCKS), tmp_path)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert (tmp_path / "base.json").exists() and "'part': " in printed
    # CPU ranks of a busy machine prove nothing; that the comparison is one of three recordings per side does not vary.
    assert [entry["recordings"] for entry in proof["entries"]] == [3, 3]
    assert proof["differing"]["strategy"] == ["ring", "zigzag"]


def python_line(name: str) -> str:
    """Return the line of the page that prints fields of the file ``name``."""
    (line,) = (line for block in BLOCKS for line in block.splitlines() if line.startswith("python") and name in line)
    return line


def test_the_page_leads_from_ring_to_zigzag_on_committed_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring, zigzag = (str(TRACES / f"h200x4-{name}-262144") for name in ("ring", "zigzag"))
    assert cli.run(["report", ring, "--format", "json"]) == 0
    (tmp_path / "base.json").write_text(capsys.readouterr().out)
    assert shell(python_line("base.json"), tmp_path).startswith("{'part': 'imbalance', ")
    row = next(line for line in SKILL.splitlines() if line.startswith("| `imbalance` |"))
    assert "`zigzag`" in row
    assert cli.run(["compare", ring, zigzag, "--format", "json"]) == 0
    (tmp_path / "proof.json").write_text(capsys.readouterr().out)
    printed = shell(python_line("proof.json"), tmp_path)
    assert "'figure': 'iteration_ms'" in printed and "'verdict': 'better'" in printed
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["differing"] == {"strategy": ["ring", "zigzag"]}
    assert proof["changes"]["parts"][0]["what"] == "imbalance"


def test_the_page_says_when_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This run has no loss with a recommendation."""
    assert cli.run(["report", str(TRACES / "h200x2-zigzag-65536-layer"), "--format", "json"]) == 0
    (tmp_path / "base.json").write_text(capsys.readouterr().out)
    assert shell(python_line("base.json"), tmp_path).startswith("None\n")
    assert "Stop when `next_step` is null" in SKILL


def described(path: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the report's schema at a path such as ``ranks[].host``."""
    nodes = list(alternatives(SCHEMA))
    for key in path.split("."):
        nodes = [node["properties"][key.removesuffix("[]")] for node in nodes
                 if key.removesuffix("[]") in node.get("properties", {})]  # fmt: skip
        nodes = [other for node in nodes for other in alternatives(node)]
        if key.endswith("[]"):
            nodes = [other for node in nodes if "items" in node for other in alternatives(node["items"])]
    yield from nodes


def test_fields_and_parts_exist() -> None:
    table = re.findall(r"^\| (`.*?) \| .*\|$", SKILL, re.MULTILINE)
    cells = [re.findall(r"`([^`]+)`", cell) for cell in table]
    fields = [names for names in cells if "." in names[0] or "[" in names[0]]
    parts = [name for names in cells if names not in fields for name in names]
    assert len(fields) >= 6 and len(parts) >= 7
    for first, *others in fields:
        for name in (first, *others):
            path = first.rpartition(".")[0] + name if name.startswith(".") else name
            assert list(described(path.removesuffix("[]"))), path
    assert [part for part in parts if part not in WATERFALL_LABELS] == []
    stop = SKILL.partition("## 5. Stop")[2]
    assert {"peak", "vendor_peak", "kernel_limit"} <= set(WATERFALL_LABELS) and "`kernel_limit`" in stop


def test_commands_and_options_exist() -> None:
    for command in re.findall(r"ringprof (\w+)(?: |`)", SKILL):
        assert command in commands.COMMANDS, command


def test_the_page_is_one_page() -> None:
    assert len(SKILL.split()) <= 700
