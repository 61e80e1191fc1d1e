"""Several measurements side by side: what differs in their settings, and which differences are more than noise.

A figure that was repeated has an interval, and so has its ratio to another (`ringprof.analysis.findings.uncertainty`):
a difference that the interval does not prove is called noise. Times and memory are set against each other only where
the work is known to be the same; rates and shares always are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ringprof.analysis.findings.changes import RunChanges
    from ringprof.analysis.findings.findings import Findings

Recordings = Sequence[Sequence[float]]
"""One or several recordings of repeated measurements."""
WORK = ("seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "world_size", "passes")
"""Settings that say how much work was done, and by how many."""
_UNLESS_STATED = ("layers", "steps", "mask", "v_head_dim", "scores")
"""Settings that say how often, by which mask, with which heads of v and what is done to scores; where they are not
stated: once, causal or full, as those of q and k, and nothing."""

FEWEST_TURNS = 4
"""Recordings of each from which it is surer to set those made in turns against each other one by one."""

WATERFALL_PREFIX = "waterfall."
"""How the names of the figures begin that are parts of the slowest rank's wall."""


class Figure(msgspec.Struct, frozen=True):
    """One measured figure."""

    value: float
    unit: str
    """``ms``, ``TFLOP/s``, ``share`` (0..1), ``MiB``."""
    recordings: Recordings = ()
    """The repeated measurements that ``value`` is the median of, by recording; empty where it was measured once."""
    higher_is_better: bool | None = None
    """None where neither is."""
    depends_on_work: bool = False
    """Whether it means something only for the same work: times, memory."""

    def interval(self) -> tuple[float, float] | None:
        """Where the figure lies, to 95 %; None where it was measured once."""
        from ringprof.analysis.findings.uncertainty import own_interval  # here: logs are read without numpy

        return own_interval(self.recordings)


class Entry(msgspec.Struct, frozen=True):
    """One measurement: a run, a trace, a printed table, a row of a log; or several recordings of one run."""

    label: str
    source: str
    """``run``, ``trace``, ``table`` or ``log``."""
    settings: Mapping[str, str | None]
    """Settings and hardware as text; None for what the source does not say."""
    figures: Mapping[str, Figure] = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What stands against its figures."""
    others: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Figures that only conditions name: those of its report that are not among ``figures``."""
    created: tuple[str, ...] = ()
    """When each of its recordings was made, ISO 8601; empty where that is not known."""
    times_are_of: str = "one iteration"
    """What its times are of, in words: also ``one iteration (2 captured)``, ``the captured block``."""

    def values(self) -> dict[str, float]:
        """Every figure by name, for conditions."""
        return {**self.others, **{name: figure.value for name, figure in self.figures.items()}}


class Difference(msgspec.Struct, frozen=True):
    """One figure of one entry against the first entry's."""

    figure: str
    entry: int
    """Index of the entry."""
    difference: float | None
    ratio: float | None
    verdict: str
    """``better``, ``worse``, ``noise``, ``same``, ``not comparable`` or ``missing``; ``differs`` where a figure was
    measured once, so that nothing says how much of the difference is noise, or where neither side is better."""
    low: float | None = None
    """The 95 % interval of the ratio; None where a figure was measured once."""
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All entries, the first being the base."""

    entries: tuple[Entry, ...]
    differing: Mapping[str, tuple[str | None, ...]]
    """Settings that are not the same everywhere, with every entry's."""
    figures: tuple[str, ...]
    """Every figure that some entry has, in the order of their appearance."""
    differences: tuple[Difference, ...]
    runs: tuple[Findings, ...] = field(default=(), repr=False, compare=False)
    """What two single runs or traces of the same work were found to be, for `changes`; else empty."""

    @cached_property
    def changes(self) -> RunChanges | None:
        """What became of the time between two runs; None where it is not two runs of the same work."""
        from ringprof.analysis.findings.changes import changes_between  # here: logs are read without numpy

        return changes_between(*self.runs) if len(self.runs) == 2 else None

    def against_base(self, figure: str, entry: int) -> Difference | None:
        """How a figure of an entry differs from the base's; None for the base itself."""
        return next((one for one in self.differences if (one.figure, one.entry) == (figure, entry)), None)


def as_one(entries: Sequence[Entry]) -> Entry:
    """Several recordings of one run as one entry: every figure is the median over them, and is repeated by them.

    A setting in which they differ is given as all of its values. Figures that not all have are left out.
    """
    ordered = sorted(entries, key=lambda entry: entry.created)
    first = ordered[0]
    if len(ordered) == 1:
        return first
    settings = {name: _all_values([entry.settings.get(name) for entry in ordered]) for name in first.settings}
    figures = {}
    for name, figure in first.figures.items():
        each = [entry.figures[name] for entry in ordered if name in entry.figures]
        if len(each) == len(ordered):
            values = [one.value for one in each]
            figures[name] = msgspec.structs.replace(
                figure, value=median(values), recordings=tuple((value,) for value in values)
            )
    return Entry(
        label=f"{first.label} and {len(ordered) - 1} more",
        source=first.source,
        settings=settings,
        figures=figures,
        warnings=tuple(f"{entry.label}: {text}" for entry in ordered for text in entry.warnings),
        others={name: median([entry.others[name] for entry in ordered]) for name in first.others
                if all(name in entry.others for entry in ordered)},
        created=tuple(time for entry in ordered for time in entry.created),
        times_are_of=_all_values([entry.times_are_of for entry in ordered]) or "",
    )  # fmt: skip


def _all_values(values: Sequence[str | None]) -> str | None:
    known = dict.fromkeys(value or "unknown" for value in values)
    return values[0] if len(known) == 1 else ", ".join(known)


def compare_entries(
    entries: Sequence[Entry], runs: Sequence[Findings] = (), *, did_same_work: bool = False
) -> Comparison:
    """Set every entry against the first. Raises ValueError for fewer than two.

    ``runs``: the findings of the entries that are a single run or trace. ``did_same_work``: whether the user knows that
    all entries did the same work.
    """
    if len(entries) < 2:
        raise ValueError("a comparison needs two measurements or more")
    names = dict.fromkeys(name for entry in entries for name in entry.settings)
    settings = {name: tuple(entry.settings.get(name) for entry in entries) for name in names}
    figures = tuple(dict.fromkeys(name for entry in entries for name in entry.figures))
    differences = [
        _difference(name, index, entries[0], entry, did_same_work=did_same_work)
        for name in figures
        for index, entry in enumerate(entries)
        if index
    ]
    return Comparison(
        entries=tuple(entries),
        differing={name: values for name, values in settings.items() if len(set(values)) > 1},
        figures=figures,
        differences=tuple(differences),
        runs=tuple(runs) if len(runs) == len(entries) == 2 and (did_same_work or same_work(*entries)) else (),
    )


def same_work(one: Entry, other: Entry) -> bool:
    """Whether both are known to have done the same work."""
    if any(one.settings.get(name) != other.settings.get(name) for name in (*WORK, *_UNLESS_STATED)):
        return False
    return all(one.settings.get(name) is not None for name in WORK)


def in_turns(one: Entry, other: Entry) -> bool:
    """Whether their recordings were made in turns: each next two are one of both."""
    count = len(one.created)
    times = sorted([(time, 0) for time in one.created] + [(time, 1) for time in other.created])
    pairs = [{times[at][1], times[at + 1][1]} for at in range(0, len(times) - 1, 2)]
    return count == len(other.created) >= FEWEST_TURNS and all(len(pair) == 2 for pair in pairs)


def _difference(name: str, index: int, base: Entry, entry: Entry, *, did_same_work: bool) -> Difference:
    mine, theirs = base.figures.get(name), entry.figures.get(name)
    if mine is None or theirs is None:
        return Difference(name, index, None, None, "missing")
    if mine.depends_on_work and not (did_same_work or same_work(base, entry)):
        return Difference(name, index, None, None, "not comparable")
    from ringprof.analysis.findings.uncertainty import differ, ratio_interval  # here: logs are read without numpy

    ratio = theirs.value / mine.value if mine.value else None
    repeated, turns = (mine.recordings, theirs.recordings), in_turns(base, entry)
    low, high = ratio_interval(*repeated, in_turns=turns) or (None, None)
    verdict = _verdict(mine, theirs, proved=None if low is None else differ(*repeated, in_turns=turns))
    return Difference(name, index, theirs.value - mine.value, ratio, verdict, low, high)


def _verdict(base: Figure, other: Figure, *, proved: bool | None) -> str:
    if base.value == other.value:
        return "same"
    if proved is False:
        return "noise"
    if proved is None or base.higher_is_better is None:
        return "differs"
    return "better" if (other.value > base.value) == base.higher_is_better else "worse"
