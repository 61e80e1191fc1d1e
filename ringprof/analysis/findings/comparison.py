"""Several measurements side by side: what differs in their settings, and which differences are more than noise.

A figure that was repeated has an interval, and so has its ratio to another (`ringprof.analysis.findings.uncertainty`):
a difference that the interval does not prove is called noise. Where a side is a single recording, the interval assumes
how far recordings of one program differ (`ringprof.analysis.findings.recording_spread`). Times and memory are compared
only where the work is the same (`ringprof.analysis.findings.same_work`); rates and shares always are. Parts of the
waterfall are those that every entry tells apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import hypot
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from ringprof.analysis.findings.recording_spread import OTHER_SESSION, SAME_SESSION, Spread, session_spread
from ringprof.analysis.findings.same_work import WorkEvidence, WorkMatch, match_work, same_evidence
from ringprof.analysis.findings.shared_parts import merged_parts

if TYPE_CHECKING:
    from ringprof.analysis.findings.changes import RunChanges
    from ringprof.analysis.findings.findings import Findings

Recordings = Sequence[Sequence[float]]
"""One or several recordings of repeated measurements."""
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
        """Return where the median of these recordings lies, to 95 %; None where the figure was measured once.

        A single recording's interval is that of its own iterations: another recording may lie outside.
        """
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
    evidence: WorkEvidence | None = None
    """What its traces show of the work; None for a table or a log."""
    times_are_of: str = "one iteration"
    """What its times are of, in words: also ``one iteration (2 captured)``, ``the captured block``."""

    def values(self) -> dict[str, float]:
        """Every figure by name, for conditions."""
        return {**self.others, **{name: figure.value for name, figure in self.figures.items()}}


class AssumedSpread(msgspec.Struct, frozen=True):
    """How far recordings of one program are assumed to differ, where a side is a single recording."""

    share: float
    """Standard deviation of one recording, as a share."""
    source: str
    """What it was measured on, in words."""


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
    assumed_spread: AssumedSpread | None = None
    """What the interval assumes; None where both sides are several recordings, or the figure was measured once."""
    recordings_to_decide: int | None = None
    """Recordings per side, made in turns, that show a difference of this size in four of five cases. None where it is
    shown already, a side is several recordings, or more than `MOST_RECORDINGS` would be needed."""


@dataclass(frozen=True)
class Comparison:
    """All entries, the first being the base."""

    entries: tuple[Entry, ...]
    differing: Mapping[str, tuple[str | None, ...]]
    """Settings that are not the same everywhere, with every entry's."""
    figures: tuple[str, ...]
    """Every figure that some entry has, in the order of their appearance."""
    differences: tuple[Difference, ...]
    work: tuple[WorkMatch, ...] = ()
    """Whether each entry after the base did the base's work, and what says so."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """Parts of the waterfall that not every entry tells apart, with the part that holds each in all of them."""
    runs: tuple[Findings, ...] = field(default=(), repr=False, compare=False)
    """What two single runs or traces of the same work were found to be, for `changes`; else empty."""

    @cached_property
    def changes(self) -> RunChanges | None:
        """What became of the time between two runs; None where it is not two runs of the same work."""
        from ringprof.analysis.findings.changes import changes_between  # here: logs are read without numpy

        return changes_between(*self.runs) if len(self.runs) == 2 else None

    @cached_property
    def withheld(self) -> tuple[str, ...]:
        """Figures that depend on the work and are compared for no entry."""
        if any(match.same for match in self.work):
            return ()
        return tuple(
            name
            for name in self.figures
            if any(name in entry.figures and entry.figures[name].depends_on_work for entry in self.entries)
        )

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
        evidence=first.evidence if all(same_evidence(first.evidence, entry.evidence) for entry in ordered) else None,
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
    merged = merged_parts([_parts_of(entry) for entry in entries if _parts_of(entry)])
    entries = [_with_merged_parts(entry, merged) for entry in entries]
    work = tuple(match_work(entries[0], entry, did_same_work=did_same_work) for entry in entries[1:])
    names = dict.fromkeys(name for entry in entries for name in entry.settings)
    settings = {name: tuple(entry.settings.get(name) for entry in entries) for name in names}
    figures = tuple(dict.fromkeys(name for entry in entries for name in entry.figures))
    differences = [
        _difference(name, index, entries[0], entry, same_work=work[index - 1].same)
        for name in figures
        for index, entry in enumerate(entries)
        if index
    ]
    return Comparison(
        entries=tuple(entries),
        differing={name: values for name, values in settings.items() if len(set(values)) > 1},
        figures=figures,
        differences=tuple(differences),
        work=work,
        merged=merged,
        runs=tuple(runs) if len(runs) == len(entries) == 2 and work[0].same else (),
    )


def _parts_of(entry: Entry) -> set[str]:
    """The parts of the entry's waterfall."""
    return {
        name.removeprefix(WATERFALL_PREFIX).removesuffix("_ms")
        for name in entry.figures
        if name.startswith(WATERFALL_PREFIX)
    }


def _with_merged_parts(entry: Entry, merged: Mapping[str, str]) -> Entry:
    """Return the entry with each of the ``merged`` parts added to the part that holds it."""
    names = {WATERFALL_PREFIX + part: WATERFALL_PREFIX + whole for part, whole in merged.items()}
    figures: dict[str, Figure] = {}
    for name, figure in entry.figures.items():
        plain = name.removesuffix("_ms")
        target = f"{names[plain]}_ms" if plain in names else name
        figures[target] = _sum(figures[target], figure) if target in figures else figure
    others: dict[str, float] = {}
    for name, value in entry.others.items():
        others[names.get(name, name)] = others.get(names.get(name, name), 0.0) + value
    return msgspec.structs.replace(entry, figures=figures, others=others)


def _sum(one: Figure, other: Figure) -> Figure:
    """Add two parts of a waterfall, recording by recording."""
    recordings = tuple(
        tuple(a + b for a, b in zip(ones, others, strict=True))
        for ones, others in zip(one.recordings, other.recordings, strict=True)
    )
    value = median(sum(recordings, ())) if recordings else one.value + other.value
    return msgspec.structs.replace(one, value=value, recordings=recordings)


def interleaved(one: Entry, other: Entry) -> bool:
    """Whether their recordings were made in turns: each next two are one of both."""
    count = len(one.created)
    times = sorted([(time, 0) for time in one.created] + [(time, 1) for time in other.created])
    pairs = [{times[at][1], times[at + 1][1]} for at in range(0, len(times) - 1, 2)]
    return count == len(other.created) >= FEWEST_TURNS and all(len(pair) == 2 for pair in pairs)


def _difference(name: str, index: int, base: Entry, entry: Entry, *, same_work: bool) -> Difference:
    mine, theirs = base.figures.get(name), entry.figures.get(name)
    if mine is None or theirs is None:
        return Difference(name, index, None, None, "missing")
    if mine.depends_on_work and not same_work:
        return Difference(name, index, None, None, "not comparable")
    from ringprof.analysis.findings.uncertainty import differ, ratio_interval  # here: logs are read without numpy

    # Equal figures have the ratio 1, zeros too.
    ratio = 1.0 if theirs.value == mine.value else theirs.value / mine.value if mine.value else None
    repeated, turns = (mine.recordings, theirs.recordings), interleaved(base, entry)
    assumed = _assumed_spread(base, entry) if min(map(len, repeated)) == 1 else None
    spread = 2**0.5 * assumed.share if assumed else 0.0
    low, high = ratio_interval(*repeated, interleaved=turns, spread=spread) or (None, None)
    proved = None if low is None else differ(*repeated, interleaved=turns, spread=spread)
    verdict = _verdict(mine, theirs, proved=proved)
    needed = recordings_to_decide(base, entry, name) if verdict == "noise" else None
    assumed = None if low is None else assumed
    return Difference(name, index, theirs.value - mine.value, ratio, verdict, low, high, assumed, needed)


def recordings_to_decide(base: Entry, entry: Entry, figure: str, limit: float = 1.0) -> int | None:
    """Return how many recordings per side would tell the ratio of two single recordings' figures from ``limit``.

    They are made in turns and in one session. None as in `uncertainty.recordings_to_decide`, and where a side is
    several recordings.
    """
    from ringprof.analysis.findings import uncertainty  # here: logs are read without numpy

    sides = base.figures[figure].recordings, entry.figures[figure].recordings
    if [len(side) for side in sides] != [1, 1] or limit <= 0:
        return None
    spread = 2**0.5 * _assumed_spread(base, entry, SAME_SESSION).share
    return uncertainty.recordings_to_decide(sides[0][0], sides[1][0], spread, limit)


def _assumed_spread(base: Entry, entry: Entry, spread: Spread | None = None) -> AssumedSpread:
    """Return the spread of recordings as long as these: that of one session, unless they are of two."""
    if spread is None:
        spread = session_spread((*base.created, *entry.created)) if base.created and entry.created else OTHER_SESSION
    shares = [spread.share_of(_iteration_ms(each)) for each in (base, entry)]
    return AssumedSpread(hypot(*shares) / 2**0.5, spread.source)


def _iteration_ms(entry: Entry) -> float | None:
    """Return the time of one iteration: without the profiler, else with it; None where it is not known."""
    names = ("iteration_ms", "profiled_iteration_ms", "wall_ms")
    return next((entry.figures[name].value for name in names if name in entry.figures), None)


def _verdict(base: Figure, other: Figure, *, proved: bool | None) -> str:
    if base.value == other.value:
        return "same"
    if proved is False:
        return "noise"
    if proved is None or base.higher_is_better is None:
        return "differs"
    return "better" if (other.value > base.value) == base.higher_is_better else "worse"
