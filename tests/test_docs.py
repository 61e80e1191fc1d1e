"""What the README promises: its example is what the command prints, and every command is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_report_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(ROOT / "traces" / "h200x4-zigzag-262144"), "--width", "80"]) == 0
    indented = "\n".join(f"    {line}" if line else "" for line in capsys.readouterr().out.rstrip().split("\n"))
    assert indented in README


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"ringprof {name}" in README


def test_every_file_that_the_docs_link_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "traces" / "README.md"]:
        for part in page.read_text(encoding="utf-8").split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
