"""Parser of the text outside the tables of a benchmark log: results printed line by line, and settings."""

from __future__ import annotations

import re
from dataclasses import replace

from ringprof.benchmark_logs.cells import parse_integer, parse_number
from ringprof.benchmark_logs.rows import Fields, LogSettings
from ringprof.common.log_lines import LogLines

_MAX_BLOCK_LINES = 60
"""Most lines of one block of results."""

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
    """Read the times in ms and the TFLOP/s in the lines from ``index`` on; return them and the number of lines read.

    None where no figures follow.
    """
    fields: Fields = {}
    steps: dict[str, float] = {}
    used = 0
    for line in lines.between(index, index + _MAX_BLOCK_LINES):
        times, rates = list(_TIME.finditer(line)), list(_RATE.finditer(line))
        if (not times and not rates and line.strip() and used >= 2) or "seqlen" in line:
            break
        for match in times:
            if name := _TIMES.get(match[1]):
                fields[name], steps[name] = _parse_figure(match[2], match[3])
        for match in rates:
            name = _RATES[match[1].lower()]
            fields[name], steps[name] = _parse_figure(match[2])
        used += 1
        if rates:
            break
    return (fields | {"steps": steps}, used) if fields else None


def _parse_figure(text: str, unit: str = "") -> tuple[float, float]:
    """Parse a figure; return it and the value of its last digit, both converted to ms or MB."""
    value, step = parse_number(text) or (0.0, 0.0)
    scale = _SCALES.get(unit, 1.0)
    # Rounded, so that 0.06 s is exactly 60 ms.
    return round(value * scale, 9), round(step * scale, 9)


def read_results(lines: LogLines, index: int) -> tuple[Fields, int] | None:
    """Read the block of results that begins at line ``index``; return its fields and the number of lines read.

    None where no block begins there.
    """
    head = _RESULTS.search(lines[index]) if "Benchmark Results for" in lines[index] else None
    if head is None:
        return None
    items: dict[str, str] = {}
    used = 1
    for line in lines.between(index + 1, index + _MAX_BLOCK_LINES):
        if "Benchmark Summary" in line or "Benchmark Results for" in line or "|" in line:
            break
        # Where the log ends inside a line, only a unit after a figure proves that the figure is complete.
        if (match := _ITEM.search(line)) and not (lines.is_open(index + used) and not _has_unit(match[2])):
            items[match[1].strip().lower()] = match[2].strip()
        used += 1
    return (_from_items(items) | {"label": head[1]}, used) if "sequence length" in items else None


def _has_unit(text: str) -> bool:
    figure = _FIGURE.match(text)
    return figure is not None and figure[2] is not None


def _from_items(items: dict[str, str]) -> Fields:
    """Convert the printed items of a results block to fields of a `LogRow`."""
    fields: Fields = {name: parse_integer(items.get(key, "")) for key, name in _INTEGERS.items()}
    fields["dtype"] = items.get("dtype")
    steps: dict[str, float] = {}
    for key, name in _FIGURES.items():
        text = items.get(key, "")
        if match := _FIGURE.match(text):
            fields[name], steps[name] = _parse_figure(match[1], match[2] or "")
        elif text.upper().startswith("OOM"):
            fields["oom"] = True
    mask = items.get("attention mask")
    if mask is not None:
        fields["causal"] = "causal" in mask and "no" not in mask.split("causal")[0]
    return fields | {"steps": steps}


_GAP = r"[`*\"' ]{0,4}[:=][`*\"' ]{0,4}"
_NUMBER = re.compile(
    r"\b(?:(?P<kv_heads>num_kv_heads|num_key_value_heads|kv_heads)"
    r"|(?P<heads>num_attn_heads|num_attention_heads|num_heads|nheads|heads)"
    r"|(?P<head_dim>head_dim|head_size|dim_per_head|head dimension)"
    r"|(?P<batch>batch[_ ]size|batch|bs)|(?P<hidden>hidden[_ ]size)|(?P<world_size>world[_ ]size))"
    rf"{_GAP}([0-9]{{1,7}})\b",
    re.IGNORECASE,
)
_GPUS = re.compile(r"(?<![\w.])([0-9]{1,6}) ?(?:[x\u00d7*] ?GPU\b|(?:[x\u00d7*] ?)?GPUs\b)", re.IGNORECASE)
_DEVICE = (
    r"((?:RTX ?)?\b(?:A10|A40|A100|A800|A6000|B100|B200|GB200|H20|H100|H200|H800|L20|L40S?|V100"
    r"|3090|4090D?|MI[0-9]{3}X?))\b"
)
_GPU_COUNT = re.compile(rf"(?<![\w.])([0-9]{{1,6}}) ?[x\u00d7*] ?(?:NVIDIA )?{_DEVICE}", re.IGNORECASE)
_DEVICE_ALONE = re.compile(_DEVICE)
_SEQS = re.compile(
    rf"\bseq(?:uence)?[_ ]?len(?:gths?)?s?{_GAP}([0-9]{{2,9}}(?: ?, ?[0-9]{{2,9}}){{0,63}})", re.IGNORECASE
)

# A line without any of these words states no settings. Searching for them is much faster than matching the patterns.
_NUMBER_WORDS = ("heads", "head_", "head d", "dim_per", "batch", "bs", "hidden", "world")
_DEVICE_WORDS = ("gpu", "00", "a10", "a40", "h20", "l20", "l40", "090", "mi")

_LOG_NAME = re.compile(r"[`'\"]((?:[\w.-]{1,80}/){0,8}[\w.-]{1,120}\.(?:log|txt|csv|jsonl?))[`'\"]")
_LOG_SUFFIXES = (".log", ".txt", ".csv", ".json")


def read_settings(settings: LogSettings, line: str, number: int) -> LogSettings:
    """Return ``settings`` updated with those that line ``number`` states; the same object where it states none."""
    lower, fields = line.lower(), Fields()
    assigns = ":" in line or "=" in line
    if assigns and any(word in lower for word in _NUMBER_WORDS):
        for match in _NUMBER.finditer(line):
            fields.setdefault(next(name for name, text in match.groupdict().items() if text), int(match[7]))
    if any(word in lower for word in _DEVICE_WORDS):
        fields = _read_devices(line, fields)
    if assigns and "len" in lower and (listed := _SEQS.search(line)):
        seqs = tuple(int(part) for part in listed[1].split(","))
        # A single length is that of one run; a list states the lengths that the log measures.
        if len(seqs) > 1:
            fields["seqs"] = seqs
    fields = {name: value for name, value in fields.items() if value}
    return _with_fields(settings, fields, number) if fields else settings


def _read_devices(line: str, fields: Fields) -> Fields:
    """Return ``fields`` with the GPU model and the number of GPUs that a line states."""
    if match := _GPU_COUNT.search(line):
        return fields | {"world_size": int(match[1]), "device": match[2]}
    if match := _GPUS.search(line):
        fields.setdefault("world_size", int(match[1]))
    if match := _DEVICE_ALONE.search(line):
        fields["device"] = match[1]
    return fields


def _with_fields(settings: LogSettings, fields: Fields, number: int) -> LogSettings:
    """Return settings updated with the fields read from line ``number``."""
    heads, hidden = fields.get("heads", settings.heads), fields.get("hidden", settings.hidden)
    # A hidden size gives the head dimension once the number of heads is known, in whichever order they are stated.
    if heads and hidden and "head_dim" not in fields and settings.head_dim is None and hidden % heads == 0:
        fields["head_dim"] = hidden // heads
    return replace(settings, **fields, lines={**settings.lines, **dict.fromkeys(fields, number)})


def log_names(line: str) -> list[str]:
    """Return the names of log files that a line quotes."""
    return _LOG_NAME.findall(line) if any(suffix in line for suffix in _LOG_SUFFIXES) else []
