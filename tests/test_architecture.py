"""The architecture page says what the imports say."""

from __future__ import annotations

import re
import runpy
from typing import Any

from tests.paths import ROOT

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def structure(text: str) -> str:
    """Drawings, floors and purposes; sizes change with every commit and may be a little behind."""
    text = text.partition("## Measures")[0]
    return re.sub(r"^(\| `\w+` \| \d+ \|) [^|]+ \|", r"\1 |", text, flags=re.MULTILINE)


def test_the_drawings_are_those_of_the_imports() -> None:
    written = PAGE.partition(SCRIPT["BEGIN"])[2].partition(SCRIPT["END"])[0]
    assert structure(written.strip()) == structure(SCRIPT["generated"]().strip()), "python scripts/architecture.py"


def test_the_measures_are_those_of_the_files() -> None:
    for name, value in SCRIPT["measures"](ROOT).items():
        (written,) = re.findall(rf"^\| {re.escape(name)} \| [\d,]+ \| ([\d,]+) \|$", PAGE, re.MULTILINE)
        assert abs(int(written.replace(",", "")) - value) <= 0.1 * value, f"{name}: python scripts/architecture.py"


def test_the_share_of_mutants_is_that_of_their_page_and_what_was_before_stays() -> None:
    assert f"| {SCRIPT['mutants_noticed']()} |\n" in PAGE
    again = SCRIPT["measures_beside"](PAGE, {"files of ringprof/": 1234})
    assert "| files of ringprof/ | 149 | 1,234 |\n| mutants noticed | 29 of 42, chosen by hand | " in again


def test_what_follows_from_other_arrows_is_left_out() -> None:
    rooms = SCRIPT["Rooms"].__new__(SCRIPT["Rooms"])
    rooms.arrows = {"p.roof": {"p.hall", "p.cellar"}, "p.hall": {"p.cellar"}, "p.cellar": set(), "p.shed": {"p.cellar"}}
    assert rooms.floors() == {"p.cellar": 1, "p.hall": 2, "p.shed": 2, "p.roof": 3}
    assert rooms.direct("p.roof") == ["p.hall"]
    drawn = [line.strip() for line in SCRIPT["drawing"](rooms).splitlines() if "-->" in line]
    assert drawn == ["hall --> cellar", "roof --> hall", "shed --> cellar"]
