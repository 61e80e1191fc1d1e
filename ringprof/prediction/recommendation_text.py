"""A recommendation as text, and as a page with plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringprof.common.formatting import percent, rounded_percent, significant
from ringprof.prediction.advise import HIDDEN, Advice, compared, crossings
from ringprof.prediction.predict import PredictionResult
from ringprof.prediction.text import cluster_text, described, remarks
from ringprof.report.page import bars
from ringprof.report.page.document import Content, Document, PageSection, PageTable, number, text
from ringprof.report.page.html import drawing
from ringprof.report.palette import Interval
from ringprof.report.tables import Column, text_table
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, binary_size, clean, duration

MOST_SHOWN, MOST_REFUSED, MOST_UNDECIDED = 12, 3, 3
_COLUMNS = (
    Column("strategy"), Column("fastest\nin"), Column("ms"), Column("80 %\ninterval"), Column("TFLOP/s"),
    Column("exposed"), Column("launch-\nbound"), Column("memory\nper GPU"),
)  # fmt: skip


_FEW_RANKS = "~ far behind, so predicted from four ranks alone: up to 12 % more where ranks wait for each other"


def advice_text(advice: Advice, style: TextStyle) -> str:
    """Return the choices and what would change them, ending with a newline."""
    query, machine = advice.first.prediction.query, advice.first.prediction.machine
    head = [
        f"PREDICTED for {cluster_text(query.cluster, machine.device)}, machine {machine.name}",
        f"{described(query.workload)} · kernel {query.kernel}",
    ]
    # One more row takes no more space than the line that says there is one.
    shown_choices = advice.choices if len(advice.choices) == MOST_SHOWN + 1 else advice.choices[:MOST_SHOWN]
    hidden_choices = len(advice.choices) - len(shown_choices)
    tail = [
        *(
            [f"{hidden_choices} more choices are slower: --format json lists all {len(advice.choices)}"]
            if hidden_choices
            else []
        ),
        "* no choice is faster with as little memory (Pareto-optimal)",
        *([_FEW_RANKS] if any(choice.prediction.few_ranks for choice in shown_choices) else []),
        "",
        *_nothing_fits(advice),
        *sentences(advice),
    ]
    # Each strategy is named once.
    refused = [f"{label}: {why.partition(' cannot run this: ')[2] or why}" for label, why in advice.refused]
    more = [f"and {len(refused) - MOST_REFUSED} more"] if len(refused) > MOST_REFUSED else []
    if refused:
        tail.append(f"not predicted: {'; '.join([*map(clean, refused[:MOST_REFUSED]), *more])}")
    rows = []
    for choice in shown_choices:
        prediction = choice.prediction
        low, middle, high = (significant(time, 3) for time in prediction.interval_ms)
        gib = prediction.peak_bytes / 2**30
        middle = f"~{middle}" if prediction.few_ranks else middle
        rows.append([
            f"{'*' if choice.on_front else ' '} {clean(choice.label)}{'' if choice.fits else ', does not fit'}",
            percent(choice.best, 0), middle, f"{low} to {high}",
            significant(prediction.tflops(prediction.median_ns), 3),
            rounded_percent(prediction.exposed_share), percent(prediction.time.host_share, 0),
            f"{significant(gib, 3)} GiB" if gib >= 1 else f"{significant(1024 * gib, 3)} MiB",
        ])  # fmt: skip
    table = text_table(_COLUMNS, rows, style)
    return style.finish(style.fit("\n".join(head)) + "\n\n" + table + "\n" + style.fit("\n".join(tail)))


def answer(advice: Advice) -> str:
    """Return what to choose and its predicted time, or that nothing fits."""
    first = advice.first.prediction
    low, middle, high = (duration(1e6 * time_ms) for time_ms in first.interval_ms)
    undecided = advice.undecided()
    choose = (
        f"cannot tell {advice.first.label} from {undecided[0].label}" if undecided else f"choose {advice.first.label}"
    )
    choose = (
        f"{choose}: {middle} per iteration ({low} to {high} in four of five cases), "
        f"{first.tflops(first.median_ns):,.0f} TFLOP/s per GPU, {binary_size(first.peak_bytes)} per GPU; "
        f"the fastest in {percent(advice.first.best, 0)} of cases"
    )
    return clean((_nothing_fits(advice) or [choose])[0], LONGEST_SENTENCE)


def sentences(advice: Advice) -> list[str]:
    """Return what to know about the first choice: its rivals, what would change it, and what runs it."""
    return [
        *(f"cannot tell: {clean(line)}" for line in _undecided_lines(advice)),
        f"runner-up: {clean(advice.why_not_the_second(), LONGEST_SENTENCE)}",
        *_crossing_lines(advice),
        *(f"first: {line}" for line in remarks(advice.first.prediction) if line),
        f"to narrow the interval: {advice.what_to_measure()}",
        f"experiment: {clean(advice.experiment(), LONGEST_SENTENCE)}",
        *(f"to run it with {clean(program)}: {command}" for program, command in advice.commands().items()),
    ]


def _undecided_lines(advice: Advice) -> list[str]:
    """Return a line that names the choices which the first one does not beat in four of five cases."""
    labels = [choice.label for choice in advice.undecided()]
    if not labels:
        return []
    more = f" and {len(labels) - MOST_UNDECIDED} more" if len(labels) > MOST_UNDECIDED else ""
    return [
        f"{advice.first.label} beats these in less than four of five cases: {'; '.join(labels[:MOST_UNDECIDED])}{more}"
    ]


def _nothing_fits(advice: Advice) -> list[str]:
    """Return a line with the smallest memory requirement if no choice fits."""
    if advice.first.fits:
        return []
    smallest = min(advice.choices, key=lambda choice: choice.prediction.peak_bytes)
    required = binary_size(smallest.prediction.peak_bytes)
    return [
        f"nothing fits: the least that any needs is {required} per GPU, of {clean(smallest.label)}."
        " More GPUs need less each"
    ]


def _crossing_lines(advice: Advice) -> list[str]:
    tokens, gbit = advice.hidden_from("tokens"), advice.hidden_from("nic")
    hidden = f"transfers: hidden (under {percent(HIDDEN, 0)} of the time)"
    if tokens is not None:
        lines = [f"{hidden} from about {_two_digits(tokens)} tokens on"]
    else:
        lines = ["transfers: not hidden at any length up to four times this one"]
    if gbit is not None:
        lines.append(f"{hidden} from about {_two_digits(gbit)} Gbit/s per NIC on, {_two_digits(gbit / 8)} GB/s")
    elif advice.points["nic"]:
        lines.append("transfers: not hidden by NICs four times as fast, either")
    names = [clean(choice.label) for choice in compared(advice.choices)]
    for axis, what in (("tokens", "tokens"), ("hosts", "nodes"), ("nic", "Gbit/s")):
        lines += [
            f"crossover: at about {_two_digits(value)} {what} {names[index]} is as fast as {names[0]}"
            for value, index in crossings(advice.points[axis])
        ]
    return lines


def _two_digits(value: float) -> str:
    """Format a number with two significant digits: where lines of predictions meet is not known better."""
    return f"{float(f'{value:.2g}'):,.{1 if value < 9.95 else 0}f}"


def document(advice: Advice) -> Document:
    """Return the page: the recommendation, all choices, and speed over length, nodes and NICs."""

    def bands(name: str) -> Any:
        return drawing().bands(ACROSS[name], SPEED, speeds(advice, name), marks(advice, name))

    first = advice.first.prediction
    shown = advice.choices[:MOST_SHOWN]
    names = [choice.label for choice in shown]
    sections = [
        PageSection(
            "choices", "Predicted time of every choice",
            "The dot is the middle of the prediction; in four of five cases the time lies within the bar."
            + (" The slowest are in the table alone." if len(advice.choices) > MOST_SHOWN else ""),
            Content(
                tables=[_table(advice)],
                charts=[bars.intervals(names, [choice.prediction.interval_ms for choice in shown], "ms per iteration")],
            ),
        ),
        PageSection(
            "length", "Speed against length", "Predicted, with the interval that holds four of five cases.",
            Content(bands("tokens")),
        ),
    ]  # fmt: skip
    for name, title in (("hosts", "Speed against nodes"), ("nic", "Speed against the network")):
        if advice.points[name]:
            sections.append(PageSection(name, title, "Predicted, as above.", Content(bands(name))))
    tiles = [
        (duration(first.median_ns), "predicted, per iteration"),
        (f"{first.tflops(first.median_ns):,.0f}", "TFLOP/s per GPU"),
        (percent(advice.first.best, 0), "to be the fastest"),
    ]
    cluster, kernel = cluster_text(first.query.cluster, first.machine.device), first.query.kernel
    subtitle = f"{cluster} · {described(first.query.workload)} · kernel {kernel}"
    return Document(
        f"Predicted: {advice.first.label}", subtitle, sentences(advice), tiles, sections,
        answer(advice),
    )  # fmt: skip


SPEED = "TFLOP/s per GPU, predicted"
ACROSS = {"tokens": "tokens", "hosts": "nodes", "nic": "Gbit/s per NIC"}
"""Axis label of each sweep, by the name of its plot."""


def series(
    advice: Advice,
    name: str,
    interval: Callable[[PredictionResult], Interval] = lambda prediction: prediction.interval_ms,
) -> dict[str, list[tuple[float, Interval]]]:
    """Return ``interval``, by default of an iteration in ms, at each value of a sweep of `ACROSS`, per choice."""
    return {
        choice.label: [
            (value, interval(predictions[index]))
            for value, predictions in advice.points[name]
            if index < len(predictions)
        ]
        for index, choice in enumerate(compared(advice.choices))
    }


def speeds(advice: Advice, name: str) -> dict[str, list[tuple[float, Interval]]]:
    """Return the interval of TFLOP/s per GPU at each value of a sweep, per choice. Lines over length stay apart this
    way."""

    def interval(prediction: PredictionResult) -> Interval:
        low, middle, high = (prediction.tflops(1e6 * time) for time in reversed(prediction.interval_ms))
        return low, middle, high

    return series(advice, name, interval)


def marks(advice: Advice, name: str) -> list[tuple[float, str]]:
    """Return where another strategy becomes as fast as the first, or transfers become hidden."""
    names = [choice.prediction.query.strategy for choice in compared(advice.choices)]
    crossing_marks = [(value, f"{names[index]} as fast") for value, index in crossings(advice.points[name])]
    value = None if name == "hosts" else advice.hidden_from(name)
    return [*crossing_marks, (value, "transfers hidden")] if value is not None else crossing_marks


def _table(advice: Advice) -> PageTable:
    titles = [
        "strategy", "best %", "ms", "10 %", "90 %", "TFLOP/s", "exposed %", "launch-bound %", "MiB per GPU", "front",
    ]  # fmt: skip
    rows = []
    for choice in advice.choices:
        prediction = choice.prediction
        low, middle, high = prediction.interval_ms
        rows.append([
            text(choice.label), number(100 * choice.best, 3), number(middle), number(low), number(high),
            number(prediction.tflops(prediction.median_ns)), number(100 * prediction.exposed_share, 3),
            number(100 * prediction.time.host_share, 3),
            number(prediction.peak_bytes / 2**20), text("yes" if choice.on_front else ""),
        ])  # fmt: skip
    return PageTable(titles, rows, "Predicted, not measured.")
