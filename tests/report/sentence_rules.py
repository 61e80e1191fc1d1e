"""Rules for the sentences of a report: each is a claim that is derived again from the JSON report and raw events.

A rule is a regular expression of a whole clause and a function that asserts what the clause says. `audit` reads a text
from its start to its end by the rules of its category; a clause without a rule fails. A new sentence of the product
needs a rule in `sentence_communication` or `sentence_computation` (verdict, next step), `sentence_remedies` or
`sentence_evidence` (evidence, warnings). This module holds what rules share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.report.as_json import as_dict
from tests.report.raw_facts import RawRank

P, MS, R = r"(-?[\d.]+) %", r"(-?[\d,]+\.\d+ m?s)", r"([\d,.]+)"
COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
KERNEL_PARTS = ("kernel", "vendor_peak", "kernel_limit", "slower_kernel")
ATTENTION_PARTS = ("attention", "peak", *KERNEL_PARTS, "repeated", "slowdown")
IDLE_PARTS = ("launch_gaps", "blocked")
MIN_LOSS_SHARE = 0.02


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
        self.bounds = self.summary["bounds_ns"]
        self.run = msgspec.to_builtins(self.findings.attribution.run)
        self.on_cpu = not any(raw_rank.activities for raw_rank in self.raw.values())
        self.by_copies = any(row.get("blocked_on_peer_ns") for row in self.report["ranks"]) or any(
            rank.breakdown.blocked_on_peer_ns for rank in self.findings.attribution.ranks
        )

    def of(self, *parts: str) -> int:
        """Sum the times of some parts of the waterfall."""
        return sum(self.parts.get(part, 0) for part in parts)

    def swept(self, name: str) -> list[int]:
        """Return one figure of each rank's sweep over raw events."""
        return [raw_rank.swept[name] for raw_rank in self.raw.values()]

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
    def idle(self) -> dict[str, int]:
        """Idle time of all ranks by cause, from raw events; time blocked on peers is not idle."""
        total: dict[str, int] = defaultdict(int)
        for raw_rank in self.raw.values():
            for cause, time in raw_rank.idle_by_cause.items():
                total[cause] += time
        reported = [rank.idle for rank in self.findings.attribution.ranks if rank.idle]
        assert total["host"] == sum(raw_rank.host_ns for raw_rank in reported)
        if not self.by_copies:
            assert (total["gap"], total["blocked"]) == (
                sum(i.gap_ns for i in reported),
                sum(i.blocked_ns for i in reported),
            )
        return {
            "host": total["host"],
            "gap": sum(i.gap_ns for i in reported),
            "blocked": sum(i.blocked_ns for i in reported),
        }

    @cached_property
    def waited_for(self) -> dict[int, int]:
        """Rank -> time that others wait for it, as `count_waiting` counts it."""
        return count_waiting(self)


# --- numbers as they are shown --------------------------------------------------------------------------


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def shows(text: str, value: float, unit: float = 1.0) -> None:
    """Assert that a number as displayed is the value, to its last digit."""
    digits = len(text.partition(".")[2])
    number = float(text.replace(",", ""))
    assert abs(number - value / unit) <= 0.5 * 10.0**-digits * (1 + 1e-6) + 1e-9, f"{text} for {value / unit}"


def milliseconds(text: str, time_ns: float) -> None:
    """Assert that a time as displayed, with its unit, is the value."""
    number, unit = text.split(" ")
    assert (unit == "s") == (time_ns >= 999_950_000), text
    shows(number, time_ns, {"ms": 1e6, "s": 1e9}[unit])


def percent(text: str, share: float) -> None:
    shows(text, 100 * share)


def three_digits(text: str, value: float) -> None:
    number = float(text.replace(",", ""))
    assert abs(number - value) <= max(5.001e-3 * abs(value), 1e-12), f"{text} for {value}"


# --- the table ------------------------------------------------------------------------------------------

Check = Callable[[Case, re.Match[str]], None]
RULES: dict[str, list[tuple[re.Pattern[str], Check]]] = defaultdict(list)
_SEPARATOR = re.compile(r"; |, |: |\. |\.$")


def rule(category: str, pattern: str) -> Callable[[Check], Check]:
    """Add a rule for clauses of a category: ``verdict``, ``next``, ``evidence``, ``remedy`` or ``warning``.

    Clauses of several categories: their names with ``|`` between them.
    """

    def add(check: Check) -> Check:
        for name in category.split("|"):
            RULES[name].append((re.compile(pattern), check))
        return check

    return add


def audit(case: Case, category: str, text: str) -> None:
    """Check every clause of a text. Raises `AssertionError` where one is false or has no rule."""
    position = 0
    while position < len(text):
        matches = [
            (m, check)
            for pattern, check in RULES[category]
            if (m := pattern.match(text, position)) and m.end() > position
        ]
        assert matches, f"no rule for {text[position:]!r} in {text!r}"
        match, check = max(matches, key=lambda candidate: candidate[0].end())
        try:
            check(case, match)
        except AssertionError as problem:
            raise AssertionError(f"{match[0]!r} in {text!r}: {problem}") from problem
        position = match.end()
        separator = _SEPARATOR.match(text, position)
        position = separator.end() if separator else position


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
    for rank in case.findings.attribution.ranks:
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
