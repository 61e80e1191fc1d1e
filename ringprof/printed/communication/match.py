"""Matching of operations between ranks: the members of a collective, and the two ends of every message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ringprof.printed.communication.operations import SYNCHRONISING, Group, Operation, RankLog
from ringprof.trace.columns import Notice

Key = tuple[int, int]
"""Rank of an operation, and its index in the rank's log."""


class Match(msgspec.Struct):
    """Operations of different ranks that belong together: one collective, or the hops that exchange messages."""

    members: list[Key]
    missing: tuple[int, ...] = ()
    """Ranks with a log that does not hold their part, because they had not posted it."""
    complete: bool = False
    """Whether the logs hold the part of every rank, of two or more."""
    sizes_differ: bool = False
    """Whether two ranks disagree on a size or a type that must be equal, or on which collective it is."""
    is_collective: bool = False
    """Whether this is one collective, of which every member is a peer of every other."""


class MatchedOperations(msgspec.Struct):
    """MatchedOperations of all operations of a job with those of other ranks."""

    matched: list[Match]
    match_of: dict[Key, Match]
    hop_peers: dict[Key, tuple[Key, ...]]
    """Operations at the other ends of a hop's messages."""
    clock_conflict: tuple[int, int, int] | None
    """Two ranks whose clocks disagree most, and by how many ns they differ at least; None where none disagree. By
    their clocks, the first rank ended an operation before the second had posted its part."""
    notices: list[Notice]


def match_operations(logs: Sequence[RankLog]) -> MatchedOperations:
    """Match operations between ranks: collectives by their sequence numbers, messages by their order."""
    groups: dict[str, Group] = {}
    for log in logs:
        for key, group in log.groups.items():
            if key not in groups or (group.ranks and not groups[key].ranks):
                groups[key] = group
    matches = _collectives(logs, groups)
    hops, hop_peers, notices = _hops(logs)
    conflicts = [*_conflicts_of_collectives(logs, matches), *_conflicts_of_hops(logs, hop_peers)]
    matches += hops
    match_of = {key: match for match in matches for key in match.members}
    worst = max(conflicts, key=lambda conflict: conflict[2], default=None)
    return MatchedOperations(matches, match_of, hop_peers, worst, notices)


def _collectives(logs: Sequence[RankLog], groups: dict[str, Group]) -> list[Match]:
    """Match collectives by group and sequence number, with NCCL Inspector also by name, as it numbers them."""
    by_number: dict[tuple[str, str, int], list[Key]] = defaultdict(list)
    last: dict[tuple[str, str, int], int] = {}
    users: dict[str, set[int]] = defaultdict(set)
    for log in logs:
        for index, operation in enumerate(log.operations):
            users[operation.group].add(log.rank)
            if not operation.is_hop:
                name = operation.name if log.source == "nccl_inspector" else ""
                by_number[operation.group, name, operation.sequence].append((log.rank, index))
                line = (operation.group, name, log.rank)
                last[line] = max(last.get(line, 0), operation.sequence)
    by_rank = {log.rank: log for log in logs}
    matches = []
    for (group, name, sequence), keys in by_number.items():
        members = groups[group].ranks or tuple(sorted(users[group]))
        ranks = {rank for rank, _ in keys}
        absent = [rank for rank in members if rank not in ranks]
        # A rank whose newest collective of the group is older has not posted this one.
        missing = tuple(
            rank for rank in absent
            if rank in by_rank and by_rank[rank].source == "flight_recorder"
            and last.get((group, name, rank), 0) < sequence
        )  # fmt: skip
        operations = [_at(by_rank, key) for key in keys]
        differ = len({operation.name for operation in operations}) > 1
        differ |= len({operation.equal for operation in operations if operation.equal}) > 1
        # A rank with two operations of one number shows that the numbers do not tell which belong together.
        is_collective, complete = len(keys) == len(ranks), not absent and len(members) > 1
        matches.append(Match(keys, missing, complete, differ, is_collective))
    return matches


def _hops(logs: Sequence[RankLog]) -> tuple[list[Match], dict[Key, tuple[Key, ...]], list[Notice]]:
    """Match the n-th message from one rank to another in a group with the n-th that the other receives from it."""
    sent: dict[tuple[str, int, int], list[tuple[Key, int | None, int]]] = defaultdict(list)
    received: dict[tuple[str, int, int], list[tuple[Key, int | None, int]]] = defaultdict(list)
    by_rank = {log.rank: log for log in logs}
    keys = []
    for log in logs:
        for index, operation in enumerate(log.operations):
            if not operation.is_hop:
                continue
            keys.append((log.rank, index))
            for message in operation.sends:
                end = ((log.rank, index), message.size_bytes, operation.sequence)
                sent[operation.group, log.rank, message.peer].append(end)
            for message in operation.receives:
                end = ((log.rank, index), message.size_bytes, operation.sequence)
                received[operation.group, message.peer, log.rank].append(end)
    peers: dict[Key, dict[Key, None]] = {key: {} for key in keys}
    missing: dict[Key, dict[int, None]] = defaultdict(dict)
    differ: set[Key] = set()
    unknown: set[Key] = set()
    unmatched = 0
    for pair in dict.fromkeys([*sent, *received]):
        _, source, target = pair
        out, into = sent.get(pair, []), received.get(pair, [])
        if source not in by_rank or target not in by_rank:
            unknown.update(key for key, *_ in out + into)
            continue
        if not (by_rank[source].from_start and by_rank[target].from_start):
            out, into, left_out = _aligned(out, into)
            unknown.update(left_out)
            unmatched += len(left_out)
        for (sender, size, _), (receiver, other_size, _) in zip(out, into, strict=False):
            peers[sender][receiver] = peers[receiver][sender] = None
            if size is not None and other_size is not None and size != other_size:
                differ.update((sender, receiver))
        for key, *_ in out[len(into) :]:
            missing[key][target] = None
        for key, *_ in into[len(out) :]:
            missing[key][source] = None
    matches = []
    for members in _components(peers):
        ranks = {rank for key in members for rank in missing.get(key, ())}
        complete = not ranks and not unknown.intersection(members) and len(members) > 1
        matches.append(Match(members, tuple(sorted(ranks)), complete, not differ.isdisjoint(members)))
    notices = []
    if unmatched:
        text = f"{unmatched:,} sends and receives have no known counterpart, since logs do not begin with the job"
        notices.append(Notice("unmatched_messages", text, count=unmatched))
    return matches, {key: tuple(others) for key, others in peers.items()}, notices


_End = tuple[Key, int | None, int]


def _aligned(out: list[_End], into: list[_End]) -> tuple[list[_End], list[_End], list[Key]]:
    """Align the two ends of a line of messages by sequence number, where logs begin late.

    In a ring every rank numbers its hops alike. Where the numbers of the two ends do not agree, nothing is matched.
    """
    numbers, others = {end[2] for end in out}, {end[2] for end in into}
    start = max(min(numbers, default=0), min(others, default=0))
    stop = min(max(numbers, default=-1), max(others, default=-1))
    early = [end[0] for end in out + into if end[2] < start]
    kept_out, kept_into = [end for end in out if end[2] >= start], [end for end in into if end[2] >= start]
    both_out, both_into = ([end[2] for end in ends if end[2] <= stop] for ends in (kept_out, kept_into))
    if not numbers or not others or both_out != both_into:
        return [], [], [end[0] for end in out + into]
    return kept_out, kept_into, early


def _components(peers: dict[Key, dict[Key, None]]) -> list[list[Key]]:
    """Return the operations that exchange messages, directly or through others, in order of their first member."""
    seen: set[Key] = set()
    components = []
    for key in peers:
        if key in seen:
            continue
        seen.add(key)
        members = [key]
        for member in members:
            for other in peers[member]:
                if other not in seen:
                    seen.add(other)
                    members.append(other)
        components.append(sorted(members))
    return components


def _conflicts_of_collectives(logs: Sequence[RankLog], matches: Sequence[Match]) -> Iterable[tuple[int, int, int]]:
    """Yield for each collective the two ranks whose clocks disagree most, and by how many ns.

    By their clocks it ended on the first rank before the second had posted its part.
    """
    by_rank = {log.rank: log for log in logs}
    for match in matches:
        operations = [_at(by_rank, key) for key in match.members]
        ended = [
            (operation.completed_by_ns, operation.rank) for operation in operations
            if operation.completed_by_ns is not None and operation.name in SYNCHRONISING
        ]  # fmt: skip
        posted = [(operation.posted_ns, operation.rank) for operation in operations if operation.posted_ns is not None]
        if not match.is_collective or not ended or not posted or min(ended)[0] >= max(posted)[0]:
            continue
        # A rank has no conflict with itself: the two earliest ends and the two latest postings hold the worst pair.
        pairs = [
            (end, other, late - early)
            for early, end in sorted(ended)[:2]
            for late, other in sorted(posted)[-2:]
            if end != other and late > early
        ]
        yield from sorted(pairs, key=lambda pair: -pair[2])[:1]


def _conflicts_of_hops(
    logs: Sequence[RankLog], hop_peers: dict[Key, tuple[Key, ...]]
) -> Iterable[tuple[int, int, int]]:
    """Yield the ranks of hops whose clocks disagree, and by how many ns: one received before the other had sent."""
    by_rank = {log.rank: log for log in logs}
    for key, others in hop_peers.items():
        operation = _at(by_rank, key)
        if operation.completed_by_ns is None:
            continue
        sources = {message.peer for message in operation.receives}
        for other_key in others:
            other = _at(by_rank, other_key)
            # A send may end before its receiver posts; a receive cannot end before its sender has posted.
            if other.rank in sources and other.posted_ns is not None and other.posted_ns > operation.completed_by_ns:
                yield operation.rank, other.rank, other.posted_ns - operation.completed_by_ns


def _at(by_rank: dict[int, RankLog], key: Key) -> Operation:
    return by_rank[key[0]].operations[key[1]]
