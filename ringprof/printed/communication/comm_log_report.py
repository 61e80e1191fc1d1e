"""Public result of reading communication logs: a report as text and as JSON, and figures for ``--fail-if``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MEMORY_BYTES, Limits
from ringprof.errors import InputError
from ringprof.printed.communication.analyse import CommLogFindings, OperationRow, SizeRow, analyse, place_of, words
from ringprof.printed.communication.read import find_comm_logs, read_comm_logs
from ringprof.report.result import Result
from ringprof.report.tables import Column, Table
from ringprof.report.text import TextStyle, binary_size, clean
from ringprof.trace.columns import Notice

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "ringprof.comm-logs/1"
_MOST_SIZES, _MOST_RANKS, _MOST_WARNINGS = 20, 64, 8


class CommLogAnalysis(Result):
    """Analysis of the Flight Recorder dumps or NCCL Inspector files of one job. Created by `load_comm_logs`."""

    _frames = ("operations", "ranks", "sizes", "standings")

    def __init__(self, name: str, paths: Sequence[str], findings: CommLogFindings) -> None:
        self.name, self.paths, self.findings = name, list(paths), findings

    @property
    def warnings(self) -> list[Notice]:
        """Warnings about the logs, and about figures that could not be determined."""
        return list(self.findings.warnings)

    @property
    def verdict(self) -> list[str]:
        """Sentences on what is not complete and on who came late."""
        return list(self.findings.verdict)

    def report(self) -> JsonObject:
        """Return the report of ``--format json``, schema ``ringprof.comm-logs/1``: null for values not known."""
        findings = self.findings
        groups = {log.rank: log.groups for log in findings.logs}
        return {
            "schema": SCHEMA,
            "source": {"type": findings.source, "versions": list(findings.versions), "paths": self.paths},
            "verdict": list(findings.verdict),
            "late_by": findings.late_by or None,
            "ranks": [
                {"rank": row.rank, "host": log.host, "from_start": log.from_start, "missing": log.missing,
                 **msgspec.structs.asdict(row)}
                for row, log in zip(findings.ranks, findings.logs, strict=True)
            ],
            "sizes": [
                {"group": row.group, "operation": row.name, "size_bytes": row.size_bytes, "ranks": row.ranks,
                 "count": row.count, "bus_factor": row.bus_factor, **_bounds(row.bounds)}
                for row in findings.sizes
            ],
            "standings": [
                {"rank": item.rank, "group": item.group, "unfinished": item.unfinished,
                 "waits_for": list(item.waits_for), **_operation(item.row)}
                for item in findings.standings
            ],
            "operations": [
                {
                    "group": groups[row.operation.rank][row.operation.group].label,
                    **_operation(row),
                    **_bounds(msgspec.structs.asdict(row.bounds)),
                }
                for row in findings.rows
            ],
            "warnings": [{"code": notice.code, "message": notice.message} for notice in findings.warnings],
        }  # fmt: skip

    def figures(self) -> dict[str, float]:
        """Return the figures that a condition may name: ``operations`` and ``unfinished``, counts, and ``late_ms``.

        ``late_ms`` is the largest lateness in milliseconds; it is left out where ranks are not compared.
        """
        ranks, late = self.findings.ranks, self.findings.late
        figures = {"operations": float(len(self.findings.rows)), "unfinished": float(sum(r.unfinished for r in ranks))}
        if late:
            figures["late_ms"] = max(item.late_ns for item in late) / 1e6
        return figures

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the report as text; without a style, tables are as wide as they need."""
        style, findings = style or TextStyle(wide_tables=True), self.findings
        ranks, operations = len(findings.ranks), len(findings.rows)
        title = " · ".join([
            f"{ranks} rank{'s' * (ranks != 1)}", *(clean(version) for version in findings.versions[:3]),
            f"{operations:,} operation{'s' * (operations != 1)}",
        ])  # fmt: skip
        blocks = [style.fit(title), *(style.wrap(clean(sentence, 1_000)) for sentence in findings.verdict)]
        if findings.standings:
            blocks.append(_standing_table(findings).text(style, _MOST_RANKS))
        blocks.append(_rank_table(findings).text(style, _MOST_RANKS))
        if findings.sizes:
            blocks.append(_size_table(findings).text(style, _MOST_SIZES))
        notes = [f"warning: {clean(notice.message, 1_000)} [{notice.code}]" for notice in findings.warnings]
        if len(notes) > _MOST_WARNINGS:
            notes[_MOST_WARNINGS:] = [f"and {len(notes) - _MOST_WARNINGS} more warnings: --format json"]
        blocks += [style.wrap("\n".join(notes))] if notes else []
        return style.finish("\n\n".join(blocks))

    def __repr__(self) -> str:
        return f"<ringprof.CommLogAnalysis of {self.name}: {len(self.findings.rows)} operations>"

    def _frame(self, name: str) -> pd.DataFrame:
        import pandas as pd  # imported here, because the import takes longer than reading most logs

        return pd.DataFrame(self.report()[name])


def load_comm_logs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, memory_bytes: int = MEMORY_BYTES
) -> CommLogAnalysis:
    """Load Flight Recorder dumps or NCCL Inspector files: a folder with those of all ranks, or the files.

    ``memory_bytes`` is the most memory that reading may take. Raises `InputError` for a folder without such files, for
    another file, for a damaged file, for two files of one rank, and where the memory does not suffice.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    logs = find_comm_logs(names)
    if not logs:
        raise InputError(f"{', '.join(names)}: no Flight Recorder dumps and no files of NCCL Inspector")
    return analyse_comm_logs(names, logs, Limits(memory_bytes))


def analyse_comm_logs(names: Sequence[str], paths: Sequence[str], limits: Limits | None = None) -> CommLogAnalysis:
    """Analyse the communication logs ``paths``, which the user named as ``names``: the files or their folder.

    Raises `InputError` as `load_comm_logs`.
    """
    logs, notices = read_comm_logs(paths, limits)
    return CommLogAnalysis(names[0], [log.path for log in logs], analyse(logs, notices))


# --- terminal -----------------------------------------------------------------------------------------


_ALL = "--format json"


def _standing_table(findings: CommLogFindings) -> Table:
    columns = (
        Column(""), Column("group", left=True), Column("stands in", left=True), Column("state", left=True),
        Column("not\nposted by", left=True), Column("open", "count"), Column("posted from", left=True, drop=1),
    )  # fmt: skip
    rows = [
        [f"rank {item.rank}", clean(item.group, 40), place_of(item.row),
         "gave up" if item.row.operation.timed_out else item.row.operation.state,
         ", ".join(f"rank {rank}" for rank in item.waits_for[:4]) or None, item.unfinished,
         item.row.operation.location or None]
        for item in findings.standings
    ]  # fmt: skip
    return _without_empty(Table("where the ranks stand", columns, rows, _ALL))


def _rank_table(findings: CommLogFindings) -> Table:
    by_time = findings.late_by == "time"
    columns = (
        Column(""), Column("operations", "count"), Column("hops", "count"), Column("MB sent\nin hops", "bytes"),
        Column("open", "count"), Column("shortest\nin" if by_time else "last\nin", "count"), Column("of", "count"),
        Column("shorter by,\nmedian" if by_time else "late,\nmedian", "time"),
        Column("shorter by,\nmost" if by_time else "late,\nmost", "time"), Column("waited\nat least", "time"),
        Column("over the\nshortest", "time"),
    )  # fmt: skip
    rows = [
        [f"rank {row.rank}", row.operations, row.hops or None, row.sent_bytes if row.hops else None, row.unfinished,
         row.last if row.compared else None, row.compared or None, row.late_median_ns, row.late_most_ns,
         row.wait_least_ns, row.excess_ns]
        for row in findings.ranks
    ]  # fmt: skip
    return _without_empty(Table("by rank", columns, rows, _ALL))


_BOUND_COLUMNS = {
    "time_least_ns": ("time\nat least", "time", 0), "time_most_ns": ("time\nat most", "time", 0),
    "wait_least_ns": ("wait\nat least", "time", 4), "wait_most_ns": ("wait\nat most", "time", 3),
    "rate_least": ("GB/s\nat least", "rate", 0), "rate_most": ("GB/s\nat most", "rate", 0),
    "wire_rate_least": ("on wire\nat least", "rate", 1), "wire_rate_most": ("on wire\nat most", "rate", 2),
}  # fmt: skip
"""Field of `Bounds` -> title, unit, and when the column is left out on a narrow terminal."""


def _size_table(findings: CommLogFindings) -> Table:
    columns = (
        Column(""), Column("group", left=True), Column("size"), Column("count", "count"),
        *(Column(title, unit, drop=drop) for title, unit, drop in _BOUND_COLUMNS.values()),
        Column("bus GB/s\nat least", "rate", drop=5), Column("bus GB/s\nat most", "rate", drop=5),
    )  # fmt: skip
    rows = [
        [words(clean(row.name, 40)), clean(row.group, 40),
         None if row.size_bytes is None else binary_size(row.size_bytes), row.count,
         *(row.bounds[field] for field in _BOUND_COLUMNS), *_bus_rates(row)]
        for row in findings.sizes
    ]  # fmt: skip
    return _without_empty(Table("by size, medians", columns, rows, _ALL))


def _without_empty(table: Table) -> Table:
    """Leave out the columns that have no value in any row."""
    kept = [index for index in range(len(table.columns)) if any(row[index] is not None for row in table.rows)]
    rows = [[row[index] for index in kept] for row in table.rows]
    return table._replace(columns=[table.columns[index] for index in kept], rows=rows)


def _bus_rates(row: SizeRow) -> list[float | None]:
    factor, rates = row.bus_factor, (row.bounds["rate_least"], row.bounds["rate_most"])
    return [None if factor is None or rate is None else rate * factor for rate in rates]


# --- JSON ---------------------------------------------------------------------------------------------


def _operation(row: OperationRow) -> JsonObject:
    operation = row.operation
    return {
        "rank": operation.rank, "operation": operation.name, "sequence": operation.sequence, "number": row.number,
        "step": row.step, "steps": row.steps, "state": operation.state, "timed_out": operation.timed_out,
        "sends": [_message(message.peer, message.size_bytes) for message in operation.sends],
        "receives": [_message(message.peer, message.size_bytes) for message in operation.receives],
        "size_bytes": operation.counted_bytes, "posted_ns": operation.posted_ns, "location": operation.location or None,
    }  # fmt: skip


def _message(peer: int, size_bytes: int | None) -> dict[str, Any]:
    return {"peer": peer if peer >= 0 else None, "size_bytes": size_bytes}


_RATES = {
    "rate_least": "gbps_least", "rate_most": "gbps_most", "wire_rate_least": "wire_gbps_least",
    "wire_rate_most": "wire_gbps_most",
}  # fmt: skip


def _bounds(bounds: Mapping[str, Any]) -> JsonObject:
    return {_RATES.get(field, field): value for field, value in bounds.items()}
