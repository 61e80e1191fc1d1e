"""What the text around a kernel table says about its run: iterations, their time, and its author's own summary."""

from __future__ import annotations

import re
from decimal import Decimal

from ringprof.kernel_tables.rows import Claim, TableContext

_CLAIM = re.compile(r"\b(FlashAttention Kernel|RingComm) {0,4}: {0,4}(\d{1,12}(?:\.\d{1,9})?) {0,4}(%?)")
_SUBJECTS = {"FlashAttention Kernel": "flash", "RingComm": "send_recv"}
_ITERATION_TIME = re.compile(
    r"\bForward ?\+ ?Backward Time {0,4}: {0,4}(\d{1,12}(?:\.\d{1,9})?) {0,4}(us|ms|s)\b", re.IGNORECASE
)
_WORLD = re.compile(r"\bWorld Size {0,4}: {0,4}(\d{1,7})\b", re.IGNORECASE)
_ITERATIONS = re.compile(
    r"\b(?:profiled |active |num[ _])?(?:iterations|iters|steps) {0,4}[:=] {0,4}(\d{1,9})\b", re.IGNORECASE
)
_UNIT_NS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}

# The list that some scripts print beside a table: {'flash': [(milliseconds, fraction), ...], 'SendRecv': [...]}.
_LIST = re.compile(r"'(flash|SendRecv)': {0,4}\[([^\]]{0,100000})\]")
_PAIR = re.compile(r"\( {0,4}[-\d.e+]{1,40}, {0,4}(\d{1,12}\.?\d{0,12}) {0,4}\)")
_LISTED = {"flash": "flash", "SendRecv": "send_recv"}


def read_context(lines: list[str], start: int, end: int) -> TableContext:
    """What lines ``start`` to ``end`` say; the first word on each subject wins."""
    claims: list[Claim] = []
    parts: dict[str, tuple[float, ...]] = {}
    iteration: tuple[int, int] | None = None
    world = iterations = None
    for index in range(start, end):
        line = lines[index]
        if "'" in line:
            parts |= {_LISTED[m[1]]: _fractions(m[2]) for m in _LIST.finditer(line) if _LISTED[m[1]] not in parts}
        if ":" not in line and "=" not in line:
            continue
        if match := _CLAIM.search(line):
            claims.append(Claim(_SUBJECTS[match[1]], match[1], match[2], bool(match[3]), index + 1))
        elif iteration is None and (match := _ITERATION_TIME.search(line)):
            iteration = (int(Decimal(match[1]) * _UNIT_NS[match[2].lower()]), index + 1)
        elif world is None and (match := _WORLD.search(line)):
            world = int(match[1])
        elif iterations is None and "warm" not in line.lower() and (match := _ITERATIONS.search(line)):
            iterations = int(match[1])
    listed = [Claim(c.subject, c.label, c.printed, c.percent, c.line, parts.get(c.subject)) for c in claims]
    time_ns, time_line = iteration if iteration else (None, None)
    return TableContext(tuple(listed), time_ns, time_line, world, iterations or None)


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(float(match[1]) for match in _PAIR.finditer(text))
