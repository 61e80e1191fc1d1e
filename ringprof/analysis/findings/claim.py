"""Sentences of a report, with the figures that they state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import Formatter
from typing import Any

import msgspec

from ringprof.common.formatting import flops_in_words, milliseconds, percent, three_digits

_FORMS: dict[str, Callable[[float], str]] = {
    "%": percent,
    "0%": lambda share: percent(share, 0),
    "ms": milliseconds,
    "3": three_digits,
    "flops": lambda tera: flops_in_words(tera, "/s"),
}


class Figure(msgspec.Struct, frozen=True):
    """Figure that a sentence states."""

    name: str
    """Name of the metric; ``a/b`` is a share of b: ``time`` is the mean wall time, ``wall`` the slowest rank's."""
    value: float
    """Value without rounding: times in nanoseconds, shares as 0..1, rates in the unit that the sentence names."""


class Claim(str):
    """Sentence of a report, or a clause of one: text that knows its figures.

    ``Claim("{wire/time:%} of the time is wire{}", 0.12, clause)``: a field with a name is a figure, shown in a form of
    `_FORMS` or of `format`; a field without one is text, or another claim, whose figures become this one's as well.
    """

    words: str
    """Text with the name of each figure in braces in its place."""
    figures: tuple[Figure, ...]
    """Figures in the order of the text."""

    def __new__(cls, template: str, *values: Any) -> Claim:
        text, words, figures, rest = [], [], [], iter(values)
        for literal, name, form, _ in Formatter().parse(template):
            text.append(literal)
            words.append(literal)
            if name:
                value = next(rest)
                text.append(_FORMS[form](value) if form in _FORMS else format(value, form or ""))
                words.append(f"{{{name}}}")
                figures.append(Figure(name, value))
            elif name is not None:
                clause = next(rest)
                text.append(clause)
                words.append(getattr(clause, "words", clause))
                figures += getattr(clause, "figures", ())
        claim = super().__new__(cls, "".join(text))
        claim.words, claim.figures = "".join(words), tuple(figures)
        return claim

    def join(self, clauses: Iterable[str]) -> Claim:
        """Join clauses into one claim with this text between them."""
        values = [*clauses]
        return Claim(str(self).join(["{}"] * len(values)), *values)
