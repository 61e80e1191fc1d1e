"""Communication of one process group told from that of all others.

In a training step pipeline stages send and receive too: with the context-parallel group named, only its transfers
are the ring's. What other groups did is of the kind ``other_groups``: neither the ring's communication nor idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np

from ringprof.analysis.kinds.classify import Calls, Classified
from ringprof.analysis.kinds.kinds import CODE, COMMUNICATION, OTHER_GROUPS
from ringprof.analysis.kinds.user_rules import wildcards
from ringprof.errors import UsageError
from ringprof.trace.columns import CommRecord, Trace

_OWN_CHANNEL = "ringprof:"
"""What the descriptions of the groups begin with that ringprof's own strategies communicate in."""
_RANKS = re.compile(r"\s*[0-9]+(\s*-\s*[0-9]+)?(\s*,\s*[0-9]+(\s*-\s*[0-9]+)?)*\s*")


class _Kept(msgspec.Struct, frozen=True):
    """One rank's activities after the others' communication was set apart."""

    classified: Classified
    found: bool
    """Whether the group communicates on this rank."""
    unknown: int
    """Communication kernels of which no record tells the group; set apart with the others'."""


def keep_group(classified: Classified, group: str) -> _Kept:
    """Set apart all communication of other groups than ``group``: names or descriptions in which ``*`` and ``?`` stand
    for anything, with commas between them, or one group's ranks (``0,1`` ``0-3``); semicolons stand between choices.

    A channel of ringprof's own strategies counts as the group that it was made in, which has all its ranks.
    Peer-to-peer copies belong to no process group and stay.
    """
    choice = _Choice.of(group, classified.trace)
    wanted: dict[int, bool] = {}
    rows = np.flatnonzero(classified.of(*(kind for kind in COMMUNICATION if kind != "copy_engine")))
    kind, unknown, found = classified.kind.copy(), 0, False
    for activity in rows.tolist():
        calls = classified.calls.get(activity, ())
        if id(calls) not in wanted:
            wanted[id(calls)] = bool(calls) and all(map(choice.has, calls))
        if wanted[id(calls)]:
            found = True
        else:
            kind[activity] = CODE[OTHER_GROUPS]
            unknown += not calls
    return _Kept(msgspec.structs.replace(classified, kind=kind), found, unknown)


def name_of_group(calls: Calls) -> str:
    """What people call the group of a kernel's calls: its description, else its name; empty where none tells."""
    for call in calls:
        described = call.group_description or ""
        return described if described not in ("", "default_pg", "undefined") else call.group or ""
    return ""


def group_names(trace: Trace) -> set[str]:
    """The groups that one trace has a record of, with their ranks, for a message."""
    return {_shown(record, trace) for record in trace.collectives if record.group is not None}


def refuse_unknown_group(group: str, names: Iterable[str]) -> None:
    """Say that no trace has a record of this group, and which groups there are."""
    listed = "; ".join(sorted(names)[:12])
    if not listed:
        raise UsageError(f"--group {group!r}: no trace tells the group of its communication (on CPU none does)")
    raise UsageError(f"--group {group!r}: nothing was communicated in such a group; the traces have: {listed}")


def _shown(record: CommRecord, trace: Trace) -> str:
    ranks = _ranks_of(record, trace)
    description = f" ({record.group_description})" if record.group_description else ""
    members = f" of ranks {','.join(map(str, ranks[:8]))}{',...' if len(ranks) > 8 else ''}" if ranks else ""
    return f"{record.group}{description}{members}"


class _Choice(msgspec.Struct, frozen=True):
    """The groups that the user chose, of one trace."""

    patterns: tuple[re.Pattern[str], ...]
    ranks: frozenset[frozenset[int]]
    """Of groups that were chosen by their ranks."""
    members: tuple[frozenset[int], ...]
    """Ranks of each chosen group."""
    trace: Trace

    @classmethod
    def of(cls, text: str, trace: Trace) -> _Choice:
        choices = [one.strip() for one in text.split(";")]
        # A lone number is a name: PyTorch numbers its groups.
        by_ranks = [one for one in choices if _RANKS.fullmatch(one) and ("," in one or "-" in one)]
        names = [name.strip() for one in choices if one not in by_ranks for name in one.split(",")]
        patterns = tuple(re.compile(wildcards(name), re.IGNORECASE | re.DOTALL) for name in names if name)
        ranks = frozenset(frozenset(_listed(one)) for one in by_ranks)
        listed = {of for name, of in trace.groups.items() if any(p.fullmatch(name) for p in patterns)}
        return cls(patterns, ranks, (*ranks, *map(frozenset, listed)), trace)

    def has(self, record: CommRecord) -> bool:
        """Whether a call is of a chosen group."""
        named = (record.group or "", record.group_description or "")
        if any(pattern.fullmatch(name) for pattern in self.patterns for name in named):
            return True
        ranks = frozenset(_ranks_of(record, self.trace))
        if not named[1].startswith(_OWN_CHANNEL):
            return ranks in self.ranks
        return bool(ranks) and any(ranks <= members for members in self.members)


def _ranks_of(record: CommRecord, trace: Trace) -> tuple[int, ...]:
    return record.group_ranks or trace.groups.get(record.group or "", ())


def _listed(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), min(int(last or first), int(first) + (1 << 20)) + 1))
    return ranks
