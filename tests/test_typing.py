"""Results of a user's type checker for programs that use the installed library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")

SOUND = {
    "page": "".join(
        textwrap.dedent(block) for block in re.findall(r"^## \w+\n\n((?:    .*\n|\n)+)", PAGE, re.MULTILINE)
    ),
    "options": """
        from pathlib import Path
        import ringprof
        run: ringprof.Analysis = ringprof.load(
            [Path("rank0.json"), "rank1.json"], window="step*", between="10ms,20ms", group="cp", rules="rules.txt",
            ranks_per_host=8, limit_bytes=1 << 30, jobs=2, scheduler="tcp://host:1", notify=lambda what, done, of: None)
        walls: list[int] = [rank.breakdown.wall_ns for rank in run.attribution.ranks]
        verdict: list[str] = run.verdict
        tables: ringprof.TableAnalysis = ringprof.load_tables("kernels.log", wall_ns=1_000_000, iterations=3)
        comparison = ringprof.compare(run, "other", tables, reading=ringprof.LoadOptions(between="10ms,20ms"))
        page: str = comparison.to_html()
        with ringprof.capture("traces/mine"):
            pass
    """,
}
WRONG = {
    'ringprof.load("x", grup="cp")': "grup",
    'ringprof.load("x", between=5)': "between",
    'ringprof.load("x", "cp")': "positional",
    'ringprof.load("x").hopps()': "hopps",
    'ringprof.load_tables("x", group="cp")': "group",
    'ringprof.load_tables("x").hops()': "hops",
    'ringprof.LoadOptions(grup="cp")': "grup",
}


@pytest.mark.processes
def test_a_users_type_checker_accepts_what_works_and_refuses_what_does_not(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "ringprof").symlink_to(ROOT / "ringprof")
    for name, program in SOUND.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(program))
    (tmp_path / "wrong.py").write_text("import ringprof\n" + "".join(f"{line}\n" for line in WRONG))
    # The tensors of the page's second part.
    (tmp_path / "page.py").write_text("import torch\nq = local_k = local_v = torch.zeros(1)\n" + SOUND["page"])
    files = [*SOUND, "wrong"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "of_a_user"),
         "--config-file", os.devnull, *(f"{name}.py" for name in files)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *lines, summary = done.stdout.splitlines()
    errors = {int(line.split(":")[1]): line for line in lines if line.startswith("wrong.py") and ": error:" in line}
    assert [line for line in lines if not line.startswith("wrong.py")] == [], done.stdout + done.stderr
    for number, (program, part) in enumerate(WRONG.items(), start=2):
        assert part in errors.get(number, ""), f"{program}: {errors.get(number)}"
    assert len(errors) == len(WRONG) and summary.startswith("Found")
