"""Conditions on figures, for use in CI: ``exposed_comm_share > 5%``, ``tflops < 0.95 * base``.

Grammar: FIGURE OP NUMBER[%] [* base], with OP one of < <= > >= == !=. Parsed, never evaluated as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    r"\s*([a-z_][a-z0-9_.]*)\s*(<=|>=|==|!=|<|>)\s*([+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(%?)\s*(\*\s*base)?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Condition:
    """One parsed condition."""

    text: str
    figure: str
    sign: str
    number: float
    """As a share where the text said percent."""
    of_base: bool

    def holds(self, figures: Mapping[str, float], base: Mapping[str, float]) -> bool:
        """Whether the condition holds for these figures. Raises `UsageError` for a figure that is not there."""
        value = self._figure(figures)
        limit = self.number * (self._figure(base) if self.of_base else 1.0)
        return _OPERATORS[self.sign](value, limit)

    def _figure(self, figures: Mapping[str, float]) -> float:
        if self.figure not in figures:
            known = ", ".join(sorted(figures)) or "none"
            raise UsageError(f"--fail-if {self.text!r}: no figure {self.figure!r} here; there are: {known}")
        return figures[self.figure]


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises `UsageError` with the grammar where it is none."""
    match = _SHAPE.fullmatch(text)
    number = float(match[3]) if match else math.nan
    if match is None or not math.isfinite(number):
        raise UsageError(f"--fail-if {text!r}: write FIGURE OP NUMBER[%] [* base], such as 'tflops < 0.95 * base'")
    scaled = number / 100 if match[4] else number
    return Condition(text.strip(), match[1], match[2], scaled, bool(match[5]))
