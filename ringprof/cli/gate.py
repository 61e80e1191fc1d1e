"""``--fail-if``: conditions that set the exit code, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from ringprof.analysis.findings.comparison import Difference, recordings_to_decide
from ringprof.analysis.findings.conditions import Condition, parse_condition, shares_among
from ringprof.analysis.findings.metric import Measurement
from ringprof.analysis.findings.uncertainty import own_interval
from ringprof.cli.values import Decorator, all_of
from ringprof.cli.write import say
from ringprof.errors import UsageError
from ringprof.report.comparison import needed_recordings


class Gate(msgspec.Struct, frozen=True):
    """The conditions of a command, and what an undecided one counts as."""

    conditions: tuple[Condition, ...]
    undecided_fails: bool

    def fails(self, entry: Measurement, base: Measurement | None = None, against: Sequence[Difference] = ()) -> bool:
        """Whether a condition fails the entry; says so, and which are undecided. ``against``: it beside the base."""
        answers = [self._answer(condition, entry, base, against) for condition in self.conditions]
        return any(answer or (answer is None and self.undecided_fails) for answer in answers)

    def _answer(
        self, condition: Condition, entry: Measurement, base: Measurement | None, against: Sequence[Difference]
    ) -> bool | None:
        name, values = condition.figure, entry.values()
        beside = next((one for one in against if one.figure == name), None)
        if condition.of_base and beside is not None and beside.verdict == "not comparable":
            raise UsageError(
                f"--fail-if {condition.text!r}: {entry.label}: not known to be the base's work (--same-work: it is)"
            )
        interval = _interval(condition, entry, beside)
        answer = condition.holds(values, base.values() if base else {}, shares_among(values), interval)
        if answer is not False:
            shown = f"{name} is {values[name]:.6g}"
            if base is not None and name in base.values():
                shown += f" (base {base.values()[name]:.6g})"
            if interval is not None:
                of_base = " times the base" if condition.of_base else ""
                shown += f", {interval[0]:.4g} to {interval[1]:.4g}{of_base}"
            label = f"{entry.label}: " if base is not None else ""
            verdict = "undecided: " if answer is None else ""
            advice = _advice(condition, entry, base, beside) if answer is None else ""
            say(f"ringprof: {label}{shown}: {verdict}{condition.text}{advice}")
        return answer


def _advice(condition: Condition, entry: Measurement, base: Measurement | None, beside: Difference | None) -> str:
    """Say how many recordings per side would decide a condition on the base, where each side is a single recording."""
    if not condition.of_base or base is None or beside is None or beside.assumed_spread is None:
        return ""
    count = recordings_to_decide(base, entry, condition.figure, condition.number)
    return f" (deciding takes {needed_recordings(count)})"


def _interval(condition: Condition, entry: Measurement, beside: Difference | None) -> tuple[float, float] | None:
    if not condition.of_base:
        figure = entry.figures.get(condition.figure)
        return own_interval(figure.recordings) if figure is not None else None
    if beside is None or beside.low is None or beside.high is None:
        return None
    return beside.low, beside.high


def gated(example: str) -> Decorator:
    """Gives a command the options ``conditions`` and ``undecided``, to make a `gate` of."""
    return all_of(
        click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
                     help=f"Exit with 1 where it holds: {example}; repeatable."),
        click.option("--undecided", type=click.Choice(["pass", "fail"]), default="pass", show_default=True,
                     help="What a condition counts as that the measurements do not decide."),
    )  # fmt: skip


def gate(conditions: Sequence[str], undecided: str) -> Gate:
    """Raises `UsageError` for what is no condition."""
    return Gate(tuple(map(parse_condition, conditions)), undecided == "fail")
