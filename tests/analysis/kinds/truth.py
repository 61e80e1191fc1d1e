"""Known kinds of kernels, independent of ringprof's rules (`tests/data/kernel_kinds.csv`), and agreement with traces.

Each row is a kernel's name as in public traces or projects (cut at 340 characters), its kind, the operators that
launched it (``outer > inner``; ``source`` where its code was read instead) and where that can be looked up. The table
has all kernels of the traces named there that hold more than 0.1 % of a trace's kernel time. A name that several
operators launch has a row for each kind. `kernel_kinds_of_projects.csv` and `kernel_kinds_held_out.csv` have names
from the sources of projects, without operators; where two kinds can be argued, both stand there (``cast|reduction``).

    python -m tests.analysis.kinds.truth TRACE...    # share of kernel time that agrees, for each Kineto trace
    python -m tests.analysis.kinds.truth --table TRACE...    # and the shares of kinds: the table of docs/metrics.md
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringprof.analysis.kinds.classify import classify
from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION, KINDS
from ringprof.trace.columns import KERNEL
from ringprof.trace.kineto import parse_trace
from tests.paths import DATA

LONGEST_NAME = 340


class Row(NamedTuple):
    """One row of the table."""

    name: str
    kind: str
    evidence: str
    source: str

    @property
    def operators(self) -> list[str]:
        """Operators that launched the kernel, outermost first; empty where only its source or its name is known."""
        return self.evidence.split(" > ") if self.evidence not in ("", "source") else []


def rows(table: str = "kernel_kinds") -> list[Row]:
    with open(DATA / f"{table}.csv", newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def kind_group(kind: str) -> str:
    """Return the group of a kind; communication and attention must never be confused with anything else."""
    return "communication" if kind in COMMUNICATION else "attention" if kind in ATTENTION else "other"


def true_kind(by_name: dict[str, list[Row]], name: str, launched_in: list[str]) -> str | None:
    """Return a kernel's kind by the table; None for a kernel that is not in the table."""
    candidates = by_name.get(name[:LONGEST_NAME], [])
    for row in sorted(candidates, key=lambda row: -len(row.operators)):
        operators = row.operators
        if operators and launched_in and operators[-1] == launched_in[-1] and set(operators) <= set(launched_in):
            return row.kind
    return next((row.kind for row in candidates if len(candidates) == 1 or not row.operators), None)


def kernels(document: dict[str, Any]) -> Iterator[tuple[str, float, list[str]]]:
    """Yield (name, microseconds, operators that launched it) for each kernel of a Kineto trace, by start."""
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    ranges, launches = defaultdict(list), {}
    for event in events:
        category, start = str(event.get("cat")).lower(), event["ts"]
        if category in ("cpu_op", "operator", "user_annotation"):
            ranges[event["tid"]].append((start, -event.get("dur", 0), event["name"]))
        elif category.endswith(("runtime", "driver")):
            launches[event.get("args", {}).get("correlation")] = (start, event["tid"])
    for event in sorted(
        (event for event in events if str(event.get("cat")).lower() == "kernel"), key=lambda event: event["ts"]
    ):
        launched, thread = launches.get(event.get("args", {}).get("correlation"), (None, None))
        enclosing = [
            span for span in ranges[thread] if launched is not None and span[0] <= launched <= span[0] - span[1]
        ]
        yield event["name"], event.get("dur", 0), [re.sub(r"#\d+$", "", name) for _, _, name in sorted(enclosing)]


def agreement(path: Path) -> tuple[float, float, Counter[tuple[str, str, str]]]:
    """Return (time that agrees, time of kernels in the table, wrong time by (true kind, kind found, name))."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in rows():
        by_name[row.name].append(row)
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    trace = parse_trace(data, path.name)
    codes = classify(trace).kind[trace.activities.category == KERNEL]
    wrong: Counter[tuple[str, str, str]] = Counter()
    agreed = known = 0.0
    for (name, time, launched_in), code in zip(kernels(json.loads(data)), codes.tolist(), strict=True):
        truth = true_kind(by_name, name, launched_in)
        if truth is None:
            continue
        known += time
        if truth == KINDS[code]:
            agreed += time
        else:
            wrong[truth, KINDS[code], name] += round(time)
    return agreed, known, wrong


def shares(path: Path) -> tuple[float, dict[str, float]]:
    """Return kernel time in milliseconds, and each kind's share; communication and attention count as one kind each."""
    trace = parse_trace(path.read_bytes(), path.name)
    kernel = trace.activities.category == KERNEL
    time = (trace.activities.end_ns - trace.activities.start_ns)[kernel].tolist()
    time_of_kind: Counter[str] = Counter()
    for code, time_ns in zip(classify(trace).kind[kernel].tolist(), time, strict=True):
        time_of_kind[KINDS[code] if kind_group(KINDS[code]) == "other" else kind_group(KINDS[code])] += time_ns
    whole = time_of_kind.total()
    return whole / 1e6, {kind: time_ns / whole for kind, time_ns in time_of_kind.items()}


def print_table(paths: list[str]) -> None:
    columns = ("communication", "attention", "gemm", "embedding", "other")
    print(f"| trace | kernel time | {' | '.join(columns)} | other kinds | agrees |")
    for path in map(Path, paths):
        time, share_of_kind = shares(path)
        agreed, known, _ = agreement(path)
        row_shares = [
            *(share_of_kind.get(kind, 0.0) for kind in columns),
            sum(share_of_kind[kind] for kind in share_of_kind.keys() - set(columns)),
        ]
        agrees = f"{100 * agreed / known:.1f} %" if known else "not in the table"
        cells = " | ".join(f"{100 * share:.1f} %" for share in row_shares)
        print(f"| {path.name} | {time:,.1f} ms | {cells} | {agrees} |")


def main(paths: list[str]) -> None:
    if paths[:1] == ["--table"]:
        print_table(paths[1:])
        return
    for path in paths:
        agreed, known, wrong = agreement(Path(path))
        print(f"{100 * agreed / known if known else 0:6.2f} % of {known / 1e3:,.3f} ms  {path}")
        for (truth, kind, name), time in wrong.most_common(8):
            print(f"         {time / 1e3:9.3f} ms {truth} is classified as {kind}: {name[:90]}")


if __name__ == "__main__":
    main(sys.argv[1:])
