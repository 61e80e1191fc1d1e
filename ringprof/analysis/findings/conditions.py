"""Conditions on figures, for use in CI: ``exposed_comm > 5%``, ``max(idle) > 1%``, ``tflops < 0.95 * base``.

Of a figure that was repeated a condition holds, or does not, where it does so over the figure's whole interval; else it
is undecided. A figure that was measured once is taken as it is.

Grammar: FIGURE OP NUMBER[%] [* base], with OP one of < <= > >= == !=, and FIGURE a name, or ``max(name)`` or
``min(name)`` over ranks. Parsed, never evaluated as code.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping

import msgspec

from ringprof.errors import UsageError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_SHAPE = re.compile(
    r"\s*(?:(?P<over>max|min)\s*\(\s*(?P<inner>[a-z_][a-z0-9_.]*)\s*\)|(?P<plain>[a-z_][a-z0-9_.]*))"
    r"\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<number>[+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?P<percent>%?)"
    r"\s*(?P<base>\*\s*base)?\s*",
    re.IGNORECASE,
)


class Condition(msgspec.Struct, frozen=True):
    """One parsed condition."""

    text: str
    figure: str
    """A name, or ``max(name)`` or ``min(name)``."""
    sign: str
    number: float
    """As a share where the text said percent."""
    percent: bool
    of_base: bool

    def holds(
        self,
        figures: Mapping[str, float],
        base: Mapping[str, float],
        shares: Collection[str] | None = None,
        interval: tuple[float, float] | None = None,
    ) -> bool | None:
        """Whether the condition holds for these figures, of which ``shares`` are 0..1 where that is known.

        ``interval`` is the figure's, or its ratio's to the base's, where it was repeated: None, for undecided, where
        that lies on both sides of the limit. Raises `UsageError` for a figure that is not there, and for a number of
        another unit: what never holds, or always, is no gate.
        """
        value = self._figure(figures)
        if shares is not None and not self.of_base:
            self._refuse_other_unit(is_share=self.figure in shares)
        test = _OPERATORS[self.sign]
        if interval is not None and self.sign not in ("==", "!="):
            low, high = (test(end, self.number) for end in interval)
            return low if low == high else None
        return test(value, self.number * (self._figure(base) if self.of_base else 1.0))

    def _figure(self, figures: Mapping[str, float]) -> float:
        if self.figure not in figures:
            near = ", ".join(difflib.get_close_matches(self.figure, figures, n=3, cutoff=0.4))
            hint = f" (nearest: {near})" if near else ""
            raise UsageError(
                f"--fail-if {self.text!r}: no figure {self.figure!r} here{hint}; there are: {_all(figures)}"
            )
        return figures[self.figure]

    def _refuse_other_unit(self, *, is_share: bool) -> None:
        if is_share and not self.percent and abs(self.number) > 1:
            meant = f"{self.figure} {self.sign} {self.number:g}%"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is a share: did you mean {meant!r}?")
        if self.percent and not is_share:
            meant = f"{self.figure} {self.sign} {self.number:g} * base"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is no share: did you mean {meant!r}?")


def _all(figures: Mapping[str, float]) -> str:
    """The names of all figures, each in one of its forms."""
    names = [name for name in figures if "(" not in name and not name.startswith("waterfall.")]
    shown = ", ".join(sorted(name for name in names if not name.endswith("_ns") or f"{name[:-3]}_ms" not in names))
    forms = {"(": "max(...) and min(...)", "_ns": "with _ns", "waterfall.": "waterfall.PART"}
    more = [form for mark, form in forms.items() if any(mark in name for name in figures)]
    return f"{shown or 'none'}" + (f"; also {', '.join(more)}" if more else "")


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises `UsageError` with the grammar where it is none."""
    match = _SHAPE.fullmatch(text)
    number = float(match["number"]) if match else math.nan
    if match is None or not math.isfinite(number):
        raise UsageError(f"--fail-if {text!r}: write FIGURE OP NUMBER[%] [* base], such as 'tflops < 0.95 * base'")
    scaled = number / 100 if match["percent"] else number
    figure = f"{match['over'].lower()}({match['inner']})" if match["over"] else match["plain"]
    return Condition(text.strip(), figure, match["sign"], scaled, bool(match["percent"]), bool(match["base"]))
