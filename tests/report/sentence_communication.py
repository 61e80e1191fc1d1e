"""Rules for the verdict's sentences about communication, and about what could be gained."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

from ringprof.analysis.kinds.kinds import COMMUNICATION, KIND
from ringprof.analysis.kinds.rules import rule_for
from tests.report.raw_facts import union_ns
from tests.report.sentence_rules import (
    COMMUNICATION_PARTS,
    MS,
    Case,
    P,
    R,
    mean,
    milliseconds,
    percent,
    rule,
    three_digits,
)

FAMILIES = {
    "all-reduce": "AllReduce", "all-gather": "AllGather", "reduce-scatter": "ReduceScatter", "broadcast": "Broadcast",
    "send/recv": "SendRecv|AllToAll", "all-to-all": "SendRecv|AllToAll", "peer copies": "Memcpy PtoP",
}  # fmt: skip
LABELS = "|".join(KIND[kind].label for kind in COMMUNICATION)
OPERATIONS = {KIND[kind].operation or KIND[kind].label: kind for kind in COMMUNICATION}


# --- what it cost -----------------------------------------------------------------------------------------


@rule("verdict", r"one (GPU|process): nothing is communicated")
def _alone(case: Case, m: re.Match[str]) -> None:
    assert len(case.ranks) == 1 and not any(row["comm_ns"] for row in case.ranks.values())
    assert all(rank.world_size in (None, 1) for rank in case.findings.attribution.ranks)
    assert (m[1] == "process") == case.on_cpu
    assert len({a.device for raw in case.raw.values() for a in raw.activities}) <= 1


@rule("verdict", r"no communication in these traces")
def _silent(case: Case, m: re.Match[str]) -> None:
    assert not any(a.kind == "comm" for raw in case.raw.values() for a in (*raw.activities, *raw.outside))
    assert not any(row["comm_ns"] for row in case.ranks.values())


@rule("verdict", rf"no communication in what is reported; the rest of these traces has {MS} of it per (GPU|process)")
def _silent_here(case: Case, m: re.Match[str]) -> None:
    outside = [[(a.start, a.end) for a in raw.outside if a.kind == "comm"] for raw in case.raw.values()]
    milliseconds(m[1], mean(union_ns(spans) for spans in outside))
    assert not any(row["comm_ns"] for row in case.ranks.values()) and (m[2] == "process") == case.on_cpu


@rule("verdict", rf"no known communication; {P} of the time is kernels of unknown kind, the longest (.+)$")
def _unknown(case: Case, m: re.Match[str]) -> None:
    assert not any(a.kind == "comm" for raw in case.raw.values() for a in raw.activities)
    assert len(case.ranks) > 1 or any((rank.world_size or 1) > 1 for rank in case.findings.attribution.ranks)
    unknown = {rank: [a for a in raw.activities if rule_for(a.name) is None] for rank, raw in case.raw.items()}
    share = mean(union_ns((a.start, a.end) for a in rows) for rows in unknown.values()) / case.mean_wall
    percent(m[1], share)
    assert share >= 0.1
    time_of_name: Counter[str] = Counter()
    for activity in chain(*unknown.values()):
        time_of_name[activity.name[:80]] += activity.end - activity.start
    assert time_of_name[m[2]] == max(time_of_name.values())


@rule("verdict", rf"{P} of the time is exposed communication(?:, {P} at worst \(rank (\d+)\))?")
def _exposed(case: Case, m: re.Match[str]) -> None:
    percent(m[1], mean(case.exposed) / case.mean_wall)
    if m[2]:
        shares = {rank: row["exposed_comm_ns"] / row["wall_ns"] for rank, row in case.ranks.items()}
        percent(m[2], shares[int(m[3])])
        assert shares[int(m[3])] == max(shares.values())


@rule("verdict", r"time blocked in waiting for a transfer")
def _cpu_only(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu


@rule("verdict", rf"{P} of all communication is hidden behind computation")
def _hidden(case: Case, m: re.Match[str]) -> None:
    assert sum(case.swept("overlapped")) == sum(row["overlapped_ns"] for row in case.ranks.values())
    percent(m[1], sum(case.swept("overlapped")) / sum(case.swept("comm")))


@rule("verdict", r"partly at the same time")
def _at_once(case: Case, m: re.Match[str]) -> None:
    (line,) = (line for line in case.summary["verdict"] if m[0] in line)
    whole, *shares = map(float, re.findall(r"([\d.]+) %", re.sub(r", [\d.]+ % at worst", "", line)))
    assert len(shares) == 2 and sum(shares) > whole - 0.1


@rule("verdict", rf"{P} (blocked in waiting for a transfer|{LABELS})(?: of group (\S+?))?(?=, [\d.]+ %|, partly|\.$)")
def _kinds_exposed(case: Case, m: re.Match[str]) -> None:
    if m[2] == "blocked in waiting for a transfer" or case.on_cpu:
        assert float(m[1]) <= 100 * mean(case.exposed) / case.mean_wall + 0.06
        return
    exposed_ns = sum(raw.exposed_ns(re.compile(FAMILIES[m[2]])) for raw in case.raw.values())
    share = exposed_ns / sum(case.swept("wall"))
    is_only_kind = len({k for k in case.kinds if k in ("send_recv", "all_to_all")}) < 2 or "Send" not in FAMILIES[m[2]]
    if m[3] or not is_only_kind or case.by_copies:
        assert float(m[1]) <= 100 * share + 0.06 + 100 * case.by_copies
    else:
        percent(m[1], share)


@rule("verdict", r"Missing: all that ran on the GPU\. The times are the CPU's, which launches it and waits for it "
      r"\(no_device_activities\)")  # fmt: skip
def _no_device(case: Case, m: re.Match[str]) -> None:
    assert "no_device_activities" in case.codes and case.on_cpu


MISSING = {
    "the end of what is cut off, so that all figures are of what comes before": {"truncated", "damaged_compression"},
    "traces that are left out": {"left_out"},
    "a moment that all traces have in common": {"mixed_runs"},
    "anything launched in the marked iterations; the whole trace is shown": {"window_empty"},
}


@rule("verdict", r"Missing: (.*) \(see warnings\)")
def _missing(case: Case, m: re.Match[str]) -> None:
    named = [codes for words, codes in MISSING.items() if words in m[1]]
    assert named and all(codes & case.codes for codes in named)


# --- where it came from: communication -----------------------------------------------------------------------


def assert_largest_communication(case: Case, part: str) -> None:
    assert case.of(part) == max(case.of(name) for name in COMMUNICATION_PARTS)


@rule("verdict", rf"{P} of the time is bytes on a wire with nothing to hide them")
def _wire(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("exposed_wire") / case.mean_wall)
    assert_largest_communication(case, "exposed_wire")
    assert case.of("exposed_wire") <= mean(case.exposed)


WAITS = r"waiting for peers( whose hops are slow)?(, or for the slowest rank to end)?"


@rule("verdict", rf"{P} of the slowest rank's wall is {WAITS}(,? beyond what their computation differs by)?")
def _peer_wait(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("peer_wait") / case.wall)
    assert_largest_communication(case, "peer_wait")
    assert bool(m[2]) != bool(m[4])
    mean_early_end = mean(case.wall - row["wall_ns"] for row in case.ranks.values())
    assert mean_early_end <= 0.1 * case.of("peer_wait") or m[3], "ranks that are done wait for no peer"


@rule("verdict", rf"{P} wire")
def _also_wire(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("exposed_wire") / case.wall)


@rule("verdict", rf"(most waited for: )?rank (\d+) \({P} of all waiting\)")
def _waited_for(case: Case, m: re.Match[str]) -> None:
    assert_waited_for(case, int(m[2]), m[3])


def assert_waited_for(case: Case, rank: int, share: str) -> None:
    """Assert a rank's share of all waiting by an independent count, and that the rank is among the largest.

    The tolerance is 2 %, or 10 % where hops are copies, of which only departures are counted.
    """
    total_ns = sum(case.waited_for.values())
    assert total_ns, "nobody waits for anybody"
    rank_share = case.waited_for[rank] / total_ns
    tolerance = 0.1 if case.by_copies else 0.02
    assert abs(rank_share - float(share) / 100) < tolerance, f"rank {rank} is waited for {rank_share:.3f} of all"
    assert rank_share >= 0.18 or rank_share >= max(case.waited_for.values()) / total_ns - 0.02


@rule("verdict", rf"of what ring steps expose, {P} is in the (forward|backward) pass, most in step (\d+) \(mean {MS}\)")
def _steps(case: Case, m: re.Match[str]) -> None:
    times: dict[tuple[str, int], list[int]] = {}
    for step in case.report["steps"]:
        times.setdefault((step["phase"], step["step"]), []).append(step["exposed_ns"])
    phase = {"forward": "fwd", "backward": "bwd"}[m[2]]
    phase_means = {step: mean(step_times) for (name, step), step_times in times.items() if name == phase}
    total_ns = sum(map(sum, times.values()))
    percent(m[1], sum(sum(step_times) for (name, _), step_times in times.items() if name == phase) / total_ns)
    milliseconds(m[4], phase_means[int(m[3])])
    assert phase_means[int(m[3])] == max(phase_means.values()) and float(m[1]) >= 50 / (1 + 1e-9) - 0.5


@rule("verdict", rf"(\S+|peer copy) between hosts moves {R} GB/s(?:, (?:(\S+|peer copy) )?{R} within a host)?")
def _between_hosts(case: Case, m: re.Match[str]) -> None:
    rows = {(row["kind"], row["link"]): row["wire_gbps"] for row in case.summary["communication"]}
    three_digits(m[2], rows[OPERATIONS[m[1]], "other_host"])
    within = {kind: rate for (kind, link), rate in rows.items() if link == "same_host" and rate}
    assert bool(within) == bool(m[4])
    if m[4]:
        three_digits(m[4], within[OPERATIONS[m[3] or m[1]]])
        assert within[OPERATIONS[m[3] or m[1]]] == max(within.values())
    assert len({rank.host for rank in case.findings.attribution.ranks}) > 1


SPAN = rf"{R}(?: to {R})?"


@rule("verdict", rf"ranks? ([\d, and]+) sends? at {SPAN} GB/s, the others at {SPAN}(?: \(([\d, to]+)\))?")
def _slow_ranks(case: Case, m: re.Match[str]) -> None:
    slow = {int(number) for number in re.findall(r"\d+", m[1])}
    rates = {rank: row["hops"]["wire_gbps"] for rank, row in case.ranks.items() if row["hops"]["wire_gbps"]}
    slow_rates, other_rates = (
        [rate for rank, rate in rates.items() if (rank in slow) == is_slow] for is_slow in (True, False)
    )
    for low, high, values in ((m[2], m[3], slow_rates), (m[4], m[5], other_rates)):
        three_digits(low, min(values))
        three_digits(high or low, max(values))
    assert max(slow_rates) * 3 <= max(other_rates) * (1 + 1e-9) and min(other_rates) * 3 > max(other_rates)
    for a, b in re.findall(r"(\d+) to (\d+)", m[6] or ""):
        assert {int(a), int(b)} <= slow


@rule("verdict", rf"{P} of rank (\d+)'s (\S+|peer copy) time was waiting for ranks")
def _waited(case: Case, m: re.Match[str]) -> None:
    rank = case.ranks[int(m[2])]
    waits = rank["waits"][OPERATIONS[m[3]]]
    percent(m[1], waits["wait_ns"] / (waits["wait_ns"] + waits["wire_ns"]))
    assert rank["compute_ns"] == min(row["compute_ns"] for row in case.ranks.values())
    assert case.waited_for and max(case.waited_for, key=lambda r: case.waited_for[r]) != rank["rank"]
    assert_largest_communication(case, "imbalance")


@rule("verdict", rf"(?<=for ranks) with up to {R} times its (causal )?work")
def _more_work(case: Case, m: re.Match[str]) -> None:
    flops = {row["rank"]: work["block_flops"] for row, work in zip(case.run["traces"], case.run["work"], strict=True)}
    least_busy_rank = min(case.ranks, key=lambda rank: case.ranks[rank]["compute_ns"])
    three_digits(m[1], max(flops.values()) / flops[least_busy_rank])
    assert bool(m[2]) == case.run["workload"]["causal"]


@rule("verdict", rf"(?<=for ranks) that compute up to {MS}, where it computes {MS}")
def _computes_longer(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[1], max(case.swept("compute")))
    milliseconds(m[2], min(case.swept("compute")))


@rule("verdict", rf"[iI]mbalance takes {P} of the slowest rank's wall")
def _imbalance(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("imbalance") / case.wall)
    assert_largest_communication(case, "imbalance")


@rule("verdict", rf"(?<=wall: )rank (\d+) computes {MS}, rank (\d+) computes {MS}")
def _compute_of_two(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[2], case.ranks[int(m[1])]["compute_ns"])
    milliseconds(m[4], case.ranks[int(m[3])]["compute_ns"])
    named_times = [case.ranks[int(rank)]["compute_ns"] for rank in (m[1], m[3])]
    assert named_times == [min(case.swept("compute")), max(case.swept("compute"))]


@rule("verdict", r"work rises with the rank, as in contiguous pieces under a causal mask: see zigzag and stripe")
def _rises(case: Case, m: re.Match[str]) -> None:
    assert not (case.run and case.run["strategy"])
    times = [raw.attention_ns for raw in case.raw.values()]
    assert times == sorted(set(times)) and times[-1] >= 1.5 * times[0] and len(times) > 2


@rule("verdict", r"How much of it is waiting and how much wire is not known \(see warnings\)")
def _unknown_split(case: Case, m: re.Match[str]) -> None:
    assert_largest_communication(case, "exposed_unsplit")
    assert case.codes & {"peer_missing", "no_record", "counts_differ", "bytes_differ", "clocks_disagree",
                         "clocks_inconclusive", "mixed_runs", "missing_ranks"}  # fmt: skip


@rule("verdict", rf"{P} of the time is exposed communication of other groups")
def _other_groups(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("other_groups") / case.mean_wall)


# --- what could be gained -------------------------------------------------------------------------------------


@rule("verdict", rf"{MS} could be ")
def _could_be(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[1], max(row["wall_ns"] for row in case.ranks.values()))
    assert len(case.ranks) > 1


@rule("verdict", rf"{MS} \({P}(?: less)?\) with (free communication|perfect balance(?: and overlap)?)")
def _bound(case: Case, m: re.Match[str]) -> None:
    time_without_exposed = [row["wall_ns"] - time for row, time in zip(case.report["ranks"], case.exposed, strict=True)]
    if m[3] == "free communication":
        bound = max(time_without_exposed)
    elif m[3] == "perfect balance":
        bound = case.wall - case.of("imbalance")
        assert case.of("imbalance") > 0
    else:
        bound = case.bounds["all_hidden"]
        # Communication that computation cannot hide keeps its time, which must be known.
        assert not case.of("exposed_unsplit"), "nothing tells how much of the communication is waiting"
        assert bound >= mean(time_without_exposed)
    milliseconds(m[1], bound)
    percent(m[2], 1 - bound / case.wall)
    assert bound < case.wall
