"""Reads results that are printed line by line: Burst's blocks, and ``Benchmark Results for`` blocks."""

from __future__ import annotations

import re

from ringprof.benchmark_logs.cells import integer, parse_number
from ringprof.benchmark_logs.rows import Fields
from ringprof.log_lines import LogLines

_LONGEST_BLOCK = 60
"""Lines."""

_PASS = r"(forward_backward|forward|backward) {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}"
_TIME = re.compile(_PASS + r"(ms|us|s)\b")
_RATE = re.compile(_PASS + r"TFLOPS", re.IGNORECASE)
_TIMES = {"forward": "forward_ms", "forward_backward": "forward_backward_ms"}
_RATES = {"forward": "tflops_forward", "forward_backward": "tflops", "backward": "tflops_backward"}

_RESULTS = re.compile(r"\bBenchmark Results for {1,4}([\w./:-]{1,120})")
_ITEM = re.compile(r"- ([A-Z][\w+ /]{0,40}?) {0,4}: {0,4}(\S[^\r\n]{0,120})")
_FIGURE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(ms|us|s|MB|GB|TFLOPs?/s|TFLOPS)?")
_SCALES = {"us": 1e-3, "ms": 1.0, "s": 1e3, "MB": 1.0, "GB": 1024.0}
_INTEGERS = {
    "batch size": "batch",
    "sequence length": "seq",
    "num heads": "heads",
    "head dimension": "head_dim",
    "gqa groups": "kv_heads",
    "world size": "world_size",
}
_FIGURES = {
    "forward time": "forward_ms",
    "forward+backward time": "forward_backward_ms",
    "memory usage": "memory_mb",
    "performance": "tflops",
}


def read_burst_figures(lines: LogLines, index: int) -> tuple[Fields, int] | None:
    """(times in ms and TFLOP/s of the lines from ``index`` on, lines used); None where none follow."""
    fields: Fields = {}
    steps: dict[str, float] = {}
    used = 0
    for line in lines.between(index, index + _LONGEST_BLOCK):
        times, rates = list(_TIME.finditer(line)), list(_RATE.finditer(line))
        if (not times and not rates and line.strip() and used >= 2) or "seqlen" in line:
            break
        for match in times:
            if name := _TIMES.get(match[1]):
                fields[name], steps[name] = _scaled(match[2], match[3])
        for match in rates:
            name = _RATES[match[1].lower()]
            fields[name], steps[name] = _scaled(match[2])
        used += 1
        if rates:
            break
    return (fields | {"steps": steps}, used) if fields else None


def _scaled(text: str, unit: str = "") -> tuple[float, float]:
    """A figure and the worth of its last digit, in the unit of its column."""
    value, step = parse_number(text) or (0.0, 0.0)
    scale = _SCALES.get(unit, 1.0)
    # The unit's worth is put on the exact decimal figure, so that 0.06 s is 60 ms and not a hair more.
    return round(value * scale, 9), round(step * scale, 9)


def read_results(lines: LogLines, index: int) -> tuple[Fields, int] | None:
    """(fields of the results block headed at line ``index``, lines used); None where none begins there."""
    head = _RESULTS.search(lines[index]) if "Benchmark Results for" in lines[index] else None
    if head is None:
        return None
    items: dict[str, str] = {}
    used = 1
    for line in lines.between(index + 1, index + _LONGEST_BLOCK):
        if "Benchmark Summary" in line or "Benchmark Results for" in line or "|" in line:
            break
        # Where the log ends inside a line only a unit proves that the figure before it is whole.
        if (match := _ITEM.search(line)) and not (lines.is_open(index + used) and not _has_unit(match[2])):
            items[match[1].strip().lower()] = match[2].strip()
        used += 1
    return (_from_items(items) | {"label": head[1]}, used) if "sequence length" in items else None


def _has_unit(text: str) -> bool:
    figure = _FIGURE.match(text)
    return figure is not None and figure[2] is not None


def _from_items(items: dict[str, str]) -> Fields:
    fields: Fields = {name: integer(items.get(key, "")) for key, name in _INTEGERS.items()}
    fields["dtype"] = items.get("dtype")
    steps: dict[str, float] = {}
    for key, name in _FIGURES.items():
        text = items.get(key, "")
        if match := _FIGURE.match(text):
            fields[name], steps[name] = _scaled(match[1], match[2] or "")
        elif text.upper().startswith("OOM"):
            fields["oom"] = True
    mask = items.get("attention mask")
    if mask is not None:
        fields["causal"] = "causal" in mask and "no" not in mask.split("causal")[0]
    return fields | {"steps": steps}
