"""What the text around a kernel table says about its run: iterations, their time, shares that its author printed."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal

from ringprof.kernel_tables.cells import UNIT_NS
from ringprof.kernel_tables.rows import StatedShare, TableContext
from ringprof.log_lines import LogLines

_SHARE = re.compile(r"\b(FlashAttention Kernel|RingComm) {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}(%?)")
_SUBJECTS = {"FlashAttention Kernel": "flash", "RingComm": "send_recv"}
_ITERATION_TIME = re.compile(
    r"\bForward ?\+ ?Backward Time {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}(us|ms|s)\b", re.IGNORECASE
)
_WORLD = re.compile(r"\bWorld Size {0,4}: {0,4}([0-9]{1,7})\b", re.IGNORECASE)
_ITERATIONS = re.compile(
    r"\b(?:profiled |active |num[ _])?(?:iterations|iters|steps) {0,4}[:=] {0,4}([0-9]{1,9})\b", re.IGNORECASE
)

# The list that some scripts print beside a table: {'flash': [(milliseconds, fraction), ...], 'SendRecv': [...]}.
_LIST = re.compile(r"'(flash|SendRecv)': {0,4}\[([^\]]{0,100000})\]")
_PAIR = re.compile(r"\( {0,4}[-0-9.e+]{1,40}, {0,4}([0-9]{1,12}\.?[0-9]{0,12}) {0,4}\)")
_LISTED = {"flash": "flash", "SendRecv": "send_recv"}


def read_context(lines: LogLines, start: int, end: int) -> TableContext:
    """What lines ``start`` to ``end`` say; the first word on each subject wins."""
    shares: list[StatedShare] = []
    parts: dict[str, tuple[float, ...]] = {}
    iteration_ns = world = iterations = None
    for index in range(start, end):
        line = lines[index]
        if "'" in line:
            for listed in _LIST.finditer(line):
                parts.setdefault(_LISTED[listed[1]], tuple(float(pair[1]) for pair in _PAIR.finditer(listed[2])))
        if ":" not in line and "=" not in line:
            continue
        if match := _SHARE.search(line):
            shares.append(StatedShare(_SUBJECTS[match[1]], match[1], match[2], bool(match[3]), index + 1))
        elif iteration_ns is None and (match := _ITERATION_TIME.search(line)):
            iteration_ns = int(Decimal(match[1]) * UNIT_NS[match[2].lower()])
        elif world is None and (match := _WORLD.search(line)):
            world = int(match[1])
        elif iterations is None and "warm" not in line.lower() and (match := _ITERATIONS.search(line)):
            iterations = int(match[1])
    completed = tuple(replace(share, parts=parts.get(share.subject)) for share in shares)
    return TableContext(completed, iteration_ns, world, iterations or None)
