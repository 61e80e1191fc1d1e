"""What follows from an attribution beyond its sums: its steps, its waterfall, and what to make of them."""

from __future__ import annotations

from functools import cached_property

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.annotations import Annotation, annotations_of
from ringprof.analysis.findings.summary import Summary, summarise
from ringprof.analysis.findings.verdict import NextStep, next_step_of, verdict_of
from ringprof.analysis.findings.waterfall import Waterfall, find_waterfall
from ringprof.analysis.steps.steps import ExposedBySteps, Step, StepFinder, steps_in_memory


class Findings(msgspec.Struct, frozen=True, dict=True):
    """All that a report shows of a run; each part is found when it is first asked for."""

    attribution: Attribution
    finder: StepFinder

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.attribution)

    @property
    def lists_steps(self) -> bool:
        """Whether a report lists every rank's steps."""
        return self.finder.listed

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.finder.steps

    @property
    def exposed_by_step(self) -> ExposedBySteps:
        """What each ring step exposes, over all ranks, calls and iterations."""
        return self.finder.exposed_by_step

    @cached_property
    def annotations(self) -> tuple[Annotation, ...]:
        """The user's own ranges over all ranks; none on CPU."""
        return () if self.attribution.on_cpu else annotations_of(self.attribution.ranks)

    @cached_property
    def waterfall(self) -> Waterfall:
        return find_waterfall(self.attribution, self.summary)

    @cached_property
    def verdict(self) -> tuple[str, ...]:
        """At most four lines."""
        return verdict_of(self)

    @cached_property
    def next_step(self) -> NextStep | None:
        """The largest loss, with what would shorten it."""
        return next_step_of(self)


def findings_in_memory(attribution: Attribution) -> Findings:
    """The findings of an attribution whose ranks' details stay in memory."""
    return Findings(attribution, steps_in_memory(attribution.ranks))
