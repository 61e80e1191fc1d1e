"""CONTRIBUTING.md names files that exist."""

from __future__ import annotations

import re

from tests.paths import ROOT


def test_files_named_in_contributing_exist() -> None:
    named = re.findall(r"`([\w./-]+/[\w.-]*)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 20
    for name in named:
        # NAME is a placeholder; dist/ is created by a build.
        path = ROOT / name if "NAME" not in name else (ROOT / name).parent
        assert path.exists() or name == "dist/", name
