"""Parts of a recurrence: their times by brute force over single nanoseconds."""

from __future__ import annotations

import gzip
import json
import random
import re
from statistics import fmean, median
from typing import Any

import pytest

from ringprof.analysis.kinds.kinds import KIND
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.scale.pipeline import attribute
from tests.analysis.build import MAIN, Builder
from tests.loaded import analysis
from tests.paths import DATA, TRACES

FOLDER, ON_GPUS = DATA / "cpu2-state-scan", DATA / "h200x2-state-scan"
RING = TRACES / "h200x2-zigzag-65536"
SCAN, ADD = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "elementwise_kernel"
PARTS = {
    "ringprof::fwd/step=0/local": ("fwd", "local"), "ringprof::fwd/step=0/state": ("fwd", "state"),
    "ringprof::fwd/step=0/block": ("fwd", "output"), "ringprof::bwd/step=0/local": ("bwd", "local"),
    "ringprof::bwd/step=0/state": ("bwd", "state"), "ringprof::bwd/step=0/block": ("bwd", "output"),
    "ringprof::send/halo": ("", "halo"), "ringprof::send/heads": ("", "heads"),
}  # fmt: skip
Row = tuple[int, int, bool, str]
"""Start, end, whether it communicates, and the range that launched it (or none)."""


def drawn(seed: int) -> tuple[list[Builder], list[list[Row]]]:
    """Return two ranks that run random kernels and hops from random ranges, and what each of them ran."""
    draw = random.Random(seed)
    ranges = [name for name in PARTS for _ in range(draw.randrange(3))] + ["ringprof::fwd/step=0/local", "other"]
    draw.shuffle(ranges)
    builders, ran = [], []
    for rank in (0, 1):
        b, rows = Builder(rank=rank, world_size=2), list[Row]()
        for number, name in enumerate(ranges):
            first = 1000 * number
            b.mark(name, first, first + 900, thread=MAIN + (number % 2))
            for call in range(2):
                start, length = first + draw.randrange(3000), 1 + draw.randrange(900)
                kernel = draw.choice([SCAN, ADD])
                b.run(
                    kernel, start, start + length, launched=first + 300 + call, thread=MAIN + (number % 2), stream=call
                )
                rows.append((start, start + length, False, name))
            if name in PARTS and not name.endswith(("local", "block")):
                start, length = first + draw.randrange(2000), 500 + draw.randrange(900)
                fields: dict[str, Any] = {"group_ranks": (0, 1), "group_size": 2, "tensors": 1}
                b.batch(first + 800, start, start + length, to=1 - rank, source=1 - rank, **fields)
                # A batch is launched by the default thread.
                launched = name if number % 2 == 0 else ""
                rows.append((start, start + length, True, launched))
        builders.append(b)
        ran.append(rows)
    return builders, ran


@pytest.mark.parametrize("seed", range(20))
def test_times_of_the_parts_are_those_of_single_nanoseconds(seed: int) -> None:
    builders, ran = drawn(seed)
    ranks = attribute([b.trace() for b in builders], None).ranks
    for rank, rows in zip(ranks, ran, strict=True):
        computing = {t for start, end, sends, _ in rows if not sends for t in range(start, end)}
        expected = {}
        for name, key in PARTS.items():
            own = [row for row in rows if row[3] == name]
            compute = {t for start, end, sends, _ in own if not sends for t in range(start, end)}
            sent = {t for start, end, sends, _ in own if sends for t in range(start, end)}
            if compute or sent:
                expected[key] = len(compute), len(sent), len(sent - computing), sum(row[2] for row in own)
        assert {(x.phase, x.part): (x.compute_ns, x.communication_ns, x.exposed_ns, x.transfers)
                for x in rank.recurrence} == expected  # fmt: skip
        for part in rank.recurrence:
            transfers = sum(end - start for start, end, sends, name in rows if sends and PARTS.get(name) == part[:2])
            assert part.wait_ns is not None and part.wire_ns is not None
            assert part.wait_ns + part.wire_ns == transfers
            assert part.sent_bytes == 2000 * part.transfers


def test_a_trace_without_a_local_scan_has_no_parts() -> None:
    b = Builder(world_size=1).mark("ringprof::fwd/step=0/block", 0, 900).run(SCAN, 10, 50, launched=5)
    assert attribute([b.trace()], None).ranks[0].recurrence == ()


def test_blocked_time_of_a_recorded_run_is_that_of_its_waits() -> None:
    ranks = analysis(FOLDER).findings.attribution.ranks
    for rank in ranks:
        events = json.loads(gzip.decompress((FOLDER / f"rank{rank.rank}.json.gz").read_bytes()))["traceEvents"]
        spans = [
            (event["name"], event["ts"], event["ts"] + event["dur"]) for event in events
            if event.get("cat") == "user_annotation"
        ]  # fmt: skip
        (window,) = [(start, end) for name, start, end in spans if name == "ringprof::iteration"]
        waits = [
            (name, start, end) for name, start, end in spans
            if name.startswith("ringprof::wait") and window[0] <= start < window[1]
        ]  # fmt: skip
        assert waits
        expected: dict[tuple[str, str], float] = {}
        for name, start, end in waits:
            owner = ("", "halo") if name.endswith("/halo") else None
            for outer, first, last in spans:
                if outer in PARTS and PARTS[outer][1] == "state" and first <= start < last:
                    owner = PARTS[outer]
            assert owner is not None, name
            expected[owner] = expected.get(owner, 0) + end - start
        measured = {(row.phase, row.part): row.communication_ns / 1e3 for row in rank.recurrence if row.transfers}
        assert measured == pytest.approx(expected, abs=0.01)
        assert sum(measured.values()) == pytest.approx(rank.breakdown.exposed_comm_ns / 1e3, abs=0.01)
    assert {row.part for row in ranks[0].recurrence} == {"local", "state", "output", "halo"}
    assert KIND["recurrence"].group == "compute"


def test_parts_of_a_run_on_gpus_add_up_to_its_kernels() -> None:
    for rank in analysis(ON_GPUS).findings.attribution.ranks:
        events = json.loads(gzip.decompress((ON_GPUS / f"rank{rank.rank}.json.gz").read_bytes()))["traceEvents"]
        ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PARTS]
        (iteration,) = [event for event in events if event.get("name") == "ringprof::iteration"]
        calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
        launches = {event["args"]["correlation"]: event for event in calls}
        expected: dict[tuple[str, str], list[float]] = {PARTS[event["name"]]: [0.0, 0.0] for event in ranges}
        for kernel in events:
            launch = launches.get(kernel["args"]["correlation"]) if kernel.get("cat") == "kernel" else None
            # A barrier comes before the iteration.
            if launch is None or launch["ts"] < iteration["ts"]:
                continue
            (owner,) = [
                PARTS[event["name"]] for event in ranges
                if event["tid"] == launch["tid"] and event["ts"] <= launch["ts"] < event["ts"] + event["dur"]
            ]  # fmt: skip
            # Kernels of one kind run one after another: their times add up.
            expected[owner][kernel["name"].startswith("nccl")] += kernel["dur"]
        measured = {
            (row.phase, row.part): [row.compute_ns / 1e3, row.communication_ns / 1e3] for row in rank.recurrence
        }  # fmt: skip
        assert measured.keys() == expected.keys()
        for part, times in expected.items():
            assert measured[part] == pytest.approx(times, abs=0.01), part
        assert sum(row.compute_ns for row in rank.recurrence) == rank.breakdown.compute_ns
        assert sum(row.exposed_ns for row in rank.recurrence) == rank.breakdown.exposed_comm_ns
        assert [row.sent_bytes for row in rank.recurrence if row.transfers] == [16 * 128 * 128 * 4] * 2


def test_a_run_that_the_profiler_slows_says_how_long_it_computes() -> None:
    run = json.loads((ON_GPUS / "run.json").read_bytes())
    timed = median(map(max, *run["timings"]["iterations_ns"])) / 1e6
    computing, walls = [], []
    for rank in (0, 1):
        events = json.loads(gzip.decompress((ON_GPUS / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
        (started,) = [event["ts"] for event in events if event.get("name") == "ringprof::iteration"]
        kernels = [event for event in events if "stream" in event.get("args", {}) and event["ts"] > started]
        kernels = [event for event in kernels if event.get("cat") in ("kernel", "gpu_memcpy")]
        first, last = min(event["ts"] for event in kernels), max(event["ts"] + event["dur"] for event in kernels)
        walls.append((last - first) / 1e3)
        computing.append(
            sum(event["dur"] / 1e3 for event in kernels if not event["name"].startswith(("nccl", "Memcpy")))
        )
    compute, wall = fmean(computing), fmean(walls)
    text = " ".join(render(analysis(ON_GPUS).findings, TextStyle(width=200)).split())
    assert (
        f"computation takes {compute:.2f} ms of {wall:.2f} ms with the profiler (mean of ranks), and about as much of"
        f" the {timed:.2f} ms without it"
    ) in text
    assert "computation takes" not in render(analysis(RING).findings, TextStyle(width=200))


def test_the_page_of_a_recurrence_has_no_column_for_ring_steps() -> None:
    title = re.compile(r"<th[^>]*><button[^>]*>(.*?)</button>")
    columns = [title.findall(analysis(folder).to_html()) for folder in (ON_GPUS, RING)]
    assert ["ring step" in titles for titles in columns] == [False, True]
    assert all("cause" in titles for titles in columns)
