"""A prediction as a page: the time with its interval, where it goes, how sure it is and what it rests on."""

from __future__ import annotations

import math

from ringprof.common.formatting import percent
from ringprof.prediction.predict import PredictionResult, inputs
from ringprof.prediction.text import cluster_text, described, part_labels, remarks
from ringprof.report import palette
from ringprof.report.page import bars
from ringprof.report.page.document import Content, Document, PageSection, PageTable, number, text
from ringprof.report.text import LONGEST_SENTENCE, binary_size, clean, duration, rate, strategy_in_title

_COLOURS = {
    "kernel": palette.PART_COLOURS["compute"],
    "memory": palette.PART_COLOURS["exposed_memory"],
    "same_host": palette.WIRE,
    "other_host": palette.UNSPLIT,
    "peers": palette.WAIT,
    "host": palette.GREY,
}
"""Colour of each part of `part_labels`."""
_LEAST_VARIANCE = 1e-6
"""Variance below which an input does not count as a source of uncertainty."""


def document(prediction: PredictionResult) -> Document:
    """Return the page of a prediction."""
    query = prediction.query
    low_ns, median_ns, high_ns = prediction.interval_ns
    label = strategy_in_title(query.strategy, prediction.schedule.params)
    answer = (
        f"Predicted: {duration(median_ns)} per iteration ({duration(low_ns)} to {duration(high_ns)} in four of five "
        f"cases), {rate(prediction.tflops(median_ns))} per GPU; {percent(prediction.exposed_share)} of the time waits "
        "for transfers and peers."
    )
    labels = part_labels(query.workload)
    bound = ", ".join(f"{phase}: {labels[part]}" for phase, part in prediction.bound_by.items())
    tiles = [
        (duration(median_ns), "per iteration, predicted"),
        (rate(prediction.tflops(median_ns)), "per GPU"),
        (binary_size(prediction.peak_bytes), "per GPU at most"),
    ]
    sections = [
        PageSection("parts", "Where the time goes", "Time of the slowest rank by phase.", _parts(prediction)),
        PageSection(
            "certainty", "How sure it is", "Standard deviation of the predicted time by what is uncertain.",
            _certainty(prediction),
        ),
        PageSection("inputs", "What it rests on", "Figures of the machine file, with spread and origin.",
                    Content(tables=[_inputs(prediction)])),
    ]  # fmt: skip
    lines = [clean(line, LONGEST_SENTENCE) for line in (*remarks(prediction), f"longest part: {bound}") if line]
    subtitle = f"{cluster_text(query.cluster, prediction.machine.device)} · {described(query.workload)}"
    return Document(
        clean(f"Predicted: {label}"), clean(f"{subtitle} · kernel {query.kernel}", LONGEST_SENTENCE), lines, tiles,
        sections, answer,
    )  # fmt: skip


def _parts(prediction: PredictionResult) -> Content:
    """Draw one stacked bar per phase, with a table of the same times."""
    spans, labels = prediction.breakdown, part_labels(prediction.query.workload)
    phases = spans.phases
    stacked = {
        label: (_COLOURS[part], [phase.get(part, 0.0) / 1e6 for phase in phases.values()])
        for part, label in labels.items()
        if spans.total(part) > 0
    }
    rows = [
        [
            text(phase),
            text(labels[part]),
            number(time_ns, scale=1e6),
            number(time_ns / prediction.median_ns, 3, 0.01),
        ]
        for phase, parts in phases.items()
        for part, time_ns in parts.items()
    ]
    table = PageTable(["phase", "part", "ms", "% of the iteration"], rows)
    return Content(charts=[bars.stacked(list(phases), stacked, "ms")], tables=[table], folds_tables=True)


def _certainty(prediction: PredictionResult) -> Content:
    """Draw the interval of the time, and the share of each uncertain input."""
    chart = bars.intervals(["one iteration"], [prediction.interval_ms], "ms")
    sources = {
        name: math.sqrt(value) for name, value in prediction.variance_by_input.items() if value > _LEAST_VARIANCE
    }
    if not sources:
        return Content(charts=[chart])
    values = [100 * spread for spread in sources.values()]
    shares = bars.stacked(list(sources), {"spread": (palette.BLUE, values)}, "% of the time, one standard deviation")
    return Content(charts=[chart, shares])


def _inputs(prediction: PredictionResult) -> PageTable:
    rows = [
        [text(name), number(value.value), number(value.spread, 3, 0.01), text(value.origin), text(value.source)]
        for name, value in inputs(prediction).items()
    ]
    return PageTable(["figure", "value", "spread %", "origin", "source"], rows)
