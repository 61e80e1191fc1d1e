"""Communication of one process group told from that of all others.

In a training step pipeline stages send and receive too: with the context-parallel group named, only its transfers
are the ring's. What other groups did is of the kind ``other_groups``: neither the ring's communication nor idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ringprof.analysis.kinds.classify import Calls, Classified
from ringprof.analysis.kinds.kinds import CODE, COMMUNICATION, OTHER_GROUPS
from ringprof.errors import UsageError
from ringprof.trace.columns import Collective, Trace

_RANKS = re.compile(r"\s*\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*\s*")


@dataclass(frozen=True)
class Kept:
    """One rank's activities after the others' communication was set apart."""

    classified: Classified
    found: bool
    """Whether the group communicates on this rank."""
    unknown: int
    """Communication kernels of which no record tells the group; set apart with the others'."""


def keep_group(classified: Classified, group: str) -> Kept:
    """Set apart all communication of other groups than ``group``: a name, a description, or ranks (``0,1`` ``0-3``).

    Peer-to-peer copies belong to no process group and stay.
    """
    wanted: dict[int, bool] = {}
    rows = np.flatnonzero(classified.of(*(kind for kind in COMMUNICATION if kind != "copy_engine")))
    kind, unknown, found = classified.kind.copy(), 0, False
    for activity in rows.tolist():
        calls = classified.calls.get(activity, ())
        if id(calls) not in wanted:
            wanted[id(calls)] = bool(calls) and _is_of(calls, group, classified.trace)
        if wanted[id(calls)]:
            found = True
        else:
            kind[activity] = CODE[OTHER_GROUPS]
            unknown += not calls
    return Kept(replace(classified, kind=kind), found, unknown)


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
    listed = "; ".join(sorted(names)[:12]) or "none"
    raise UsageError(f"--group {group!r}: nothing was communicated in such a group; the traces have: {listed}")


def _shown(record: Collective, trace: Trace) -> str:
    ranks = _ranks_of(record, trace)
    description = f" ({record.group_description})" if record.group_description else ""
    members = f" of ranks {','.join(map(str, ranks[:8]))}{',...' if len(ranks) > 8 else ''}" if ranks else ""
    return f"{record.group}{description}{members}"


def _is_of(calls: Calls, group: str, trace: Trace) -> bool:
    return all(_names(record, group, trace) for record in calls)


def _names(record: Collective, group: str, trace: Trace) -> bool:
    if record.group == group or (record.group_description or "").lower() == group.lower():
        return True
    # A lone number is a name: PyTorch numbers its groups.
    several = _RANKS.fullmatch(group) is not None and ("," in group or "-" in group)
    return several and set(_ranks_of(record, trace)) == _listed(group)


def _ranks_of(record: Collective, trace: Trace) -> tuple[int, ...]:
    return record.group_ranks or trace.groups.get(record.group or "", ())


def _listed(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), min(int(last or first), int(first) + (1 << 20)) + 1))
    return ranks
