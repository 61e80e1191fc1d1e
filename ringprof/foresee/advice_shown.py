"""Advice as text, and as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.foresee.advise import HIDDEN, Advice, Choice, Point
from ringprof.foresee.predict import Prediction
from ringprof.foresee.show import cluster_text, described, remarks
from ringprof.report.page.document import Content, Document, PageSection, PageTable, number, text
from ringprof.report.page.html import drawing
from ringprof.report.text import binary_size, clean, duration, percent

MOST_SHOWN = 12


def render(advice: Advice) -> str:
    """The choices and what would change them, ending with a newline."""
    question, machine = advice.first.prediction.question, advice.first.prediction.machine
    lines = [
        f"PREDICTED for {cluster_text(question.cluster, machine.device)}, machine {machine.name}",
        described(question.workload),
        "",
        f"{'':3}{'best':>6}  {'ms':>12}  {'80 % within':>25}  {'TFLOP/s':>8}  {'exposed':>8}  {'memory':>10}  strategy",
        *(_line(choice) for choice in advice.choices[:MOST_SHOWN]),
        "  * nothing is faster with as little memory",
        "",
        f"why not the second: {clean(advice.why_not_the_second())}",
        *_crossings(advice),
        *(f"first: {line}" for line in remarks(advice.first.prediction) if line),
        f"to be surer: {advice.what_to_measure()}",
    ]
    if advice.refused:
        lines.append(f"not foreseen: {'; '.join(clean(f'{label}: {why}') for label, why in advice.refused[:3])}")
    return "\n".join(lines) + "\n"


def _line(choice: Choice) -> str:
    one = choice.prediction
    low, middle, high = (one.quantile_ns(share) / 1e6 for share in (0.1, 0.5, 0.9))
    mark = "*" if choice.on_front else " "
    fits = "" if choice.fits else "  does not fit"
    speed = one.tflops(one.median_ns)
    return (
        f"  {mark}{percent(choice.best, 0):>6}  {middle:12,.3f}  {low:12,.3f} {high:12,.3f}  {speed:8.1f}"
        f"  {percent(one.exposed_share):>8}  {binary_size(one.peak_bytes):>10}  {clean(choice.label)}{fits}"
    )


def _crossings(advice: Advice) -> list[str]:
    lines = []
    tokens, gbit = advice.hidden_from_tokens(), advice.hidden_from_gbit()
    if tokens is not None:
        lines.append(
            f"crossing: transfers are hidden (under {percent(HIDDEN, 0)} of the time) from {tokens:.0f} tokens on"
        )
    else:
        lines.append("crossing: transfers are not hidden at any length up to four times this one")
    if gbit is not None:
        lines.append(f"crossing: they are hidden from {gbit:g} Gbit/s a NIC on, {gbit / 8:g} GB/s")
    elif advice.nics:
        lines.append("crossing: they would not be hidden by NICs four times as fast")
    change = _changes(advice.lengths)
    if change is not None:
        lines.append(f"crossing: at {change:g} tokens the second is the faster")
    return lines


def _changes(points: Sequence[Point]) -> float | None:
    for point in points:
        if len(point.predictions) > 1 and point.predictions[1].median_ns < point.predictions[0].median_ns:
            return point.at
    return None


def document(advice: Advice) -> Document:
    """The page: the choices, time against memory, against length, and against the NIC. Raises `MissingExtraError`."""
    figures = drawing()
    first = advice.first.prediction
    shown = advice.choices[:MOST_SHOWN]
    names = [choice.label for choice in shown]
    sections = [
        PageSection(
            "choices", "Predicted time of every choice",
            "The bar is the middle of the prediction; in four of five cases the time lies between the marks.",
            Content(
                figures.intervals(names, [_milliseconds(choice.prediction) for choice in shown], "ms an iteration"),
                [_table(advice)],
            ),
        ),
        PageSection(
            "length", "Time against length", "Predicted, with the interval that holds four of five cases.",
            Content(figures.bands("tokens", "ms an iteration", _series(advice, advice.lengths))),
        ),
    ]  # fmt: skip
    if advice.nics:
        band = figures.bands("Gbit/s of a NIC", "ms an iteration", _series(advice, advice.nics))
        sections.append(PageSection("nic", "Time against the network", "Predicted, as above.", Content(band)))
    lines = [advice.why_not_the_second(), *_crossings(advice), f"to be surer: {advice.what_to_measure()}"]
    tiles = [
        (duration(first.median_ns), "predicted, an iteration"),
        (f"{first.tflops(first.median_ns):,.0f}", "TFLOP/s per GPU"),
        (percent(advice.first.best, 0), "to be the fastest"),
    ]
    subtitle = f"{cluster_text(first.question.cluster, first.machine.device)} · {described(first.question.workload)}"
    return Document(f"Predicted: {advice.first.label}", subtitle, [clean(line) for line in lines], tiles, sections)


def _milliseconds(one: Prediction) -> tuple[float, float, float]:
    low, middle, high = (one.quantile_ns(share) / 1e6 for share in (0.1, 0.5, 0.9))
    return low, middle, high


def _series(advice: Advice, points: Sequence[Point]) -> dict[str, list[tuple[float, tuple[float, float, float]]]]:
    """By choice, the interval at each place."""
    return {
        choice.label: [
            (point.at, _milliseconds(point.predictions[which])) for point in points if which < len(point.predictions)
        ]
        for which, choice in enumerate(advice.choices[:2])
    }


def _table(advice: Advice) -> PageTable:
    titles = ["strategy", "best", "ms", "10 %", "90 %", "TFLOP/s", "exposed %", "MiB a GPU", "front"]
    rows = []
    for choice in advice.choices:
        one = choice.prediction
        low, middle, high = _milliseconds(one)
        rows.append([
            text(choice.label), number(choice.best, 2), number(middle), number(low), number(high),
            number(one.tflops(one.median_ns), 1), number(100 * one.exposed_share, 1),
            number(one.peak_bytes / 2**20, 0), text("yes" if choice.on_front else ""),
        ])  # fmt: skip
    return PageTable(titles, rows, "Predicted, not measured.")
