"""Separation of one process group's communication from that of all other groups.

In a training step, pipeline stages send and receive too. Where the user names the context-parallel group, only its
transfers count as the ring's. Communication of other groups gets the kind ``other_groups``: neither the ring's
communication nor idle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from ringprof.analysis.kinds.classify import Calls, Classified
from ringprof.analysis.kinds.kinds import CODE, COMMUNICATION, OTHER_GROUPS
from ringprof.analysis.kinds.user_rules import wildcards
from ringprof.errors import UsageError
from ringprof.trace.columns import CommRecord, Trace

_OWN_CHANNEL = "ringprof:"
"""Prefix of the descriptions of the process groups that ringprof's own strategies create."""
_RANKS = re.compile(r"\s*[0-9]+(\s*-\s*[0-9]+)?(\s*,\s*[0-9]+(\s*-\s*[0-9]+)?)*\s*")


def keep_group(classified: Classified, group: str) -> tuple[Classified, bool, int]:
    """Reclassify all communication outside ``group`` as ``other_groups``.

    Return the activities, whether the group communicates on this rank, and the number of reclassified kernels whose
    group no record names.

    ``group`` holds names or descriptions, separated by commas, with ``*`` and ``?`` as wildcards; or the ranks of one
    group (``0,1`` ``0-3``). Semicolons separate alternatives. A group that ringprof's own strategies create counts as
    the group that it was made from, which has all its ranks. Peer-to-peer copies belong to no process group and stay.
    """
    contains = _chosen(group, classified.trace)
    wanted: dict[int, bool] = {}
    rows = np.flatnonzero(classified.of(*(kind for kind in COMMUNICATION if kind != "copy_engine")))
    kind, unknown_count, in_group = classified.kind.copy(), 0, False
    for activity in rows.tolist():
        calls = classified.calls.get(activity, ())
        if id(calls) not in wanted:
            wanted[id(calls)] = bool(calls) and all(map(contains, calls))
        if wanted[id(calls)]:
            in_group = True
        else:
            kind[activity] = CODE[OTHER_GROUPS]
            unknown_count += not calls
    return msgspec.structs.replace(classified, kind=kind), in_group, unknown_count


def name_of_group(calls: Calls) -> str:
    """Return the display name of the calls' group: its description, else its name; empty where no record has one."""
    for call in calls:
        described = call.group_description or ""
        return described if described not in ("", "default_pg", "undefined") else call.group or ""
    return ""


def group_names(trace: Trace) -> set[str]:
    """Return the groups that one trace has a record of, with their ranks, for messages."""
    names = set()
    for record in trace.collectives:
        if record.group is not None:
            ranks = _group_ranks(record, trace)
            description = f" ({record.group_description})" if record.group_description else ""
            members = f" of ranks {','.join(map(str, ranks[:8]))}{',...' if len(ranks) > 8 else ''}" if ranks else ""
            names.add(f"{record.group}{description}{members}")
    return names


def refuse_unknown_group(group: str, names: Iterable[str]) -> None:
    """Raise `UsageError`: no trace has a record of this group; the message lists the groups that exist."""
    listed = "; ".join(sorted(names)[:12])
    if not listed:
        raise UsageError(f"--group {group!r}: no trace records the group of its communication (CPU traces never do)")
    raise UsageError(f"--group {group!r}: nothing was communicated in such a group; the traces have: {listed}")


def _chosen(text: str, trace: Trace) -> Callable[[CommRecord], bool]:
    """Return whether a call belongs to a group that the user chose (`keep_group`), as a function of its record."""
    choices = [choice.strip() for choice in text.split(";")]
    # A lone number is a name: PyTorch numbers its groups.
    rank_lists = [choice for choice in choices if _RANKS.fullmatch(choice) and ("," in choice or "-" in choice)]
    names = [name.strip() for choice in choices if choice not in rank_lists for name in choice.split(",")]
    patterns = [re.compile(wildcards(name), re.IGNORECASE | re.DOTALL) for name in names if name]
    chosen_ranks = {frozenset(_parse_ranks(choice)) for choice in rank_lists}
    listed = {ranks for name, ranks in trace.groups.items() if any(pattern.fullmatch(name) for pattern in patterns)}
    members_of_groups = [*chosen_ranks, *map(frozenset, listed)]

    def contains(record: CommRecord) -> bool:
        named = (record.group or "", record.group_description or "")
        if any(pattern.fullmatch(name) for pattern in patterns for name in named):
            return True
        ranks = frozenset(_group_ranks(record, trace))
        if not named[1].startswith(_OWN_CHANNEL):
            return ranks in chosen_ranks
        return bool(ranks) and any(ranks <= members for members in members_of_groups)

    return contains


def _group_ranks(record: CommRecord, trace: Trace) -> tuple[int, ...]:
    return record.group_ranks or trace.groups.get(record.group or "", ())


def _parse_ranks(text: str) -> set[int]:
    """Parse ranks and ranges of ranks, such as ``0-3,6``."""
    ranks: set[int] = set()
    for term in text.split(","):
        first, _, last = term.partition("-")
        ranks.update(range(int(first), min(int(last or first), int(first) + (1 << 20)) + 1))
    return ranks
