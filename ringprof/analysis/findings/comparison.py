"""Several measurements side by side: what differs in their settings, and which differences are more than noise.

A figure that was repeated carries its range. Two figures whose ranges overlap differ by no more than their spread: the
difference is called noise. Times and memory are set against each other only where the work is known to be the same;
rates and shares always are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WORK = ("seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "world_size", "passes")
"""Settings that say how much work was done, and by how many."""
_UNLESS_STATED = ("layers", "steps", "mask")
"""Settings that say how often, and by which mask; where they are not stated, once, and causal or full."""

WATERFALL = "waterfall."
"""How the names of the figures begin that are parts of the slowest rank's wall."""


@dataclass(frozen=True)
class Figure:
    """One measured figure."""

    value: float
    unit: str
    """``ms``, ``TFLOP/s``, ``share`` (0..1), ``MiB``."""
    low: float | None = None
    """Least of the repeated measurements; None where it was measured once."""
    high: float | None = None
    higher_is_better: bool | None = None
    """None where neither is."""
    depends_on_work: bool = False
    """Whether it means something only for the same work: times, memory."""


@dataclass(frozen=True)
class Entry:
    """One measurement: a run, a trace, a printed table or a row of a log."""

    label: str
    source: str
    """``run``, ``trace``, ``table`` or ``log``."""
    settings: Mapping[str, str | None]
    """Settings and hardware as text; None for what the source does not say."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What stands against its figures."""


@dataclass(frozen=True)
class Difference:
    """One figure of one entry against the first entry's."""

    figure: str
    entry: int
    """Index of the entry."""
    difference: float | None
    ratio: float | None
    verdict: str
    """``better``, ``worse``, ``noise``, ``same``, ``not comparable`` or ``missing``; ``differs`` where a figure was
    measured once, so that nothing says how much of the difference is noise, or where neither side is better."""


@dataclass(frozen=True)
class Comparison:
    """All entries, the first being the base."""

    entries: tuple[Entry, ...]
    differing: Mapping[str, tuple[str | None, ...]]
    """Settings that are not the same everywhere, with every entry's."""
    figures: tuple[str, ...]
    """Every figure that some entry has, in the order of their appearance."""
    differences: tuple[Difference, ...]


def compare(entries: Sequence[Entry]) -> Comparison:
    """Set every entry against the first. Raises ValueError for fewer than two."""
    if len(entries) < 2:
        raise ValueError("a comparison needs two measurements or more")
    names = dict.fromkeys(name for entry in entries for name in entry.settings)
    settings = {name: tuple(entry.settings.get(name) for entry in entries) for name in names}
    figures = tuple(dict.fromkeys(name for entry in entries for name in entry.figures))
    differences = [
        _difference(name, index, entries[0], entry) for name in figures for index, entry in enumerate(entries) if index
    ]
    return Comparison(
        entries=tuple(entries),
        differing={name: values for name, values in settings.items() if len(set(values)) > 1},
        figures=figures,
        differences=tuple(differences),
    )


def same_work(one: Entry, other: Entry) -> bool:
    """Whether both are known to have done the same work."""
    if any(one.settings.get(name) != other.settings.get(name) for name in (*WORK, *_UNLESS_STATED)):
        return False
    return all(one.settings.get(name) is not None for name in WORK)


def _difference(name: str, index: int, base: Entry, entry: Entry) -> Difference:
    mine, theirs = base.figures.get(name), entry.figures.get(name)
    if mine is None or theirs is None:
        return Difference(name, index, None, None, "missing")
    if mine.depends_on_work and not same_work(base, entry):
        return Difference(name, index, None, None, "not comparable")
    ratio = theirs.value / mine.value if mine.value else None
    return Difference(name, index, theirs.value - mine.value, ratio, _verdict(mine, theirs))


def _verdict(base: Figure, other: Figure) -> str:
    if base.value == other.value:
        return "same"
    if base.low is None or base.high is None or other.low is None or other.high is None:
        return "differs"
    if base.low <= other.high and other.low <= base.high:
        return "noise"
    if base.higher_is_better is None:
        return "differs"
    return "better" if (other.value > base.value) == base.higher_is_better else "worse"
