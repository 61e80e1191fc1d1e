"""What became of the time between two runs: by part of the waterfall, by ring step and by kernel, largest change first.

All times are of one profiled iteration (of a captured block whose iterations are not known: of the block), means over
ranks; shares are of the slowest rank's wall in the base's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.shared_parts import shared_parts
from ringprof.analysis.findings.verdict import PASSES
from ringprof.analysis.findings.waterfall import COMMUNICATION_PARTS, WATERFALL_LABELS

WORTH_SAYING = 0.01
"""The least share of the base's wall that is named as a change."""
MOST_SAID = 3
MOST_OF_IT = 0.8
"""Share of what a pass changed by that the steps which are named hold."""


@dataclass(frozen=True)
class Change:
    """One thing's time in both runs, in nanoseconds."""

    what: str
    base_ns: float
    other_ns: float
    share: float
    """Of the change, in the base's wall: negative where the other run spends less."""


@dataclass(frozen=True)
class RunChanges:
    """Every change between two runs of the same work, largest first; each sums over what is named alike."""

    parts: tuple[Change, ...]
    """By part of the waterfall: they sum to the change of the slowest rank's wall."""
    steps: tuple[Change, ...]
    """By ring step, as ``bwd 3``: what it exposes."""
    kernels: tuple[Change, ...]

    def sentence(self) -> str:
        """The largest changes by part, then the steps that hold most of what is exposed; empty where none is large."""
        said = [one for one in self.parts if abs(one.share) >= WORTH_SAYING][:MOST_SAID]
        named = [f"{100 * one.share:+.1f} % {WATERFALL_LABELS[one.what]}" for one in said]
        exposed = [one for one in said if one.what in COMMUNICATION_PARTS]
        return ", ".join(named) + (self._where(exposed[0].share) if exposed else "")

    def _where(self, share: float) -> str:
        """What of the exposed time changed in the steps that changed most, of the pass that did."""
        way = 1 if share > 0 else -1
        passes: dict[str, dict[int, float]] = defaultdict(dict)
        for one in self.steps:
            phase, step = one.what.split(" ")
            passes[phase][int(step)] = max(0.0, way * one.share)
        phase = max(passes, key=lambda name: sum(passes[name].values()), default="")
        whole = sum(passes[phase].values()) if phase else 0.0
        if whole < WORTH_SAYING / 2:
            return ""
        named: list[int] = []
        for number, share in sorted(passes[phase].items(), key=lambda item: -item[1]):
            if sum(passes[phase][one] for one in named) < MOST_OF_IT * whole and share:
                named.append(number)
        held = way * 100 * sum(passes[phase][one] for one in named)
        steps = f"step{'s' if len(named) > 1 else ''} {_listed(sorted(named))}"
        return f"; by ring step {held:+.1f} % exposed in {PASSES.get(phase, phase)} {steps}"


def _listed(steps: list[int]) -> str:
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def changes_between(base: Findings, other: Findings) -> RunChanges:
    """What of the time changed; both must have done the same work."""
    wall = base.waterfall.wall_ns / _iterations(base) or 1.0

    def changed(one: Mapping[str, float], two: Mapping[str, float]) -> tuple[Change, ...]:
        rows = [
            Change(name, one.get(name, 0.0), two.get(name, 0.0), (two.get(name, 0.0) - one.get(name, 0.0)) / wall)
            for name in dict.fromkeys([*one, *two])
        ]
        return tuple(sorted(rows, key=lambda row: -abs(row.share)))

    parts = shared_parts([_parts(base), _parts(other)])
    return RunChanges(changed(*parts), *(changed(of(base), of(other)) for of in (_steps, _kernels)))


def _iterations(found: Findings) -> int:
    return found.summary.times_divisor


def _parts(found: Findings) -> dict[str, float]:
    return {part.part: part.time_ns / _iterations(found) for part in found.waterfall.parts}


def _steps(found: Findings) -> dict[str, float]:
    whole = len(found.attribution.ranks) * _iterations(found)
    times: dict[str, float] = defaultdict(float)
    for (phase, step), (time, _) in found.exposed_by_step.items():
        times[f"{phase} {step}"] += time / whole
    return times


def _kernels(found: Findings) -> dict[str, float]:
    whole = len(found.attribution.ranks) * _iterations(found)
    times: dict[str, float] = defaultdict(float)
    for one in found.attribution.kernels:
        times[one.name] += one.time_ns / whole
    return times
