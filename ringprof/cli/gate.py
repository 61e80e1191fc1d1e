"""``--fail-if``: conditions that set the exit code, and the messages about them."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from ringprof.analysis.findings.comparison import Difference, recordings_to_decide
from ringprof.analysis.findings.conditions import Condition, parse_condition, shares_among
from ringprof.analysis.findings.metric import Measurement
from ringprof.analysis.findings.uncertainty import own_interval
from ringprof.cli.options import Advanced, Decorator, OneOf, all_of
from ringprof.cli.write import say
from ringprof.errors import UsageError
from ringprof.report.comparison import needed_recordings


class Gate(msgspec.Struct, frozen=True):
    """Conditions of a command, and whether an undecided condition fails."""

    conditions: tuple[Condition, ...]
    undecided_fails: bool

    def fails(self, entry: Measurement, base: Measurement | None = None, against: Sequence[Difference] = ()) -> bool:
        """Return whether a condition fails for the entry, and print failed and undecided conditions.

        ``against`` are the differences between the entry and the base.
        """
        answers = [self._answer(condition, entry, base, against) for condition in self.conditions]
        return any(answer or (answer is None and self.undecided_fails) for answer in answers)

    def _answer(
        self, condition: Condition, entry: Measurement, base: Measurement | None, against: Sequence[Difference]
    ) -> bool | None:
        """Evaluate one condition, and print it unless it does not hold; None if the measurements do not decide it."""
        name, values = condition.figure, entry.values()
        difference = next((item for item in against if item.figure == name), None)
        if condition.of_base and difference is not None and difference.verdict == "not comparable":
            raise UsageError(
                f"--fail-if {condition.text!r}: {entry.label}: not known to do the same work as the base"
                " (if it does: --same-work)"
            )
        interval = _interval(condition, entry, difference)
        answer = condition.holds(values, base.values() if base else {}, shares_among(values), interval)
        if answer is not False:
            # In the unit of the condition.
            unit, sign = (100, "%") if condition.percent else (1, "")
            shown = f"{name} is {unit * values[name]:.6g}{sign}"
            if base is not None and name in base.values():
                shown += f" (base {unit * base.values()[name]:.6g}{sign})"
            if interval is not None and condition.of_base:
                shown += f", {interval[0]:.4g} to {interval[1]:.4g} times the base"
            elif interval is not None:
                shown += f", {unit * interval[0]:.4g}{sign} to {unit * interval[1]:.4g}{sign}"
            label = f"{entry.label}: " if base is not None else ""
            verdict = "undecided: " if answer is None else ""
            advice = _advice(condition, entry, base, difference) if answer is None else ""
            say(f"ringprof: {label}{shown}: {verdict}{condition.text}{advice}")
        return answer


def _advice(condition: Condition, entry: Measurement, base: Measurement | None, difference: Difference | None) -> str:
    """Say how many recordings per side would decide a condition on the base, where each side is a single recording."""
    if not condition.of_base or base is None or difference is None or difference.assumed_spread is None:
        return ""
    count = recordings_to_decide(base, entry, condition.figure, condition.number)
    return f" (deciding takes {needed_recordings(count)})"


def _interval(condition: Condition, entry: Measurement, difference: Difference | None) -> tuple[float, float] | None:
    """Return the interval of the condition's figure, over the base's figure where the condition is on the base."""
    if not condition.of_base:
        figure = entry.figures.get(condition.figure)
        return own_interval(figure.recordings) if figure is not None else None
    if difference is None or difference.low is None or difference.high is None:
        return None
    return difference.low, difference.high


def gated(example: str) -> Decorator:
    """Add the options ``conditions`` and ``undecided``, the arguments of `gate`, to a command."""
    return all_of(
        click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
                     help=f"Exit with code 1 if the condition holds: {example}; repeatable."),
        click.option("--undecided", cls=Advanced, type=OneOf(["pass", "fail"]), default="pass", show_default=True,
                     help="Treat a condition that the measurements do not decide as passed or failed."),
    )  # fmt: skip


def gate(conditions: Sequence[str], undecided: str) -> Gate:
    """Parse the conditions of a command. Raises `UsageError` for text that is not a condition."""
    return Gate(tuple(map(parse_condition, conditions)), undecided == "fail")
