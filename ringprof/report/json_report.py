"""What a JSON report consists of, schema ``ringprof.report/1``; report-1.schema.json says what its parts hold."""

from __future__ import annotations

from typing import Any, TypedDict

from ringprof.json_object import JsonObject


class ReportSource(TypedDict):
    """What was read."""

    type: str
    """``run``, ``trace`` or ``text``."""
    paths: list[str]


class ReportParts(TypedDict, total=False):
    """What sections add, and what a table's report has instead."""

    summary: Any
    """An object, as waterfall, run and table are; null where there is none."""
    ranks: list[JsonObject]
    steps: list[JsonObject]
    waterfall: Any
    run: Any
    table: Any


class Report(ReportParts):
    """The whole, every part there."""

    schema: str
    source: ReportSource
    warnings: list[JsonObject]
