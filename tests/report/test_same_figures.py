"""Every number that the terminal prints is a figure of the JSON report or of a frame, rounded.

The test is by brute force: a pool of all that the data hold, with their means, extremes and sums over ranks, and shares
of the wall. Every number of the whole report must be one of them in some unit. Parts are rounded to visibly sum, which
may change the last digit by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ringprof.report.sections import OPTIONAL
from ringprof.report.text import TextStyle
from ringprof.results.analysis import Analysis
from tests.loaded import analysis
from tests.paths import COMMITTED, TRACES, VARIED
from tests.tiers import tiered

SCALES = (1, 1e-3, 1e-6, 1e-9, 1e2, 2.0**-20, 2.0**-30, 1e3, 1e6)
"""Factors from nanoseconds, bytes, shares and TFLOP/s to the units displayed."""
NUMBER = re.compile(r"(?<![\w.,<])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w>])")
TEMPLATE = re.compile(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>")
"""Template arguments in a kernel's name."""


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Generate every number of a tree with its path; ``*`` stands for any item of a list.

    Numbers inside sentences are skipped.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, (*path, "*"))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def grouped(rows: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[float]:
    """Generate means over each group's rows, and the largest and least of its ranks' means."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    for group in groups.values():
        for name in group[0]:
            values = [row[name] for row in group if isinstance(row[name], (int, float)) and row[name] == row[name]]
            if len(values) < len(group):
                continue
            ranks: dict[int, list[float]] = defaultdict(list)
            for row in group:
                ranks[row["rank"]].append(row[name])
            means = [fmean(rank_values) for rank_values in ranks.values()]
            yield from (fmean(values), max(means), min(means), sum(values) / len(ranks))
        if {"bytes", "wire_ns"} <= set(group[0]) and all(row["wire_ns"] for row in group):
            yield sum(row["bytes"] for row in group) / sum(row["wire_ns"] for row in group)
        if "bound" in group[0]:
            yield from (sum(row["bound"] == other["bound"] for row in group) / len(group) for other in group)


def pool(run: Analysis) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Collect all numbers that may be shown."""
    report = run.report()
    ranks, values = report["ranks"], []
    by_path = defaultdict(list)
    for path, value in leaves(report):
        by_path[path].append(value)
    for path, numbers in by_path.items():
        padded = [*numbers, *[0.0] * (len(ranks) - len(numbers))] if path[0] == "ranks" else numbers
        values += [
            *numbers,
            fmean(numbers),
            fmean(padded),
            min(numbers),
            max(numbers),
            sum(numbers),
            sum(numbers) / len(ranks),
            len(numbers),
        ]
    kernels = report["summary"]["kernels"]
    kernels_ns = sum(entry["time_ns"] for entry in kernels)
    for kernel in kernels:
        time = kernel["time_ns"]
        values += [time / kernel["calls"], time / len(ranks), time / kernels_ns, kernel["calls"] / len(ranks)]
        values += [(kernel["exposed_ns"] or 0) / len(ranks)]
    by_shape = [*report["summary"]["gemms"], *report["summary"]["collectives"]]
    for entry in by_shape:
        values += [(entry[name] or 0) / len(ranks) for name in ("calls", "time_ns", "wait_ns") if name in entry]
        values += [entry["time_ns"] / entry["calls"]]
    ranges = report["summary"]["annotations"]
    values += [time / len(ranks) for entry in ranges for name, time in entry.items() if name.endswith("_ns")]
    states = [state for state in (report["run"] or {}).get("device_states") or () if state]
    # Relative drop of a GPU's median clock below its highest.
    values += [
        1 - entry["sm_clock_mhz"] / entry["rated_sm_clock_mhz"] for entry in states if entry["rated_sm_clock_mhz"]
    ]
    # Time during which the GPUs were sampled.
    values += [max(sum(times) for times in run.run.timings.iterations_ns)] if run.run and run.run.timings else []
    steps = [{**row, "step_ns": row["end_ns"] - row["start_ns"]} for row in report["steps"]]
    hops = run.hops()
    offsets = {int(rank): offset for rank, offset in report["summary"]["clocks"]["offsets_ns"].items()}
    starts = hops["start_ns"] + hops["rank"].map(offsets)
    hops = hops.assign(duration_ns=hops["end_ns"] - hops["start_ns"], from_start_ns=starts - starts.min())
    values += [*grouped(steps, ("phase", "step")), *grouped(hops.to_dict("records"), ("hop",))]
    values += list(idle_by_name(ranks))
    values += [median_of_slowest(run)] if run.run is not None and run.run.timings else []
    if report["summary"]["peak"]:
        values.append(report["waterfall"][0]["time_ns"] * report["summary"]["peak"]["tflops"] / 1e3)
    if report["summary"]["inference"]:
        values.append(report["summary"]["inference"]["step_ns"] / report["summary"]["inference"]["new_tokens"])
    values += document_figures(report)
    wall = fmean(rank["wall_ns"] for rank in ranks)
    slowest = report["summary"]["slowest_rank"]["wall_ns"]
    shares = [part for value in values for part in (value / wall, value / slowest, 1 - value / slowest)]
    return np.unique(np.abs(np.array([*values, *shares, slowest / wall - 1])))


def idle_by_name(ranks: list[dict[str, Any]]) -> Iterator[float]:
    """Generate idle time by class and by name: mean over ranks, and share of all idle time."""
    sums: dict[tuple[str, ...], int] = defaultdict(int)
    for event in (event for rank in ranks for event in rank["idle_events"] or ()):
        for key in ((event["class"],), (event["class"], event["name"])):
            sums[key] += event["time_ns"]
    idle = sum(rank["idle_ns"] for rank in ranks)
    yield from (value for time in sums.values() for value in (time / len(ranks), time / idle))


def document_figures(report: Any) -> list[int]:
    """Return the shortest and the longest document, and the number of documents."""
    lengths = (report["run"] or {}).get("workload", {}).get("documents") or ()
    return [min(lengths), max(lengths), len(lengths)] if lengths else []


def median_of_slowest(run: Analysis) -> float:
    assert run.run is not None and run.run.timings is not None
    return float(np.median(np.max(np.array(run.run.timings.iterations_ns), axis=0)))


def is_held(token: str, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Return whether a number is in the pool in some unit, to the last digit shown or one beside it."""
    plain = token.replace(",", "")
    digits = len(plain.partition(".")[2].partition("e")[0])
    step = 10.0 ** (int(plain.partition("e")[2] or 0) - digits)
    value = float(plain)
    return any(bool(np.any(np.abs(numbers * scale - value) <= 1.5001 * step)) for scale in SCALES)


def assert_numbers_are_data(run: Analysis) -> None:
    numbers, unexplained = pool(run), []
    text = run.to_terminal(TextStyle(width=200, wide_tables=True), list(OPTIONAL))
    for line in text.splitlines():
        unexplained += [
            (number, line.strip()[:120])
            for number in NUMBER.findall(TEMPLATE.sub("", line))
            if not is_held(number, numbers)
        ]
    assert unexplained == []


def test_pool_of_numbers_rejects_wrong_ones() -> None:
    """Numbers of five digits pass as they are shown; numbers off by 1.3 % hardly ever pass."""
    run = analysis(TRACES / "h200x4-zigzag-65536")
    numbers, text = pool(run), run.to_terminal(TextStyle(width=200))
    tokens = [number for number in re.findall(r"(?<= )\d\d+\.\d{3}(?= )", text)]
    assert len(tokens) > 15 and all(is_held(number, numbers) for number in tokens)
    assert sum(is_held(f"{1.013 * float(number):.3f}", numbers) for number in tokens) <= 2


@tiered("folder", COMMITTED, [TRACES / name for name in VARIED], ids=lambda path: path.name)
def test_terminal_numbers_are_in_the_data(folder: Path) -> None:
    assert_numbers_are_data(analysis(folder))
