"""Findings of a run, derived from its attribution: summary, ring steps, waterfall, annotations and verdict."""

from __future__ import annotations

from functools import cached_property

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.annotations import Annotation, annotations_of
from ringprof.analysis.findings.by_shape import Gemm, LayerTotals, collectives_of_run, gemms_of, layers_of_run
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.inference import Inference, inference_of
from ringprof.analysis.findings.parts import parts_in_words
from ringprof.analysis.findings.step_rates import StepRates, step_rates_of
from ringprof.analysis.findings.summary import Summary, summarise
from ringprof.analysis.findings.verdict import NextStep, next_step_of, verdict_of
from ringprof.analysis.findings.waterfall import Facts, Waterfall, find_waterfall
from ringprof.analysis.steps.steps import ExposedBySteps, Step, StepFinder, steps_in_memory
from ringprof.analysis.transfers.collectives import CollectiveTotals
from ringprof.kernel_rates import DeviceRates


class Findings(msgspec.Struct, frozen=True, dict=True):
    """Contents of a report on one run; each part is computed at its first access."""

    attribution: Attribution
    finder: StepFinder
    calibration: DeviceRates | None = None
    """The user's own calibration of the device, used instead of the bundled one; None: the bundled one."""

    @cached_property
    def summary(self) -> Summary:
        """Totals and means over ranks."""
        return summarise(self.attribution)

    @cached_property
    def inference(self) -> Inference | None:
        """Metrics of a recording of prefill or decode; None for anything else."""
        return inference_of(self.attribution, self.summary)

    @cached_property
    def step_rates(self) -> StepRates | None:
        """Rates of a step by recorded shapes; None where no trace holds shapes."""
        return step_rates_of(self.attribution)

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """Matrix products by shape over all ranks; empty without recorded shapes."""
        return gemms_of(self.attribution)

    @cached_property
    def collectives(self) -> tuple[CollectiveTotals, ...]:
        """Communication by kind, group and size over all ranks; empty on CPU."""
        return collectives_of_run(self.attribution)

    @cached_property
    def layers(self) -> tuple[LayerTotals, ...]:
        """Attention and communication by layer of the model; empty where the traces name no layers."""
        return layers_of_run(self.attribution)

    @property
    def lists_steps(self) -> bool:
        """Whether a report lists every rank's steps."""
        return self.finder.listed

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every ring step of every rank."""
        return self.finder.steps

    @property
    def exposed_by_step(self) -> ExposedBySteps:
        """Exposed communication by ring step, over all ranks, calls and iterations."""
        return self.finder.exposed_by_step

    @cached_property
    def annotations(self) -> tuple[Annotation, ...]:
        """User annotations over all ranks; empty on CPU."""
        return () if self.attribution.on_cpu else annotations_of(self.attribution.ranks)

    @cached_property
    def facts(self) -> Facts:
        """Source of all sentences."""
        waterfall = find_waterfall(self.attribution, self.summary, self.calibration)
        return Facts(self.attribution, self.summary, waterfall, self.finder)

    @cached_property
    def waterfall(self) -> Waterfall:
        """Parts of the slowest rank's wall time."""
        return msgspec.structs.replace(self.facts.waterfall, parts=parts_in_words(self.facts))

    @cached_property
    def verdict(self) -> tuple[str, ...]:
        """Main findings in words, at most four lines."""
        return verdict_of(self.facts)

    @cached_property
    def next_step(self) -> NextStep | None:
        """Largest loss with a recommendation; None where there is none."""
        return next_step_of(self.facts)

    @property
    def claims(self) -> list[Claim]:
        """Sentences with figures: verdict, largest loss, and the evidence and remedy of each part of the waterfall."""
        step = [self.next_step.text] if self.next_step else []
        parts = [text for part in self.waterfall.parts for text in (part.evidence, part.remedy)]
        texts = (*self.verdict, *step, *parts)
        return [text for text in texts if isinstance(text, Claim) and text.figures]


def findings_in_memory(attribution: Attribution) -> Findings:
    """Return the findings of an attribution whose ranks' details stay in memory."""
    return Findings(attribution, steps_in_memory(attribution.ranks))
