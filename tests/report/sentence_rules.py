"""Rules for the sentences of a report: each is a claim that is derived again from the JSON report and raw events.

A rule is a regular expression of a whole clause and a function that asserts what the clause says. `audit` reads a text
from its start to its end by the rules of its place; a clause without a rule fails. A new sentence of the product needs
a rule in `sentence_communication` or `sentence_computation` (verdict, next step), `sentence_remedies` or
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

P, MS, R = r"(-?[\d.]+) %", r"(-?[\d,]+\.\d+) ms", r"([\d,.]+)"
COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
ATTENTION_PARTS = ("attention", "peak", "kernel", "repeated", "slowdown")
IDLE_PARTS = ("launch_gaps", "blocked")
WORTH = 0.02


@dataclass
class Case:
    """One report and what its raw events say; ``raw`` is by rank."""

    findings: Findings
    raw: dict[int, RawRank]
    part: str = ""
    """The part of the waterfall that a remedy or a line of evidence belongs to."""
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
        self.on_cpu = not any(one.activities for one in self.raw.values())
        self.by_copies = any(row.get("blocked_on_peer_ns") for row in self.report["ranks"]) or any(
            rank.breakdown.blocked_on_peer_ns for rank in self.findings.attribution.ranks
        )

    def of(self, *parts: str) -> int:
        """Time of some parts of the waterfall together."""
        return sum(self.parts.get(part, 0) for part in parts)

    def swept(self, name: str) -> list[int]:
        """A figure of each rank's sweep over raw events."""
        return [one.swept[name] for one in self.raw.values()]

    @cached_property
    def exposed(self) -> list[int]:
        """Exposed communication by rank; where no copy waits without a kernel, it is that of the raw events."""
        told = [row["exposed_comm_ns"] for row in self.report["ranks"]]
        if self.on_cpu:
            assert all(raw.blocked_ns == time for raw, time in zip(self.raw.values(), told, strict=True))
        elif self.by_copies:
            assert all(raw <= time for raw, time in zip(self.swept("exposed_comm"), told, strict=True))
        elif "exposed_other_groups" not in self.summary["parts_ns"]:
            assert told == self.swept("exposed_comm")
        return told

    @cached_property
    def idle(self) -> dict[str, int]:
        """Idle time of all ranks by cause, from raw events; what blocks on peers is not idle."""
        total: dict[str, int] = defaultdict(int)
        for one in self.raw.values():
            for cause, time in one.idle_by_cause.items():
                total[cause] += time
        told = [rank.idle for rank in self.findings.attribution.ranks if rank.idle]
        assert total["host"] == sum(one.host_ns for one in told)
        if not self.by_copies:
            assert (total["gap"], total["blocked"]) == (sum(i.gap_ns for i in told), sum(i.blocked_ns for i in told))
        return {"host": total["host"], "gap": sum(i.gap_ns for i in told), "blocked": sum(i.blocked_ns for i in told)}

    @cached_property
    def waited_for(self) -> dict[int, int]:
        """Rank -> time that others wait for it: every kernel until the last of its own partners begins."""
        return waiting(self)


# --- numbers as they are shown --------------------------------------------------------------------------


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def shows(text: str, value: float, unit: float = 1.0) -> None:
    """The number is the value, to the digits that it has."""
    digits = len(text.partition(".")[2])
    number = float(text.replace(",", ""))
    assert abs(number - value / unit) <= 0.5 * 10.0**-digits * (1 + 1e-6) + 1e-9, f"{text} for {value / unit}"


def milliseconds(text: str, time_ns: float) -> None:
    shows(text, time_ns, 1e6)


def percent(text: str, share: float) -> None:
    shows(text, 100 * share)


def three_digits(text: str, value: float) -> None:
    number = float(text.replace(",", ""))
    assert abs(number - value) <= max(5.001e-3 * abs(value), 1e-12), f"{text} for {value}"


# --- the table ------------------------------------------------------------------------------------------

Check = Callable[[Case, re.Match[str]], None]
RULES: dict[str, list[tuple[re.Pattern[str], Check]]] = defaultdict(list)
_BETWEEN = re.compile(r"; |, |: |\. |\.$")


def rule(place: str, pattern: str) -> Callable[[Check], Check]:
    """Add a rule for clauses of a place: ``verdict``, ``next``, ``evidence``, ``remedy`` or ``warning``."""

    def add(check: Check) -> Check:
        RULES[place].append((re.compile(pattern), check))
        return check

    return add


def audit(case: Case, place: str, text: str) -> None:
    """Check every clause of a text. Raises `AssertionError` where one is false or has no rule."""
    at = 0
    while at < len(text):
        matches = [(m, check) for pattern, check in RULES[place] if (m := pattern.match(text, at)) and m.end() > at]
        assert matches, f"no rule for {text[at:]!r} in {text!r}"
        match, check = max(matches, key=lambda found: found[0].end())
        try:
            check(case, match)
        except AssertionError as problem:
            raise AssertionError(f"{match[0]!r} in {text!r}: {problem}") from problem
        at = match.end()
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at


def waiting(case: Case) -> dict[int, int]:
    """Count who is waited for: every kernel waits until the last of all that it depends on begins, and for its rank.

    The n-th message of a pair of ranks is matched on both, the n-th collective of a group on all. A kernel depends on
    its partners and, where it carries several messages per partner, on theirs.
    """
    offset = {int(rank): shift for rank, shift in case.summary["clocks"]["offsets_ns"].items()}
    kernels: dict[Key, tuple[int, int]] = {}
    ends: dict[Any, dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
    several: set[Key] = set()
    counted: dict[Key, int] = {}
    for rank in case.findings.attribution.ranks:
        for part in rank.splits:
            one, key = part.transfer, (rank.rank, part.transfer.activity)
            if one.kind == "copy_engine":
                continue
            if part.wait_ns is not None:
                counted[key] = part.wait_ns
            kernels[key] = one.start_ns + offset[rank.rank], one.end_ns + offset[rank.rank]
            if one.kind != "send_recv":
                ends[one.kind, one.group][rank.rank].append(key)
                continue
            to, source = [m.peer for m in one.sends], [m.peer for m in one.receives]
            for pair in [(rank.rank, peer) for peer in to] + [(peer, rank.rank) for peer in source]:
                ends[one.group[0], pair][rank.rank].append(key)
            if len(set(to)) < len(to) or len(set(source)) < len(source):
                several.add(key)
    partners: dict[Key, set[Key]] = defaultdict(set)
    for by_rank in ends.values():
        for together in zip(*by_rank.values(), strict=False):
            for key in together:
                partners[key] |= set(together)
    found: dict[int, int] = defaultdict(int)
    for key, most in counted.items():
        begun, end = kernels[key]
        needed = {key} | partners[key]
        if key in several:
            needed |= {far for near in partners[key] for far in partners[near]}
        last, first_rank = max((kernels[other][0], -other[0]) for other in needed)
        if -first_rank != key[0]:
            # Bytes cannot have been faster than the best that was seen: that is part of its wire.
            found[-first_rank] += min(last - begun, end - begun, most if most is not None else end - begun)
    for number, raw in case.raw.items():
        others = [peer for peer in case.raw if peer != number]
        for receiver, time in raw.waits_for_copies_ns.items():
            if receiver is not None or len(others) == 1:
                found[others[0] if receiver is None else receiver] += time
    return found


Key = tuple[int, int]
"""Rank and activity of a kernel."""
