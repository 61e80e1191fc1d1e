"""The architecture page says what the imports say."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.paths import ROOT

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def structure(text: str) -> str:
    """Return drawings, layers and purposes; sizes change with every commit and may be a little behind."""
    return re.sub(r"^(\| `\w+` \| \d+ \|) [^|]+ \|", r"\1 |", text, flags=re.MULTILINE)


def test_architecture_diagrams_match_the_imports() -> None:
    written = PAGE.partition(SCRIPT["BEGIN"])[2].partition(SCRIPT["END"])[0]
    assert structure(written.strip()) == structure(SCRIPT["generated"]().strip()), "python scripts/architecture.py"


def test_diagrams_omit_transitive_imports() -> None:
    graph = SCRIPT["ImportGraph"].__new__(SCRIPT["ImportGraph"])
    graph.imports = {
        "p.cli": {"p.report", "p.trace"},
        "p.report": {"p.trace"},
        "p.trace": set(),
        "p.scale": {"p.trace"},
    }
    assert graph.layers() == {"p.trace": 1, "p.report": 2, "p.scale": 2, "p.cli": 3}
    assert graph.direct("p.cli") == ["p.report"]
    drawn = [line.strip() for line in SCRIPT["drawing"](graph).splitlines() if "-->" in line]
    assert drawn == ["cli --> report", "report --> trace", "scale --> trace"]


@pytest.mark.long
def test_architecture_script_measures_a_checkout() -> None:
    measured = SCRIPT["measures"](ROOT)
    assert measured["files of ringprof/"] == len(
        [path for path in (ROOT / "ringprof").rglob("*.py") if "strategies" not in path.parts]
    )
    assert isinstance(measured["layers of ringprof/"], int)
