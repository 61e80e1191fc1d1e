"""Rules for the evidence of each part of a waterfall, and for warnings."""

from __future__ import annotations

import re

from ringprof.analysis.kinds.kinds import KIND
from tests.report.raw_facts import union_ns
from tests.report.sentence_rules import MS, Case, R, mean, milliseconds, rule, three_digits

# --- evidence -------------------------------------------------------------------------------------------------


@rule("evidence", rf"attention operators, mean {MS}")
def _cpu_attention(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[1], mean(rank.breakdown.flash_ns for rank in case.findings.attribution.ranks))
    assert case.on_cpu


@rule("evidence", r"union of the attention kernels; (?:the traces do not tell the work|no peak is known that fits|the "
      r"stated workload does not fit the counted FLOPs): not compared with a peak")  # fmt: skip
def _union(case: Case, m: re.Match[str]) -> None:
    assert case.summary["peak"] is None
    by_name = mean(raw.attention_ns for raw in case.raw.values())
    # Calls of attention also launch kernels that fill a tensor, whose names say nothing of attention.
    assert by_name - 1 < case.of("attention") < by_name * (1.01 if case.findings.layers else 1) + 1


@rule("evidence", rf"{R} TFLOP per device at {R} TFLOP/s \([^)]*\)")
def _needed(case: Case, m: re.Match[str]) -> None:
    peak = case.summary["peak"]["tflops"]
    assert float(m[2]) == peak and abs(case.of("peak") * peak * 1e3 - float(m[1].replace(",", "")) * 1e12) <= 0.051e12


@rule("evidence", rf"blocks of {R} times the work that the mask needs")
def _blocks(case: Case, m: re.Match[str]) -> None:
    assert (float(m[1]) > 1) >= (case.of("repeated") > 0.001 * case.wall)


@rule("evidence", rf"the same blocks alone: {R} TFLOP/s, {R}% of peak|{R} TFLOP/s in the run(?: against {R} alone)?")
def _rates(case: Case, m: re.Match[str]) -> None:
    solo, peak = case.summary["solo_tflops"], case.summary["peak"]["tflops"]
    if m[1]:
        assert abs(float(m[1].replace(",", "")) - solo) <= 0.051 and abs(float(m[2]) - 100 * solo / peak) <= 0.5
    flops = [work["block_flops"] for work in case.run["work"] or []]
    if m[3] and flops and None not in flops:
        rates = [
            rank_flops / row["kinds_ns"]["flash_fwd"]
            for rank_flops, row in zip(flops, case.ranks.values(), strict=False)
        ]
        assert float(m[3].replace(",", "")) <= 1.01 * max(rates) * case.summary["iterations"] / 1e3
    if m[4]:
        assert abs(float(m[4].replace(",", "")) - solo) <= 0.051


@rule("evidence", r"no solo rate:( repeated work and)? slow-down beside communication is in it")
def _no_solo(case: Case, m: re.Match[str]) -> None:
    assert case.summary["solo_tflops"] is None and bool(m[1]) == ("repeated" not in case.parts)


@rule("evidence", rf"rank (\d+) computes {MS}")
def _computes(case: Case, m: re.Match[str]) -> None:
    compute = {rank: row["compute_ns"] for rank, row in case.ranks.items()}
    milliseconds(m[2], compute[int(m[1])])
    assert compute[int(m[1])] in (min(compute.values()), max(compute.values()))
    assert case.on_cpu or compute[int(m[1])] == case.raw[int(m[1])].swept["compute"]


@rule("evidence", rf"each rank computes {MS}$")
def _all_compute(case: Case, m: re.Match[str]) -> None:
    (compute,) = {row["compute_ns"] for row in case.ranks.values()}
    milliseconds(m[1], compute)


@rule("evidence", r"on the wire with no computation beside it; (.*)$")
def _rates_on_wire(case: Case, m: re.Match[str]) -> None:
    rows = [row for row in case.summary["communication"] if row["wire_gbps"] is not None]
    named_rates = re.findall(rf"(\w+) {R} GB/s", m[1])
    assert len(named_rates) == min(3, len(rows)) or m[1] == "rates not known"
    for (kind, rate), row in zip(named_rates, rows, strict=False):
        assert kind == row["kind"]
        three_digits(rate, row["wire_gbps"])


@rule("evidence", r"(not beside attention; )?mean of all: (.*)$")
def _kinds(case: Case, m: re.Match[str]) -> None:
    recurrence = case.run is not None and (case.run["workload"] or {}).get("operator", "attention") != "attention"
    assert bool(m[1]) != recurrence and not (recurrence and {"flash_fwd", "flash_bwd"} & set(case.kinds))
    named_times = re.findall(rf"(\w+) {MS}", m[2])
    for kind, time in named_times:
        milliseconds(time, case.kinds[kind]["time_ns"])
        assert kind in KIND
    assert named_times or m[2] == "none"


@rule("evidence", r"waiting beyond what the ranks' computation differs by|its kernels have no wait and wire \(see "
      r"warnings\): exposed wire, peer wait and imbalance in one|communication of groups that were not asked for, with "
      r"nothing beside it|other work of the device runs, launched outside the window")  # fmt: skip
def _defined(case: Case, m: re.Match[str]) -> None:
    assert not case.on_cpu
    assert "see warnings" not in m[0] or case.report["warnings"]


@rule("evidence", r"nothing ran on the device before the next activity was launched, and in gaps below 5 us")
def _host_bound(case: Case, m: re.Match[str]) -> None:
    assert abs(case.of("launch_gaps") * len(case.ranks) - case.idle["host"] - case.idle["gap"]) < 2 * len(case.ranks)


@rule("evidence", r"nothing ran on the device, although the next activity had been launched, or no launch is recorded")
def _blocked(case: Case, m: re.Match[str]) -> None:
    assert abs(case.of("blocked") * len(case.ranks) - case.idle["blocked"]) < 2 * len(case.ranks)


@rule(
    "evidence",
    r"neither computing nor blocked|blocked in wait: on CPU wire, peer wait and imbalance are not told apart",
)
def _on_cpu(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu


# --- warnings -------------------------------------------------------------------------------------------------


@rule("warning", r"(\d+) of (\d+) ranks have no trace: ([\d, ]+)( \.\.\.)?$")
def _missing(case: Case, m: re.Match[str]) -> None:
    listed = {int(number) for number in re.findall(r"\d+", m[3])}
    absent = set(range(int(m[2]))) - set(case.ranks)
    assert int(m[1]) == len(absent) and listed <= absent and bool(m[4]) == (len(absent) > len(listed))


@rule("warning", rf"(\d+) kernels or copies beside the window have no launch record, as if launched before profiling: "
      rf"{MS}, {MS} of it communication, count as background")  # fmt: skip
def _launched_before(case: Case, m: re.Match[str]) -> None:
    (raw,) = case.raw.values()
    first, last = raw.activities[0].start, max(a.end for a in raw.activities)
    beside = [a for a in raw.outside if a.correlation not in raw.launches and a.start < last and a.end > first]
    assert int(m[1]) == len(beside)
    for text, kinds in ((m[2], ("comm", "compute", "memory")), (m[3], ("comm",))):
        spans = [(max(a.start, first), min(a.end, last)) for a in beside if a.kind in kinds]
        milliseconds(text, union_ns(spans))


@rule("warning", r"(\d+) copied hops do not tell which rank they write to: time blocked on a peer counts as idle")
def _nameless(case: Case, m: re.Match[str]) -> None:
    assert 0 < int(m[1]) <= sum(a.name.startswith("Memcpy PtoP") for raw in case.raw.values() for a in raw.activities)
    assert not any(row.get("blocked_on_peer_ns") for row in case.report["ranks"])


@rule("warning", r"(\d+) kernels or copies are 0 ns long")
def _zero(case: Case, m: re.Match[str]) -> None:
    assert int(m[1]) == sum(a.start == a.end for raw in case.raw.values() for a in raw.activities)


@rule("warning", r"(\d+) activities were replayed by CUDA graphs, whose launches are not recorded one by one: .*$")
def _replayed(case: Case, m: re.Match[str]) -> None:
    assert int(m[1]) <= max(len(raw.activities) for raw in case.raw.values())


@rule("warning", rf"the clocks of (\d+) hosts are aligned by their transfers, not known to agree: offsets up to {R} "
      rf"us, the largest residual (?:is not known|is {R} us)")  # fmt: skip
def _fitted(case: Case, m: re.Match[str]) -> None:
    clocks = case.summary["clocks"]
    assert int(m[1]) == clocks["hosts"] and (m[3] is None) == (clocks["residual_ns"] is None)
    assert abs(float(m[2].replace(",", "")) - max(map(abs, clocks["offsets_ns"].values())) / 1e3) <= 0.051


@rule("warning", r"a transfer ends before its partner begins: no wait and wire"
      r"(?:: if these ranks are of several nodes, --ranks-per-node has their clocks fitted)?$")  # fmt: skip
def _clocks_apart(case: Case, m: re.Match[str]) -> None:
    sent = [[a for a in raw.activities if a.kind == "comm"] for raw in case.raw.values()]
    assert any(max(a.start for a in calls) > min(a.end for a in calls) for calls in zip(*sent, strict=True))
    assert all(part.wire_ns is None for rank in case.findings.attribution.ranks for part in rank.splits)


UNMATCHED = (
    "transfers whose peers' traces are not here",
    "transfers that two ranks count differently",
    "transfers whose bytes two ranks record differently",
    "communication kernels without a record of peers and bytes",
    "kernels wait less than the clocks of their hosts can tell",
)


@rule("warning", rf"(?:{'|'.join(UNMATCHED)}): no wait and wire for them")
def _unmatched(case: Case, m: re.Match[str]) -> None:
    transfers = [part for rank in case.findings.attribution.ranks for part in rank.splits]
    assert any(part.wire_ns is None for part in transfers)
    assert "not here" not in m[0] or "missing_ranks" in case.codes


@rule("warning", rf"attention FLOPs of (\d+) ranks? \((\d+) per workload\): {R} [MGTPE]?FLOP stated, {R} [MGTPE]?FLOP "
      rf"counted \({R} times\); TFLOP/s use the stated workload: .*$")  # fmt: skip
def _flops_differ(case: Case, m: re.Match[str]) -> None:
    assert int(m[1]) == case.run["topology"]["world_size"] and abs(float(m[5]) - 1) > 0.01


@rule("warning", r"on CPU a transfer's own time is not recorded: no overlap, wait and wire")
def _no_times(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu and all(row["waits"] is None for row in case.ranks.values())


@rule("warning", r"no ringprof::wait or gloo range: what communication cost is not in the trace")
def _no_marks(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu and not any(raw.blocked_ns for raw in case.raw.values())


@rule("warning", r"no activity was launched in the marked iterations: the whole trace is shown")
def _empty(case: Case, m: re.Match[str]) -> None:
    assert any(raw.marked for raw in case.raw.values())


@rule("warning", rf".*of (\d+) devices only (\d+) is reported, the busiest; others are busy for {MS}")
def _devices(case: Case, m: re.Match[str]) -> None:
    (raw,) = case.raw.values()
    busy_ns = {device: 0 for device in {a.device for a in raw.activities}}
    for activity in raw.activities:
        busy_ns[activity.device] += activity.end - activity.start
    assert int(m[1]) == len(busy_ns) > 1 and busy_ns[int(m[2])] == max(busy_ns.values())
    milliseconds(m[3], sum(busy_ns.values()) - max(busy_ns.values()))


@rule("warning", r"communication kernels have no record of their group: matched as the n-th of a stream on every rank, "
      rf"which all end within {R} us of one another")  # fmt: skip
def _by_ends(case: Case, m: re.Match[str]) -> None:
    assert len(case.ranks) > 1


@rule(
    "warning",
    r"the run used a GPU, and nothing of what ran there is in the trace: .*|what ran on the device is not read: .*",
)
def _lacks_device(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu
