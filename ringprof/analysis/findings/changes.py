"""Changes in time between two runs: by part of the waterfall, by ring step and by kernel, largest change first.

All times are per profiled iteration, or per captured block where its iterations are not known, and means over ranks.
Shares are relative to the slowest rank's wall time in the base run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.shared_parts import shared_parts
from ringprof.analysis.findings.verdict import PASSES
from ringprof.analysis.findings.waterfall import COMMUNICATION_PARTS, WATERFALL_LABELS

MIN_SHARE = 0.01
"""Smallest share of the base's wall time that is named as a change."""
MAX_PARTS = 3
"""Largest number of waterfall parts that a sentence names."""
STEP_COVERAGE = 0.8
"""Share of a pass's change that the named ring steps must cover."""


@dataclass(frozen=True)
class Change:
    """Time of one part, ring step or kernel in both runs, in nanoseconds."""

    what: str
    """Name of the part, ring step or kernel."""
    base_ns: float
    other_ns: float
    share: float
    """Difference as a share of the base's wall time; negative where the other run spends less."""


@dataclass(frozen=True)
class RunChanges:
    """All changes between two runs of the same work, largest first; equal names are summed."""

    parts: tuple[Change, ...]
    """Changes by part of the waterfall; they sum to the change of the slowest rank's wall time."""
    steps: tuple[Change, ...]
    """Changes of the exposed communication by ring step, such as ``bwd 3``."""
    kernels: tuple[Change, ...]
    """Changes by kernel name."""

    def sentence(self) -> str:
        """Name the largest changes by part, then the ring steps with most of the exposed change; empty without any."""
        largest = [change for change in self.parts if abs(change.share) >= MIN_SHARE][:MAX_PARTS]
        texts = [f"{100 * change.share:+.1f} % {WATERFALL_LABELS[change.what]}" for change in largest]
        exposed = [change for change in largest if change.what in COMMUNICATION_PARTS]
        return ", ".join(texts) + (self._step_clause(exposed[0].share) if exposed else "")

    def _step_clause(self, share: float) -> str:
        """Name the ring steps that hold most of the exposed change, in the pass that changed most.

        ``share`` is the change of the exposed part; only steps that change in its direction count.
        """
        sign = 1 if share > 0 else -1
        passes: dict[str, dict[int, float]] = defaultdict(dict)
        for change in self.steps:
            phase, step = change.what.split(" ")
            passes[phase][int(step)] = max(0.0, sign * change.share)
        phase = max(passes, key=lambda name: sum(passes[name].values()), default="")
        pass_change = sum(passes[phase].values()) if phase else 0.0
        if pass_change < MIN_SHARE / 2:
            return ""
        named: list[int] = []
        for number, share in sorted(passes[phase].items(), key=lambda item: -item[1]):
            if sum(passes[phase][earlier] for earlier in named) < STEP_COVERAGE * pass_change and share:
                named.append(number)
        covered = sign * 100 * sum(passes[phase][step_number] for step_number in named)
        steps = f"step{'s' if len(named) > 1 else ''} {_steps_in_words(sorted(named))}"
        return f"; by ring step {covered:+.1f} % exposed in {PASSES.get(phase, phase)} {steps}"


def _steps_in_words(steps: list[int]) -> str:
    """Return ascending step numbers as text: ``1 to 4``, or ``1, 3``."""
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def changes_between(base: Findings, other: Findings) -> RunChanges:
    """Compare the times of two runs, which must have done the same work."""
    base_wall_ns = base.waterfall.wall_ns / _times_divisor(base) or 1.0

    def changed(base_ns: Mapping[str, float], other_ns: Mapping[str, float]) -> tuple[Change, ...]:
        """Pair the times of both runs by name, largest change first."""
        rows = [
            Change(
                name,
                base_ns.get(name, 0.0),
                other_ns.get(name, 0.0),
                (other_ns.get(name, 0.0) - base_ns.get(name, 0.0)) / base_wall_ns,
            )
            for name in dict.fromkeys([*base_ns, *other_ns])
        ]
        return tuple(sorted(rows, key=lambda row: -abs(row.share)))

    parts = shared_parts([_time_by_part(base), _time_by_part(other)])
    return RunChanges(
        changed(*parts), *(changed(times(base), times(other)) for times in (_exposed_by_step, _time_by_kernel))
    )


def _times_divisor(findings: Findings) -> int:
    """Return the divisor that makes a time of the window one of an iteration."""
    return findings.summary.times_divisor


def _time_by_part(findings: Findings) -> dict[str, float]:
    """Return the nanoseconds of each part of the waterfall."""
    return {part.part: part.time_ns / _times_divisor(findings) for part in findings.waterfall.parts}


def _exposed_by_step(findings: Findings) -> dict[str, float]:
    """Return the exposed nanoseconds of each ring step, mean over ranks."""
    divisor = len(findings.attribution.ranks) * _times_divisor(findings)
    times: dict[str, float] = defaultdict(float)
    for (phase, step), (time, _) in findings.exposed_by_step.items():
        times[f"{phase} {step}"] += time / divisor
    return times


def _time_by_kernel(findings: Findings) -> dict[str, float]:
    """Return the nanoseconds of each kernel by name, mean over ranks."""
    divisor = len(findings.attribution.ranks) * _times_divisor(findings)
    times: dict[str, float] = defaultdict(float)
    for kernel in findings.attribution.kernels:
        times[kernel.name] += kernel.time_ns / divisor
    return times
