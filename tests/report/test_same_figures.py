"""Whatever the terminal prints is a figure of the JSON report or of a frame, rounded.

By brute force: a pool of all that the data hold, with their means, extremes and sums over ranks, and shares of
the wall; every number of the whole report must be one of them in some unit. Parts are rounded to visibly sum, which
may move the last digit by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from ringprof.analysis.findings.waterfall import ATTENTION_PARTS
from ringprof.api import Analysis
from ringprof.report.sections import OPTIONAL
from ringprof.report.text import TextStyle
from tests.loaded import analysis
from tests.paths import COMMITTED, TRACES

SCALES = (1, 1e-3, 1e-6, 1e-9, 1e2, 2.0**-20, 2.0**-30, 1e3, 1e6)
"""From nanoseconds, bytes, shares and TFLOP/s to what is shown."""
NUMBER = re.compile(r"(?<![\w.,<])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w>])")
TEMPLATE = re.compile(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>")
"""What a kernel's name takes."""
QUICK = ("h200x4-zigzag-65536", "h200x4-usp-65536-two-hosts", "cpu4-burst-4096", "h200x2-decode-1048576")


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number, with the place that it has in every item of a list; those in sentences are no data."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, (*path, "*"))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def grouped(rows: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[float]:
    """Means over a group's rows, and the largest and least of its ranks' means."""
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
            means = [fmean(one) for one in ranks.values()]
            yield from (fmean(values), max(means), min(means), sum(values) / len(ranks))
        if {"bytes", "wire_ns"} <= set(group[0]) and all(row["wire_ns"] for row in group):
            yield sum(row["bytes"] for row in group) / sum(row["wire_ns"] for row in group)
        if "bound" in group[0]:
            yield from (sum(row["bound"] == one["bound"] for row in group) / len(group) for one in group)


def pool(run: Analysis) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All that may be shown."""
    report = run.report()
    ranks, values = report["ranks"], []
    by_path = defaultdict(list)
    for path, value in leaves(report):
        by_path[path].append(value)
    for path, found in by_path.items():
        whole = [*found, *[0.0] * (len(ranks) - len(found))] if path[0] == "ranks" else found
        values += [
            *found,
            fmean(found),
            fmean(whole),
            min(found),
            max(found),
            sum(found),
            sum(found) / len(ranks),
            len(found),
        ]
    kernels = report["summary"]["kernels"]
    spent = sum(one["time_ns"] for one in kernels)
    for kernel in kernels:
        time = kernel["time_ns"]
        values += [time / kernel["calls"], time / len(ranks), time / spent, kernel["calls"] / len(ranks)]
        values += [(kernel["exposed_ns"] or 0) / len(ranks)]
    ranges = report["summary"]["annotations"]
    values += [time / len(ranks) for one in ranges for name, time in one.items() if name.endswith("_ns")]
    states = [state for state in (report["run"] or {}).get("device_states") or () if state]
    # How far a GPU's median clock is below the highest that it can.
    values += [1 - one["sm_clock_mhz"] / one["rated_sm_clock_mhz"] for one in states if one["rated_sm_clock_mhz"]]
    # How long the GPUs were sampled.
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
    attention = sum(one["time_ns"] for one in report["waterfall"] if one["part"] in ATTENTION_PARTS)
    values += [attention / 10, *documents(report)]
    computes = sum(rank["compute_ns"] for rank in ranks)
    values += [row["bytes"] / computes for row in report["summary"]["communication"] if row["bytes"]]
    wall = fmean(rank["wall_ns"] for rank in ranks)
    slowest = report["summary"]["slowest_rank"]["wall_ns"]
    shares = [part for value in values for part in (value / wall, value / slowest, 1 - value / slowest)]
    return np.unique(np.abs(np.array([*values, *shares, slowest / wall - 1])))


def idle_by_name(ranks: list[dict[str, Any]]) -> Iterator[float]:
    """Idle time by class and by name: mean over ranks, and share of all idle time."""
    sums: dict[tuple[str, ...], int] = defaultdict(int)
    for event in (event for rank in ranks for event in rank["idle_events"] or ()):
        for key in ((event["class"],), (event["class"], event["name"])):
            sums[key] += event["time_ns"]
    idle = sum(rank["idle_ns"] for rank in ranks)
    yield from (value for time in sums.values() for value in (time / len(ranks), time / idle))


def documents(report: Any) -> list[int]:
    """The shortest and the longest, and how many there are."""
    lengths = (report["run"] or {}).get("workload", {}).get("documents") or ()
    return [min(lengths), max(lengths), len(lengths)] if lengths else []


def median_of_slowest(run: Analysis) -> float:
    assert run.run is not None and run.run.timings is not None
    return float(np.median(np.max(np.array(run.run.timings.iterations_ns), axis=0)))


def held(token: str, known: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Whether a number is one of the pool in some unit, to the last digit that is shown, or one beside it."""
    plain = token.replace(",", "")
    digits = len(plain.partition(".")[2].partition("e")[0])
    step = 10.0 ** (int(plain.partition("e")[2] or 0) - digits)
    value = float(plain)
    return any(bool(np.any(np.abs(known * scale - value) <= 1.5001 * step)) for scale in SCALES)


def check(run: Analysis) -> None:
    known, unknown = pool(run), []
    text = run.to_terminal(TextStyle(width=200, wide_tables=True), list(OPTIONAL))
    for line in text.splitlines():
        # What leaves a host on CPU comes of the run's counted bytes: tests/analysis/findings/test_cpu_links.py.
        if not line.startswith("next: ") and "leave each host" not in line:
            unknown += [
                (one, line.strip()[:120]) for one in NUMBER.findall(TEMPLATE.sub("", line)) if not held(one, known)
            ]
    assert unknown == []


def test_the_pool_is_no_sieve() -> None:
    """Numbers of five digits are let through as they are shown; of the same ones off by 1.3 % hardly any."""
    run = analysis(TRACES / "h200x4-zigzag-65536")
    known, text = pool(run), run.to_terminal(TextStyle(width=200))
    shown = [one for one in re.findall(r"(?<= )\d\d+\.\d{3}(?= )", text)]
    assert len(shown) > 15 and all(held(one, known) for one in shown)
    assert sum(held(f"{1.013 * float(one):.3f}", known) for one in shown) <= 2


@pytest.mark.parametrize("name", QUICK)
def test_every_number_of_the_terminal_is_one_of_the_data(name: str) -> None:
    check(analysis(TRACES / name))


@pytest.mark.long
@pytest.mark.parametrize("folder", [one for one in COMMITTED if one.name not in QUICK], ids=lambda path: path.name)
def test_every_number_of_every_committed_runs_terminal_is_one_of_the_data(folder: Any) -> None:
    check(analysis(folder))
