"""What kernels are, told without ringprof's rules (`tests/data/kernel_kinds.csv`), and how much of a trace agrees.

Each row is a kernel's name as public traces or projects have it (cut at 340 characters), its kind, the operators that
launched it (``outer > inner``; ``source`` where its code was read instead) and where that can be looked up. All
kernels of the traces named there that hold more than 0.1 % of a trace's kernel time are in it. A name that several
operators launch has a row for each kind.

    python -m tests.analysis.kinds.truth TRACE...    # of each Kineto trace what share of kernel time agrees
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
        """Those that launched it, outermost first; none where its source or its name alone tells."""
        return self.evidence.split(" > ") if self.evidence not in ("", "source") else []


def rows() -> list[Row]:
    with open(DATA / "kernel_kinds.csv", newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def side(kind: str) -> str:
    """Communication and attention must not be mistaken for anything else, nor anything else for them."""
    return "communication" if kind in COMMUNICATION else "attention" if kind in ATTENTION else "other"


def true_kind(by_name: dict[str, list[Row]], name: str, launched_in: list[str]) -> str | None:
    """The kind of a kernel by the table; None where it does not have it."""
    found = by_name.get(name[:LONGEST_NAME], [])
    for row in sorted(found, key=lambda row: -len(row.operators)):
        operators = row.operators
        if operators and launched_in and operators[-1] == launched_in[-1] and set(operators) <= set(launched_in):
            return row.kind
    return next((row.kind for row in found if len(found) == 1 or not row.operators), None)


def kernels(document: dict[str, Any]) -> Iterator[tuple[str, float, list[str]]]:
    """(name, microseconds, operators that launched it) of a Kineto trace, in the order of their starts."""
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    ranges, launches = defaultdict(list), {}
    for event in events:
        category, start = str(event.get("cat")).lower(), event["ts"]
        if category in ("cpu_op", "operator", "user_annotation"):
            ranges[event["tid"]].append((start, -event.get("dur", 0), event["name"]))
        elif category.endswith(("runtime", "driver")):
            launches[event.get("args", {}).get("correlation")] = (start, event["tid"])
    for event in sorted((e for e in events if str(e.get("cat")).lower() == "kernel"), key=lambda e: e["ts"]):
        launched, thread = launches.get(event.get("args", {}).get("correlation"), (None, None))
        inside = [one for one in ranges[thread] if launched is not None and one[0] <= launched <= one[0] - one[1]]
        yield event["name"], event.get("dur", 0), [re.sub(r"#\d+$", "", name) for _, _, name in sorted(inside)]


def agreement(path: Path) -> tuple[float, float, Counter[tuple[str, str, str]]]:
    """(time that agrees, time that the table knows, time by (true kind, told kind, name) that does not)."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in rows():
        by_name[row.name].append(row)
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    trace = parse_trace(data, path.name)
    told = classify(trace).kind[trace.activities.category == KERNEL]
    wrong: Counter[tuple[str, str, str]] = Counter()
    agreed = known = 0.0
    for (name, time, launched_in), code in zip(kernels(json.loads(data)), told.tolist(), strict=True):
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
    """Kernel time in milliseconds, and the share of each kind in it; communication and attention as one each."""
    trace = parse_trace(path.read_bytes(), path.name)
    kernel = trace.activities.category == KERNEL
    time = (trace.activities.end_ns - trace.activities.start_ns)[kernel].tolist()
    found: Counter[str] = Counter()
    for code, ns in zip(classify(trace).kind[kernel].tolist(), time, strict=True):
        found[KINDS[code] if side(KINDS[code]) == "other" else side(KINDS[code])] += ns
    whole = found.total()
    return whole / 1e6, {kind: ns / whole for kind, ns in found.items()}


def print_table(paths: list[str]) -> None:
    columns = ("communication", "attention", "gemm", "embedding", "other")
    print(f"| trace | kernel time | {' | '.join(columns)} | other kinds | agrees |")
    for path in map(Path, paths):
        time, found = shares(path)
        agreed, known, _ = agreement(path)
        named = [*(found.get(kind, 0.0) for kind in columns), sum(found[kind] for kind in found.keys() - set(columns))]
        agrees = f"{100 * agreed / known:.1f} %" if known else "not in the table"
        print(f"| {path.name} | {time:,.1f} ms | {' | '.join(f'{100 * one:.1f} %' for one in named)} | {agrees} |")


def main(paths: list[str]) -> None:
    if paths[:1] == ["--table"]:
        print_table(paths[1:])
        return
    for path in paths:
        agreed, known, wrong = agreement(Path(path))
        print(f"{100 * agreed / known if known else 0:6.2f} % of {known / 1e3:,.3f} ms  {path}")
        for (truth, kind, name), time in wrong.most_common(8):
            print(f"         {time / 1e3:9.3f} ms {truth} is told as {kind}: {name[:90]}")


if __name__ == "__main__":
    main(sys.argv[1:])
