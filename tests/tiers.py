"""Tiers of a table of cases: some in the fast tier, the others in a slower one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(
    names: str, cases: Iterable[Any], fast: Collection[Any], tier: str = "long", **options: Any
) -> pytest.MarkDecorator:
    """Parametrize a test; cases that are not in ``fast`` get the marker of a slower tier."""
    listed, marks = list(cases), {"long": pytest.mark.long, "processes": pytest.mark.processes}
    assert all(case in listed for case in fast), "a fast case is not in the table"
    rows = [(case if "," in names else (case,), () if case in fast else marks[tier]) for case in listed]
    return pytest.mark.parametrize(names, [pytest.param(*row, marks=mark) for row, mark in rows], **options)
