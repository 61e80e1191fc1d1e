"""Windows that are part of what runs: the rest hides communication, is not idle, and all parts sum to the wall."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.timeline.window import Focus
from ringprof.report import as_json
from ringprof.run import Work
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY
from ringprof.workload.workload import Workload
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run

KERNELS = {"compute": (FLASH, 0), "comm": (NCCL, 0), "memory": ("Memcpy DtoD (Device -> Device)", MEMCPY)}
EVENT = st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from(sorted(KERNELS)), st.booleans())


def breakdown_of_range(events, **focus):
    """Break down a rank whose events ran inside the range ``mine`` where their last element is true, else outside."""
    b = Builder(world_size=1).mark("mine", 1000, 2000)
    for number, (start, length, name, inside) in enumerate(events):
        kernel, category = KERNELS[name]
        b.run(kernel, start, start + length, category=category, launched=(1000 if inside else 3000) + number)
    (rank,) = attribute([b.trace()], focus=Focus(window="mine", **focus)).ranks
    return rank.breakdown


def count_nanoseconds(events):
    """Count the nanoseconds of each part by classifying every single one."""
    in_range = [event for event in events if event[3]]
    first, last = min(start for start, *_ in in_range), max(start + length for start, length, *_ in in_range)
    parts = dict.fromkeys(("compute", "exposed_comm", "exposed_memory", "background", "idle"), 0)
    overlapped = 0
    for moment in range(first, last):
        running = {(name, inside) for start, length, name, inside in events if start <= moment < start + length}
        computing = ("compute", True) in running or ("compute", False) in running
        sending = ("comm", True) in running or ("comm", False) in running
        overlapped += ("comm", True) in running and computing
        if ("compute", True) in running:
            parts["compute"] += 1
        elif ("comm", True) in running and not computing:
            parts["exposed_comm"] += 1
        elif ("memory", True) in running and not computing and not sending:
            parts["exposed_memory"] += 1
        else:
            parts["background" if running else "idle"] += 1
    return {**parts, "overlapped": overlapped, "wall": last - first}


@given(st.lists(EVENT, min_size=1, max_size=20).filter(lambda events: any(event[3] for event in events)))
def test_every_part_equals_a_count_of_nanoseconds(events):
    expected = count_nanoseconds(events)
    breakdown = breakdown_of_range(events)
    assert {name: getattr(breakdown, f"{name}_ns") for name in expected} == expected


def test_communication_is_hidden_by_background_computation():
    breakdown = breakdown_of_range([(0, 100, "comm", True), (10, 80, "compute", False), (150, 10, "comm", True)])
    assert (breakdown.comm_ns, breakdown.overlapped_ns, breakdown.exposed_comm_ns) == (110, 80, 30)
    assert (breakdown.background_ns, breakdown.idle_ns, breakdown.wall_ns) == (80, 50, 160)
    assert breakdown.kinds["send_recv"].hidden_ns == 80


def test_exposed_wire_and_wait_exclude_background_computation():
    """Check one hop of two ranks, the second 300 ns late, with a block of 400 ns outside the range beside it."""
    builders = [Builder(rank=rank, world_size=2).mark("mine", 0, 200) for rank in range(2)]
    for rank, b in enumerate(builders):
        b.batch(
            100, 1000 + 300 * rank, 2000, to=1 - rank, source=1 - rank, tensors=1, group_ranks=(0, 1), group_size=2
        )  # fmt: skip
    builders[0].run(FLASH, 1100, 1500, launched=900)
    first, second = attribute([b.trace() for b in builders], focus=Focus(window="mine")).ranks
    # Wait from 1000 to 1100, then overlapped by the block until 1500, then exposed wire.
    assert (first.exposed.wait_ns, first.exposed.wire_ns, first.breakdown.exposed_comm_ns) == (100, 500, 600)
    assert first.exposed.by_group == {("send_recv", "cp"): 600}
    assert (second.exposed.wait_ns, second.exposed.wire_ns) == (0, 700)


def test_window_of_all_activities_has_no_background():
    assert breakdown_of_range([(0, 10, "compute", True), (5, 10, "comm", True)]).background_ns == 0


def test_partial_window_omits_rates_of_whole_iterations():
    work = [Work(block_flops=10**9, block_calls={"forward": 1}, sent=[])] * 4
    run = recorded_run(work=work, workload=Workload(seq=4096, heads=8, kv_heads=8, head_dim=64))
    traces = [builder.trace() for builder in ring_with_compute()]
    whole = findings_in_memory(attribute(traces, run))
    part = findings_in_memory(attribute(traces, run, focus=Focus(between_ns=(0, 500))))
    assert whole.summary.rates.block_tflops is not None and whole.summary.rates.tflops is not None
    summaries = [as_json.as_dict(findings, source="run", paths=[])["summary"] for findings in (whole, part)]
    assert [summary["partial_window"] for summary in summaries] == [False, True]
    rates = ("tflops", "tflops_quantiles", "block_tflops", "solo_tflops", "controls", "profiler_overhead")
    assert [summaries[1][name] for name in rates] == [None] * len(rates)
