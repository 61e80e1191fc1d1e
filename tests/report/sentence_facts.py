"""Right values of the figures in a report's sentences, from the JSON report and the raw events of its traces.

A figure ``a/b`` is a quotient, and ``gain(a)`` what ``a`` saves of the slowest rank's wall. ``min``, ``max`` and
``mean`` are over ranks. Every other name is a part of the waterfall or a function of `FACTS`; the figures of `OWN` are
checked by the rule of their sentence, which knows of what they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ringprof
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.parts import PARTS
from ringprof.analysis.kinds.rules import rule_for
from ringprof.report.as_json import as_dict
from tests.report.raw_facts import Activity, RawRank, union_ns

COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
ATTENTION_PARTS = (
    "attention", "peak", "kernel", "vendor_peak", "kernel_limit", "slower_kernel", "repeated", "slowdown",
)  # fmt: skip
IDLE_PARTS = ("launch_gaps", "blocked")
MIN_LOSS_SHARE = 0.02
MACHINES = Path(ringprof.__file__).parent / "prediction" / "machines"


@dataclass
class Case:
    """A report and its raw events; ``raw`` is by rank."""

    findings: Findings
    raw: dict[int, RawRank]
    part: str = ""
    """Part of the waterfall that a remedy or a line of evidence belongs to."""
    report: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.report = msgspec.to_builtins(as_dict(self.findings, source="trace", paths=[]))
        self.summary = self.report["summary"]
        self.ranks = {row["rank"]: row for row in self.report["ranks"]}
        self.parts = {row["part"]: row["time_ns"] for row in self.report["waterfall"]}
        self.kinds = {row["kind"]: row for row in self.summary["kinds"]}
        self.codes = {row["code"] for row in self.report["warnings"]}
        self.wall = self.summary["slowest_rank"]["wall_ns"]
        self.mean_wall = mean(row["wall_ns"] for row in self.report["ranks"])
        self.run = msgspec.to_builtins(self.findings.attribution.run)
        self.work = (self.run or {}).get("work") or []
        self.on_cpu = not any(raw_rank.activities for raw_rank in self.raw.values())
        self.by_copies = any(row.get("blocked_on_peer_ns") for row in self.report["ranks"]) or any(
            rank.breakdown.blocked_on_peer_ns for rank in self.findings.attribution.ranks
        )
        self.reported = self.findings.attribution.ranks
        self.rates = {row["part"]: row for row in (self.summary["step_rates"] or {"parts": []})["parts"]}

    def of(self, *parts: str) -> int:
        """Sum the times of some parts of the waterfall."""
        return sum(self.parts.get(part, 0) for part in parts)

    def swept(self, name: str) -> list[int]:
        """Return one figure of each rank's sweep over raw events."""
        return [raw_rank.swept[name] for raw_rank in self.raw.values()]

    def activities(self) -> Iterator[Activity]:
        """Yield the activities of all ranks."""
        return chain.from_iterable(raw.activities for raw in self.raw.values())

    @cached_property
    def exposed(self) -> list[int]:
        """Exposed communication by rank; equal to that of the raw events where no copy waits without a kernel."""
        reported = [row["exposed_comm_ns"] for row in self.report["ranks"]]
        if self.on_cpu:
            assert all(raw.blocked_ns == time for raw, time in zip(self.raw.values(), reported, strict=True))
        elif self.by_copies:
            assert all(raw <= time for raw, time in zip(self.swept("exposed_comm"), reported, strict=True))
        elif "exposed_other_groups" not in self.summary["parts_ns"]:
            assert reported == self.swept("exposed_comm")
        return reported

    @cached_property
    def unhidden(self) -> list[int]:
        """Wall time without exposed communication, by rank."""
        return [row["wall_ns"] - time for row, time in zip(self.report["ranks"], self.exposed, strict=True)]

    @cached_property
    def idle(self) -> dict[str, int]:
        """Idle time of all ranks by cause, from raw events; time blocked on peers is not idle."""
        total: dict[str, int] = defaultdict(int)
        for raw_rank in self.raw.values():
            for cause, time in raw_rank.idle_by_cause.items():
                total[cause] += time
        idle = [rank.idle for rank in self.reported if rank.idle]
        assert total["host"] == sum(causes.host_ns for causes in idle)
        gap, blocked = (sum(getattr(causes, f"{name}_ns") for causes in idle) for name in ("gap", "blocked"))
        assert self.by_copies or (total["gap"], total["blocked"]) == (gap, blocked)
        return {"host": total["host"], "gap": gap, "blocked": blocked}

    @cached_property
    def host_pieces(self) -> list[tuple[int, str]]:
        """Pieces of idle time before launches over all ranks: (time, innermost event on the host, or "")."""
        return [piece for raw in self.raw.values() for piece in raw.host_pieces]

    @cached_property
    def waited_for(self) -> dict[int, int]:
        """Rank -> time that others wait for it, as `count_waiting` counts it."""
        return count_waiting(self)

    @cached_property
    def compute(self) -> dict[int, int]:
        """Computation by rank; on GPUs equal to that of the raw events."""
        reported = {rank: row["compute_ns"] for rank, row in self.ranks.items()}
        assert self.on_cpu or [*reported.values()] == self.swept("compute")
        return reported

    @cached_property
    def flops(self) -> dict[int, int]:
        """FLOPs of each rank's blocks by the recorder's count."""
        return {row["rank"]: work["block_flops"] for row, work in zip(self.run["traces"], self.work, strict=True)}

    @property
    def workload(self) -> dict[str, Any]:
        """Workload of a recorded run."""
        workload: dict[str, Any] = self.run["workload"]
        return workload

    @property
    def hosts(self) -> int:
        """Number of nodes of a recorded run."""
        return len(set(self.run["topology"]["hosts"]))

    @cached_property
    def gbps(self) -> dict[int, float]:
        """Rate of each rank's hops on the wire, of the ranks with a known one."""
        hops = {rank: row["hops"] or {} for rank, row in self.ranks.items()}
        return {rank: row["wire_gbps"] for rank, row in hops.items() if row.get("wire_gbps")}

    @cached_property
    def worst_step(self) -> tuple[float, float]:
        """Share of the pass in which ring steps expose most, and the longest mean time of its steps."""
        times: dict[tuple[str, int], list[int]] = defaultdict(list)
        for step in self.report["steps"]:
            times[step["phase"], step["step"]].append(step["exposed_ns"])
        total = {phase: sum(sum(t) for (name, _), t in times.items() if name == phase) for phase, _ in times}
        phase = max(total, key=lambda name: total[name])
        return total[phase] / sum(total.values()), max(mean(t) for (name, _), t in times.items() if name == phase)


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


# --- the right value of a figure ------------------------------------------------------------------------

PER_RANK: dict[str, Callable[[Case], Iterable[float]]] = {
    "compute": lambda c: c.compute.values(),
    "exposed_comm": lambda c: [row["exposed_comm_ns"] / row["wall_ns"] for row in c.ranks.values()],
    "flash": lambda c: [rank.breakdown.flash_ns for rank in c.reported],
    "left_out": lambda c: [
        union_ns((a.start, a.end) for a in raw.outside if a.kind == "comm") for raw in c.raw.values()
    ],
    "step": lambda c: [c.worst_step[1]],
    "slow_gbps": lambda c: [rate for rate in c.gbps.values() if 3 * rate < max(c.gbps.values())],
    "others_gbps": lambda c: [rate for rate in c.gbps.values() if 3 * rate >= max(c.gbps.values())],
}
"""Name of a figure -> its values by rank."""
FACTS: dict[str, Callable[[Case], float]] = {
    # Times, means over ranks, in nanoseconds.
    "time": lambda c: c.mean_wall,
    "wall": lambda c: max(row["wall_ns"] for row in c.ranks.values()),
    "idle": lambda c: sum(c.idle.values()) / len(c.ranks),
    "exposed_comm": lambda c: mean(c.exposed),
    "communication": lambda c: c.of(*COMMUNICATION_PARTS),
    "attention_parts": lambda c: c.of(*ATTENTION_PARTS),
    "busy(attention)": lambda c: attention_ns(c),
    "busy(matrix_products)": lambda c: (
        c.rates["matrix_products"]["time_ns"] if "matrix_products" in c.rates else c.of("matrix_products")
    ),
    "launch_gaps": lambda c: (
        c.of("launch_gaps") if c.on_cpu else (c.idle["host"] + c.idle["gap"]) / len(c.ranks)
    ),
    "blocked": lambda c: c.idle["blocked"] / len(c.ranks),
    "unlaunched": lambda c: unlaunched_idle_ns(c) / len(c.ranks),
    "launched_blocked": lambda c: (c.idle["blocked"] - unlaunched_idle_ns(c)) / len(c.ranks),
    "nothing_open": lambda c: sum(time for time, name in c.host_pieces if not name) / len(c.ranks),
    "migrations": lambda c: sum(
        wait for raw in c.raw.values() for start, _, after in raw.stretches
        if after.name.startswith("Page migration") and (wait := after.start - start) >= 5000
    ),
    "unknown_kinds": lambda c: mean(
        union_ns((a.start, a.end) for a in raw.activities if rule_for(a.name) is None) for raw in c.raw.values()
    ),
    "free_communication": lambda c: max(c.unhidden),
    "balanced": lambda c: c.wall - c.of("imbalance"),
    "all_hidden": lambda c: c.summary["bounds_ns"]["all_hidden"],
    "loss": lambda c: c.of(c.summary["next_step"]["part"]),
    "gain": lambda c: gain_ns(c, c.summary["next_step"]["part"]),
    # Shares.
    "overlap_ratio": lambda c: sum(c.swept("overlapped")) / sum(c.swept("comm")),
    "exposed_in_pass": lambda c: c.worst_step[0],
    "mfu": lambda c: c.summary["step_rates"]["flops"] / c.wall / 1e3 / c.summary["step_rates"]["peak_tflops"],
    # Rates and amounts.
    "peak_tflops": lambda c: c.summary["peak"]["tflops"],
    "block_tflops": lambda c: c.summary["block_tflops"],
    "solo_tflops": lambda c: c.summary["solo_tflops"],
    "step_peak_tflops": lambda c: c.summary["step_rates"]["peak_tflops"],
    "needed_tflop": lambda c: c.of("peak") * c.summary["peak"]["tflops"] / 1e9,
    "work_ratio": lambda c: max(c.flops.values()) / c.flops[min(c.ranks, key=lambda rank: c.compute[rank])],
    "rate_to_hide": lambda c: longest_on_wire(c)["bytes"] / sum(c.compute.values()),
    "leaving_mb": lambda c: leaving_mb(c),
    "leaving_mbps": lambda c: leaving_mb(c) / (c.mean_wall / c.summary["iterations"] / 1e9),
    "one_by_one": lambda c: len(kernels_one_by_one(c)),
    "kernels": lambda c: sum(a.category == 0 for a in c.activities()),
}  # fmt: skip
"""Name of a figure -> its value."""
OWN = {
    "rank", "step", "compute", "kind", "wire_gbps", "waited_for", "waiting_of_kind", "idle_of_rank", "rate_in_run",
    "within_host_gbps", "between_hosts_gbps", "exposed_kind/time", "host_call/idle", "short_host/idle", "done/needed",
    "blocked_cause/idle", "blocked_between_hosts/time", "blocked_within_hosts/time", "min(named_compute)",
    "max(others_compute)", "saved", "fastest_ms", "own_ms", "matmul_tflops", "matmul_mhz",
}  # fmt: skip
"""Figures that the rules of their sentences check."""
_SHARES = {"overlap_ratio", "exposed_in_pass", "mfu", "waited_for", "waiting_of_kind", "saved", "max(exposed_comm)"}
_RATES = ("_tflops", "_tflop", "_gbps", "_mb", "_mbps", "_mhz", "_ms")


def unit_of(name: str) -> str:
    """Return ``share``, ``ns`` or "" for a figure."""
    plain = name.rpartition("(")[2].rstrip(")")
    if name in _SHARES or name.startswith("gain(") or name.endswith("_coverage"):
        return "share"
    if "/" in name and name not in ("attention_parts/10", "done/needed"):
        return "share"
    others = ("rank", "step", "kernels", "one_by_one", "work_ratio", "rate_to_hide", "rate_in_run", "done/needed")
    return "" if name in others or plain.endswith(_RATES) else "ns"


def right_value(case: Case, name: str) -> float:
    """Return the value that a figure should have."""
    if name in FACTS:
        return FACTS[name](case)
    if name.startswith("gain("):
        return 1 - float(right_value(case, name[5:-1]) / case.wall)
    above, slash, below = name.partition("/")
    if slash:
        return right_value(case, above) / (float(below) if below.isdigit() else right_value(case, below))
    rate = re.fullmatch(r"(attention|matrix_products)_(tflops|coverage)", name)
    if rate:
        return float(case.rates[rate[1]][rate[2]])
    call = re.fullmatch(r"(min|max|mean)\((\w+)\)", name)
    if call and call[2] in PER_RANK:
        values = [*PER_RANK[call[2]](case)]
        return mean(values) if call[1] == "mean" else max(values) if call[1] == "max" else min(values)
    if call or name.startswith("busy("):
        return busy_ns(case, name[5:-1]) / len(case.ranks)
    return case.of(PARTS[name].name)


# --- facts that take more than a line --------------------------------------------------------------------


def gain_ns(case: Case, part: str) -> int:
    """Return what the end of a loss gains: at most its part, and at most the wall less the bound."""
    bounds = {"imbalance": case.summary["bounds_ns"]["balanced"]}
    bounds |= dict.fromkeys(COMMUNICATION_PARTS[1:], case.summary["bounds_ns"]["free_communication"])
    return max(0, min(case.of(part), int(case.wall - bounds.get(part, 0))))


def attention_ns(case: Case) -> float:
    """Return the mean time of attention kernels; at most 2 % of the wall may be known by annotations alone."""
    reported = mean(rank.breakdown.flash_ns for rank in case.reported)
    by_name = mean(raw.attention_ns for raw in case.raw.values())
    assert case.on_cpu or by_name - 1e-3 <= reported <= by_name + 0.02 * case.mean_wall
    return float(case.rates["attention"]["time_ns"]) if "attention" in case.rates else reported


def busy_ns(case: Case, kind: str) -> int:
    """Sum over ranks the time in which a kind of computation runs.

    The time is at most that of the kind's kernels and at most all computation; where kernels never overlap, it equals
    the former.
    """
    times = [(row["kinds_ns"].get(kind, 0), row["compute_ns"]) for row in case.ranks.values()]
    kinds_by_rank = [rank.breakdown.kinds for rank in case.reported]
    reported_ns = sum(kinds[kind].busy_ns for kinds in kinds_by_rank if kind in kinds)
    assert reported_ns <= sum(min(pair) for pair in times)
    kernels = [a.end - a.start for a in case.activities() if a.kind == "compute"]
    sequential = sum(kernels) == sum(case.swept("compute")) if kernels else False
    assert not sequential or reported_ns == sum(time for time, _ in times)
    return reported_ns


def unlaunched_idle_ns(case: Case) -> int:
    """Sum the idle time before activities whose launch is not recorded."""
    stretches = [(raw, *stretch) for raw in case.raw.values() for stretch in raw.stretches]
    waits = [after.start - start for raw, start, _, after in stretches if after.correlation not in raw.launches]
    return sum(wait for wait in waits if wait >= 5_000)


def longest_on_wire(case: Case) -> dict[str, Any]:
    """Return the communication whose bytes take longest."""
    rows = [row for row in case.summary["communication"] if row["wire_gbps"] and row["bytes"]]
    longest: dict[str, Any] = max(rows, key=lambda row: row["bytes"] / row["wire_gbps"])
    return longest


def leaving_mb(case: Case) -> float:
    """Return the megabytes that leave each node."""
    sent = [entry for work in case.work for entry in work["sent"] if entry["link"] == "other_host"]
    return float(sum(entry["sent_bytes"] for entry in sent) / case.hosts / 1e6)


def kernels_one_by_one(case: Case) -> list[Activity]:
    """List the kernels whose call launched fewer than eight."""
    single = []
    for raw in case.raw.values():
        kernels = [a for a in raw.activities if a.category == 0]
        calls = [a.correlation for a in kernels if a.correlation in raw.launches]
        single += [a for a in kernels if calls.count(a.correlation) < 8]
    return single


def calibrated_ms(case: Case, machine: dict[str, Any], kernel: str) -> float | None:
    """Return milliseconds per GPU and iteration of a kernel for the run's blocks; None if a rank's are not covered.

    By the machine's rates at square blocks with as many pairs as the run's blocks have in the mean, causal and full.
    """
    work, total = case.workload, 0.0
    factors = {"forward": 4, "backward": 10} if work["backward"] else {"forward": 4}
    if not all(rank["block_flops"] and rank["block_calls"].keys() >= factors.keys() for rank in case.work):
        return None
    group = work["heads"] / work["kv_heads"]
    for rank in case.work:
        pairs = rank["block_flops"] / (sum(factors.values()) * work["batch"] * work["heads"] * work["head_dim"])
        for phase, factor in factors.items():
            flops = factor / sum(factors.values()) * rank["block_flops"]
            times = []
            for causal in {work["causal"], False}:
                rows = [
                    row for row in machine["kernel_rates"]
                    if row["kernel"] == kernel and row["phase"] == phase and row["causal"] == causal
                    and row["head_dim"] == work["head_dim"] and max(row["group"] / group, group / row["group"]) <= 2
                ]  # fmt: skip
                if not rows:
                    continue
                nearest = min((abs(np.log(row["group"] / group)), row["group"]) for row in rows)[1]
                curve = sorted((row["tokens"], row["tflops"]) for row in rows if row["group"] == nearest)
                tokens = np.sqrt(pairs / rank["block_calls"][phase] * (1 + causal))
                if curve[0][0] / 2 <= tokens <= 2 * curve[-1][0]:
                    rate = np.interp(np.log(tokens), np.log([x for x, _ in curve]), [y for _, y in curve])
                    times.append(flops / rate / 1e9)
            if not times:
                return None
            total += mean(times)
    return total / len(case.work)


def count_waiting(case: Case) -> dict[int, int]:
    """Count how long others wait for each rank.

    A kernel waits until the last of all kernels that it depends on begins, and waits for that kernel's rank. The n-th
    message of a pair of ranks is matched on both, the n-th collective of a group on all. A kernel depends on its
    partners and, where it carries several messages per partner, on theirs.
    """
    offset = {int(rank): shift for rank, shift in case.summary["clocks"]["offsets_ns"].items()}
    kernels: dict[Key, tuple[int, int]] = {}
    matching_calls: dict[Any, dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
    multi_message: set[Key] = set()
    reported_wait_ns: dict[Key, int] = {}
    for rank in case.reported:
        for split in rank.splits:
            transfer, key = split.transfer, (rank.rank, split.transfer.activity)
            if transfer.kind == "copy_engine":
                continue
            if split.wait_ns is not None:
                reported_wait_ns[key] = split.wait_ns
            kernels[key] = transfer.start_ns + offset[rank.rank], transfer.end_ns + offset[rank.rank]
            if transfer.kind != "send_recv":
                matching_calls[transfer.kind, transfer.group][rank.rank].append(key)
                continue
            receivers, senders = [m.peer for m in transfer.sends], [m.peer for m in transfer.receives]
            for pair in [(rank.rank, peer) for peer in receivers] + [(peer, rank.rank) for peer in senders]:
                matching_calls[transfer.group[0], pair][rank.rank].append(key)
            if len(set(receivers)) < len(receivers) or len(set(senders)) < len(senders):
                multi_message.add(key)
    partners: dict[Key, set[Key]] = defaultdict(set)
    for by_rank in matching_calls.values():
        for matched_keys in zip(*by_rank.values(), strict=False):
            for key in matched_keys:
                partners[key] |= set(matched_keys)
    waited_ns: dict[int, int] = defaultdict(int)
    for key, reported_ns in reported_wait_ns.items():
        start, end = kernels[key]
        needed = {key} | partners[key]
        if key in multi_message:
            needed |= {other for partner in partners[key] for other in partners[partner]}
        last_start, negative_rank = max((kernels[other][0], -other[0]) for other in needed)
        if -negative_rank != key[0]:
            # The reported wait is an upper limit: it excludes the wire time at the best rate seen.
            waited_ns[-negative_rank] += min(
                last_start - start, end - start, reported_ns if reported_ns is not None else end - start
            )
    for number, raw in case.raw.items():
        others = [peer for peer in case.raw if peer != number]
        for receiver, time in raw.waits_for_copies_ns.items():
            if receiver is not None or len(others) == 1:
                waited_ns[others[0] if receiver is None else receiver] += time
    return waited_ns


Key = tuple[int, int]
"""Rank and activity of a kernel."""
