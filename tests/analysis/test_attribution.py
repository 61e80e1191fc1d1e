"""Attribution of traces: ranks, hosts, iterations, and inconsistent input."""

from __future__ import annotations

import pytest

import ringprof
from ringprof.analysis.attribution import RunInfo, merge_warnings, read_run_info
from ringprof.analysis.timeline.window import EVERYTHING
from ringprof.errors import InputError, TraceFormatError
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Notice
from ringprof.trace.one_run import checked_facts, facts_of
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.recorded import recorded_run
from tests.trace.kineto_text import document, kernel


def rank_builder(rank, *, start=1000, world_size=4):
    """Return a trace builder for a rank with one attention kernel of 100 ns."""
    return Builder(rank=rank, world_size=world_size).run(FLASH, start, start + 100, launched=10)


def attribute_all(*builders, **options):
    return attribute([b.trace(f"file{n}.json") for n, b in enumerate(builders)], **options)


def codes(attribution):
    return [warning.code for warning in attribution.warnings]


def test_ranks_are_sorted():
    attribution = attribute_all(rank_builder(1, world_size=2), rank_builder(0, world_size=2))
    assert [rank.rank for rank in attribution.ranks] == [0, 1]
    assert codes(attribution) == []


def test_two_traces_of_one_rank_are_refused_by_name():
    with pytest.raises(InputError, match=r"file1.json and file0.json are both of rank 1"):
        attribute_all(rank_builder(1), rank_builder(1))


def test_repeated_profiler_schedule_error_names_the_last_files(tmp_path):
    """Two ranks, three recordings each, as the handler of TensorBoard names them: neither rank nor number."""
    for recording, start in enumerate((1000, 5000, 9000)):
        for rank in (0, 1):
            info = {"backend": "nccl", "rank": rank, "world_size": 2}
            text = document([kernel(1, ts=start + 100 * rank, dur=500)], distributedInfo=info)
            (tmp_path / f"vm_70{1 - rank}.{recording}.pt.trace.json").write_bytes(text)
    with pytest.raises(InputError, match="both of rank") as refused:
        ringprof.load(tmp_path)
    assert "these are of 3, one after another" in str(refused.value)
    last_paths = [str(tmp_path / f"vm_70{number}.2.pt.trace.json") for number in (1, 0)]
    assert str(refused.value).endswith(f"The last: {' '.join(last_paths)}")
    assert [rank.rank for rank in ringprof.load(last_paths).attribution.ranks] == [0, 1]


def test_runs_of_different_size_are_refused():
    with pytest.raises(InputError, match=r"file0.json is of a run of 4 ranks, file1.json of 8"):
        attribute_all(rank_builder(0), rank_builder(1, world_size=8))


def test_missing_ranks_are_a_warning():
    (warning,) = attribute_all(rank_builder(0), rank_builder(2)).warnings
    assert (warning.code, warning.message) == ("missing_ranks", "2 of 4 ranks have no trace: 1, 3")


def test_single_trace_without_world_size_has_world_size_1():
    attribution = attribute_all(rank_builder(2, world_size=None))
    assert ([rank.rank for rank in attribution.ranks], attribution.world_size, codes(attribution)) == ([2], 1, [])


def test_world_size_is_inferred_from_the_highest_rank():
    (warning,) = attribute_all(rank_builder(0, world_size=None), rank_builder(3, world_size=None)).warnings
    assert warning.message == "2 of 4 ranks have no trace: 1, 2"


def test_trace_without_a_rank_takes_an_unused_rank():
    attribution = attribute_all(rank_builder(0, world_size=2), rank_builder(None, world_size=2))
    assert [rank.rank for rank in attribution.ranks] == [0, 1]
    assert codes(attribution) == ["unknown_rank"]


def test_single_trace_without_rank_is_rank_0_without_warnings():
    attribution = attribute_all(rank_builder(None, world_size=None))
    assert (attribution.ranks[0].rank, codes(attribution)) == (0, [])


def test_traces_that_never_overlap_are_mixed_runs():
    builders = [rank_builder(0, world_size=2), rank_builder(1, start=10_000, world_size=2)]
    for rank, b in enumerate(builders):
        start = 1000 + 9000 * rank
        b.run(NCCL, start, start + 50, launched=30, own=collective("allreduce", group_ranks=(0, 1), group_size=2))
    attribution = attribute_all(*builders)
    assert codes(attribution) == ["mixed_runs"]
    assert attribution.ranks[0].splits[0].wait_ns is None


def test_ranks_of_a_recorded_run_need_not_overlap():
    """Rank 0 computes on CPU from 0 to 100, rank 1 from 5000 on, and no transfer is matched."""
    builders = [
        Builder(rank=rank, world_size=2).operate("aten::mm", start, start + 100) for rank, start in ((0, 0), (1, 5000))
    ]
    traces = [b.trace() for b in builders]
    facts = checked_facts([facts_of(trace) for trace in traces])
    with pytest.raises(InputError, match="do not overlap in time"):
        read_run_info(facts, None, None, EVERYTHING)
    run = recorded_run(world_size=2)
    assert read_run_info(facts, run, None, EVERYTHING).warnings == ()
    assert "mixed_runs" not in codes(attribute(traces, run))


def test_a_trace_with_nothing_to_analyse_is_refused():
    with pytest.raises(TraceFormatError, match="nothing to report"):
        attribute_all(Builder())


def test_empty_list_of_traces_is_refused():
    with pytest.raises(InputError):
        attribute([])


def test_busiest_of_several_devices_is_reported():
    b = rank_builder(0, world_size=1).run(FLASH, 1200, 1300, launched=20).run(FLASH, 1200, 1800, launched=30, device=1)
    attribution = attribute_all(b)
    assert codes(attribution) == ["several_devices"]
    assert attribution.ranks[0].breakdown.wall_ns == 600  # of one activity, where the other device has several


def test_iterations_are_analysed_separately_and_together():
    b = Builder(world_size=1)
    for number in range(3):
        start = 1000 * number
        b.mark("ringprof::iteration", start, start + 500).run(FLASH, start + 20, start + 320, launched=start + 10)
    b.run(FLASH, 5000, 6000, launched=4000)
    (rank,) = attribute_all(b).ranks
    assert [part.wall_ns for part in rank.iterations] == [300, 300, 300]
    assert (rank.breakdown.wall_ns, rank.breakdown.compute_ns, rank.breakdown.idle_ns) == (2300, 900, 1400)


def test_median_of_an_even_number_of_iterations_is_the_lower_middle():
    b = Builder(world_size=1)
    for number, length in enumerate((400, 100, 300, 200)):
        start = 1000 * number
        b.mark("ringprof::iteration", start, start + 500)
        b.run(FLASH, start + 20, start + 20 + length, launched=start + 10)
    # 100, 200, 300 and 400 ns: the second shortest is the last.
    assert attribute_all(b).median_iteration == 3


def test_marks_around_nothing_are_a_warning():
    b = rank_builder(0, world_size=1).mark("ringprof::iteration", 5000, 6000)
    assert codes(attribute_all(b)) == ["window_empty"]


def test_hosts_come_from_the_traces_or_the_option():
    named, unnamed = rank_builder(0, world_size=2), rank_builder(1, world_size=2)
    named.host = "alpha"
    assert [rank.host for rank in attribute_all(named, unnamed).ranks] == ["alpha", None]
    with_option = attribute_all(named, unnamed, ranks_per_host=1)
    assert [rank.host for rank in with_option.ranks] == ["host0", "host1"]


def test_equal_warnings_of_many_ranks_are_merged():
    builders = [rank_builder(rank) for rank in range(4)]
    for b in builders:
        b.run(NCCL, 1100, 1200, launched=30)
    (warning,) = attribute_all(*builders).warnings
    assert (warning.code, warning.count, warning.rank) == ("no_record", 4, None)


def test_chosen_times_are_converted_to_each_rank_clock():
    """Rank 1's clock is 500 ns behind: its trace begins at 600 of its own, which is 1100 of rank 0's."""
    info = RunInfo(
        trace_index={0: 0, 1: 1}, hosts={0: "a", 1: "b"}, clock_of={0: "a", 1: "b"}, warnings=(), world_size=2,
        expected=(0, 1), starts_ns={0: 1000, 1: 600}, chosen_ns=(10, 20),
        offset_ns={0: 0, 1: 500},
    )  # fmt: skip
    assert info.chosen_by_rank() == {0: (1010, 1020), 1: (510, 520)}


def test_merged_warning_sums_the_counts_of_ranks():
    (merged,) = merge_warnings([Notice("code", "message", rank, count) for rank, count in ((0, 3), (1, 5), (2, 7))])
    assert merged == Notice("code", "message", None, 15)


def test_warning_messages_are_complete():
    """Messages are complete, and equal warnings of several ranks are merged."""
    b = Builder().run(FLASH, 0, 10, device=0).run(FLASH, 20, 30, device=0).run(FLASH, 40, 50, device=1)
    (warning,) = attribute([b.trace("a.json")]).warnings[:1]
    assert warning.message == "a.json: of 2 devices only 0 is reported, the busiest; others are busy for 0.000 ms"
    builders = [Builder(rank=rank, world_size=2, host=f"node{rank}") for rank in range(2)]
    for rank, b in enumerate(builders):
        for number in range(10):
            start = 10_000_000 * number + 3_000_000 * rank
            b.batch(
                1000 * number + 500, start, start + 1_000_000, to=1 - rank, source=1 - rank, tensors=1,
                group_ranks=(0, 1), group_size=2,
            )  # fmt: skip
    message_of_code = {warning.code: warning.message for warning in attribute([b.trace() for b in builders]).warnings}
    assert message_of_code["clocks_fitted"].startswith(
        "the clocks of 2 hosts are aligned by their transfers, not known to agree: offsets up to 3000.0 us, "
        "the largest residual is "
    )
    without_calls = [Builder(rank=rank, world_size=2).run(NCCL, 0, 10, launched=1) for rank in range(2)]
    without_record = [
        rank_builder
        for rank_builder in attribute([b.trace() for b in without_calls]).warnings
        if rank_builder.code == "no_record"
    ]
    assert [(rank_builder.count, rank_builder.rank) for rank_builder in without_record] == [(2, None)]


def test_traces_of_two_runs_need_the_mixed_runs_option(tmp_path):
    for rank, start in ((0, 1000), (1, 5000)):
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        text = document([kernel(number, ts=start + 100 * number) for number in range(10)], distributedInfo=info)
        (tmp_path / f"rank{rank}.json").write_bytes(text)
    with pytest.raises(InputError, match=r"rank0.json and .*rank1.json do not overlap in time.*--mixed-runs"):
        ringprof.load(tmp_path)
    assert "mixed_runs" in [warning.code for warning in ringprof.load(tmp_path, mixed_runs=True).warnings]


def test_truncated_trace_is_left_out_and_not_another_run(tmp_path):
    for rank, start in ((0, 5000), (1, 1000), (2, 5000)):
        info = {"backend": "nccl", "rank": rank, "world_size": 3}
        text = document([kernel(number, ts=start + 100 * number) for number in range(10)], distributedInfo=info)
        (tmp_path / f"rank{rank}.json").write_bytes(text if rank != 1 else text[: len(text) * 2 // 3])
    run = ringprof.load(tmp_path)
    assert [rank.rank for rank in run.attribution.ranks] == [0, 2]
    assert {"truncated", "left_out", "missing_ranks"} == set(codes(run.attribution))
