"""Changes in time between two runs: by part of the waterfall, by ring step and by kernel, largest change first.

All times are per profiled iteration, or per captured block where its iterations are not known, and means over ranks.
Shares are relative to the slowest rank's wall time in the base run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import shared_parts
from ringprof.analysis.findings.parts import PASSES, WATERFALL_LABELS
from ringprof.analysis.findings.waterfall import COMMUNICATION_PARTS

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
        is_range = len(named) > 2 and max(named) - min(named) == len(named) - 1
        numbers = f"{min(named)} to {max(named)}" if is_range else ", ".join(map(str, sorted(named)))
        steps = f"step{'s' if len(named) > 1 else ''} {numbers}"
        return f"; by ring step {covered:+.1f} % exposed in {PASSES.get(phase, phase)} {steps}"


def changes_between(base: Findings, other: Findings) -> RunChanges:
    """Compare the times of two runs, which must have done the same work."""
    base_wall_ns = base.waterfall.wall_ns / base.summary.times_divisor or 1.0

    def changed(base_ns: Mapping[str, float], other_ns: Mapping[str, float]) -> tuple[Change, ...]:
        """Pair the times of both runs by name, largest change first."""
        pairs = {name: (base_ns.get(name, 0.0), other_ns.get(name, 0.0)) for name in (*base_ns, *other_ns)}
        rows = [Change(name, old, new, (new - old) / base_wall_ns) for name, (old, new) in pairs.items()]
        return tuple(sorted(rows, key=lambda row: -abs(row.share)))

    by_part, by_step, by_kernel = zip(_times_of(base), _times_of(other), strict=True)
    return RunChanges(changed(*shared_parts(by_part)), changed(*by_step), changed(*by_kernel))


def _times_of(findings: Findings) -> tuple[dict[str, float], ...]:
    """Return nanoseconds by part of the waterfall and, as means over ranks, exposed by ring step, and by kernel."""
    iterations = findings.summary.times_divisor
    divisor = len(findings.attribution.ranks) * iterations
    by_step: dict[str, float] = defaultdict(float)
    for (phase, step), (time, _) in findings.exposed_by_step.items():
        by_step[f"{phase} {step}"] += time / divisor
    by_kernel: dict[str, float] = defaultdict(float)
    for kernel in findings.attribution.kernels:
        by_kernel[kernel.name] += kernel.time_ns / divisor
    return {part.part: part.time_ns / iterations for part in findings.waterfall.parts}, by_step, by_kernel
