"""Decision whether traces without a workload are of the same work, on jobs whose work is known."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.comparison import combine_recordings, compare_measurements
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.analysis.findings.same_work import WORK, WorkMatch, match_work, missing_setting_text
from ringprof.report.comparison import render_json, verdict_lines, work_notices
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY
from tests.analysis.build import FLASH, Builder

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
OTHER_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64"


def job(
    *,
    ranks: int = 2,
    world: int = 2,
    steps: int = 1,
    marked: bool = True,
    gemms: int = 3,
    gemm: str = GEMM,
    length: int = 1000,
    copied: bool = False,
    host_bytes: int = 64,
    slower: int = 0,
    hop_ns: int = 50,
) -> Measurement:
    """Return a job whose steps are an input copy, an attention kernel, matrix products, and a hop of K and V in a ring.

    ``length`` in bf16 numbers sets the bytes of a hop (K and V: 4 bytes per number); ``copied`` moves them in four
    copies instead of one NCCL kernel.
    """
    builders = [Builder(rank=rank, world_size=world) for rank in range(ranks)]
    for rank, builder in enumerate(builders):
        now = 0
        for number in range(steps):
            begin, now = now, now + 1000
            builder.run("Memcpy HtoD (Pinned -> Device)", now, now + 10, launched=now, category=MEMCPY, size=host_bytes)
            for name in [FLASH, *[gemm] * gemms]:
                now += 100
                builder.run(name, now, now + 90 + slower, launched=now)
            now += 100
            if copied:
                for part in range(4):
                    builder.run("Memcpy PtoP (Device -> Device)", now + part * 9, now + part * 9 + 8, launched=now,
                                category=MEMCPY, size=length, stream=30)  # fmt: skip
            else:
                builder.batch(now, now, now + hop_ns, to=(rank + 1) % world, source=(rank - 1) % world, elements=length,
                              group_ranks=tuple(range(world)), group_size=world)  # fmt: skip
            now += 1000
            if marked:
                builder.mark(f"ProfilerStep#{number}", begin, now)
    return measurement_of_run("job", findings_in_memory(attribute([builder.trace() for builder in builders])))


@pytest.mark.parametrize(
    ("other", "evidence"),
    [
        (job(), "the same 8 computation kernels per iteration on 2 ranks, equal by kind and name, the same bytes sent, "
                "the same bytes copied from the host; shapes and masks are not compared"),
        (job(slower=5), "equal by kind and name"),
        (job(steps=3), "the same 8 computation kernels per iteration"),
        # An autotuner chooses another kernel, a transport sends the same bytes in other calls.
        (job(gemm=OTHER_GEMM), "equal by kind, 6 of them with other names"),
        (job(copied=True), "equal by kind and name, the same bytes sent"),
    ],
)  # fmt: skip
def test_equal_computation_and_bytes_are_the_same_work(other: Measurement, evidence: str) -> None:
    match = match_work(job(), other)
    assert (match.same, match.by) == (True, "traces")
    assert evidence in match.text
    assert match.text.endswith("shapes and masks are not compared")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (job(gemms=4), "rank 0 runs 4 calls of kind matrix product per iteration against 3"),
        (job(gemms=0), "rank 0 runs 0 calls of kind matrix product per iteration against 3"),
        # Twice the sequence: the same kernels, twice the bytes.
        (job(length=2000), "rank 0 sends 8 kB per iteration against 4 kB"),
        (job(length=2000, copied=True), "rank 0 sends 8 kB per iteration against 4 kB"),
        (job(host_bytes=128), "rank 0 copies from the host 128 B per iteration against 64 B"),
        # Two unmarked steps look like one step of twice the work.
        (job(steps=2, marked=False), "rank 0 runs 2 calls of kind flash forward per iteration against 1"),
        (job(ranks=1), "traces of 1 ranks against 2"),
        (job(ranks=2, world=4), "world size 4 against 2"),
    ],
)
def test_traces_with_different_kernels_are_not_the_same_work(other: Measurement, reason: str) -> None:
    assert match_work(job(), other) == WorkMatch(same=False, by="traces", text=reason)
    assert match_work(other, job()).same is False
    comparison = compare_measurements([job(), other])
    assert work_notices(comparison) == [
        f"Work not known to be the same ({reason}): times and memory are not compared. "
        "If it is the same, add --same-work."
    ]
    assert {
        difference.verdict for difference in comparison.differences if difference.figure in ("wall_ms", "compute_ms")
    } == {"not comparable"}
    assert match_work(job(), other, did_same_work=True) == WorkMatch(same=True, by="user")


def test_unrecorded_bytes_do_not_count_as_different_work() -> None:
    def with_sent(sent: int | None) -> Measurement:
        entry = job()
        assert entry.evidence is not None
        ranks = tuple(replace(rank, sent_bytes=sent) for rank in entry.evidence.ranks)
        return replace(entry, evidence=replace(entry.evidence, ranks=ranks))

    for unknown in (None, 0):
        match = match_work(job(), with_sent(unknown))
        assert match.same and "bytes sent" not in match.text


def test_stated_workloads_decide_before_traces() -> None:
    stated = dict.fromkeys(WORK, "1")
    base = replace(job(), settings=stated)
    assert match_work(base, replace(job(gemms=4), settings=stated)) == WorkMatch(same=True, by="settings")
    longer = match_work(base, replace(job(), settings={**stated, "seq": "2"}))
    assert longer == WorkMatch(same=False, by="settings", text="seq 2 against 1")
    # The same new tokens over a cache of another length.
    cached = [replace(job(), settings={**stated, "kv_length": length}) for length in ("1024", "2048")]
    assert match_work(*cached) == WorkMatch(same=False, by="settings", text="kv_length 2048 against 1024")
    masked = match_work(base, replace(job(), settings={**stated, "mask": "window"}))
    assert masked.text == "mask window against plain"
    assert [missing_setting_text(name, stated) for name in ("operator", "kernel", "-p chunk")] == [
        "attention", "unknown", "-"
    ]  # fmt: skip
    assert missing_setting_text("operator", {"seq": "1"}) == "unknown"
    # One side states a length, the other nothing: the traces decide.
    assert match_work(base, job()).by == "traces"
    assert match_work(base, replace(job(), settings={"seq": "2"})).text == "seq 2 against 1"


def test_traces_without_computation_are_compared_by_all_their_calls() -> None:
    def benchmark(hops: int) -> Measurement:
        builders = [Builder(rank=rank, world_size=2) for rank in (0, 1)]
        for rank, builder in enumerate(builders):
            for hop in range(hops):
                builder.batch(100 + 900 * hop, 100 + 900 * hop, 200 + 900 * hop, to=1 - rank, source=1 - rank)
        return measurement_of_run("hops", findings_in_memory(attribute([builder.trace() for builder in builders])))

    match = match_work(benchmark(3), benchmark(3))
    assert match.same and match.text.startswith(
        "the same 6 calls per iteration on 2 ranks, equal by kind, the same bytes"
    )
    differs = match_work(benchmark(3), benchmark(4))
    assert differs.text == "rank 0 runs 4 calls of kind send/recv per iteration against 3"
    assert not match_work(benchmark(3), job()).same


def test_log_entry_has_no_work_evidence() -> None:
    log = Measurement("x.log:7", "log", {"seq": "8"})
    assert match_work(job(), log) == WorkMatch(same=False, by="nothing", text="job does not state its workload")
    stated = replace(job(), settings=dict.fromkeys(WORK, "1"))
    assert match_work(stated, Measurement("x.log:7", "log", {})).text == "x.log:7 does not state its workload"
    partly = Measurement("x.log:7", "log", {**dict.fromkeys(WORK, "1"), "heads": None, "dtype": None})
    assert match_work(stated, partly).text == "x.log:7 does not state heads, dtype"


def test_combined_recordings_of_the_same_work_keep_the_evidence() -> None:
    assert match_work(job(), combine_recordings([job(), job(slower=5)])).same
    assert combine_recordings([job(), job(gemms=4)]).evidence is None


def test_work_evidence_appears_beside_the_verdict_and_in_json() -> None:
    # From the input copy at 0 to the end of the hop: 550 and 605 ns.
    comparison = compare_measurements([job(), job(hop_ns=105)])
    first, second, *_ = verdict_lines(comparison)
    assert first == "1: mean wall longer by 10.0 %, measured once"
    assert second.startswith("1: taken as the same work: the same 8 computation kernels")
    assert '"by": "traces"' in render_json(comparison)


def test_entries_of_different_work_are_named() -> None:
    stated = dict.fromkeys(WORK, "1")
    time = Metric(5, "ms", depends_on_work=True)
    entries = [Measurement(str(number), "log", {**stated, "seq": str(seq)}, {"t": time})
               for number, seq in enumerate([1, 1, 2, 3])]  # fmt: skip
    unknown = Measurement("u", "log", {}, {"t": time})
    assert work_notices(compare_measurements([*entries, unknown])) == [
        "Different work (seq 2 against 1): times and memory of 2 and 3 are not compared.",
        "Work not known to be the same (u does not state its workload): times and memory of 4 are not compared. "
        "If it is the same, add --same-work.",
    ]
    many = work_notices(compare_measurements([entries[0], *[entries[2]] * 5]))
    assert many == ["Different work (seq 2 against 1): times and memory of 5 entries are not compared."]
    assert work_notices(compare_measurements(entries[:2])) == []
