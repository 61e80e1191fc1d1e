"""Settings that a benchmark log states in prose, lists or headings: heads, batch, GPUs, lengths, device."""

from __future__ import annotations

import re
from dataclasses import replace

from ringprof.benchmark_logs.rows import Fields, LogSettings

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

# A line without any of these states nothing; to look for them is many times quicker than to match the patterns.
_NUMBER_WORDS = ("heads", "head_", "head d", "dim_per", "batch", "bs", "hidden", "world")
_DEVICE_WORDS = ("gpu", "00", "a10", "a40", "h20", "l20", "l40", "090", "mi")

_LOG_NAME = re.compile(r"[`'\"]((?:[\w.-]{1,80}/){0,8}[\w.-]{1,120}\.(?:log|txt|csv|jsonl?))[`'\"]")
_LOG_SUFFIXES = (".log", ".txt", ".csv", ".json")


def read_settings(settings: LogSettings, line: str, number: int) -> LogSettings:
    """``settings`` with what this line states; where it states nothing, the same object."""
    lower, found = line.lower(), Fields()
    assigns = ":" in line or "=" in line
    if assigns and any(word in lower for word in _NUMBER_WORDS):
        for match in _NUMBER.finditer(line):
            found.setdefault(next(name for name, text in match.groupdict().items() if text), int(match[7]))
    if any(word in lower for word in _DEVICE_WORDS):
        found = _read_devices(line, found)
    if assigns and "len" in lower and (listed := _SEQS.search(line)):
        seqs = tuple(int(part) for part in listed[1].split(","))
        # One length is that of a run; a list is what the log says it measures.
        if len(seqs) > 1:
            found["seqs"] = seqs
    found = {name: value for name, value in found.items() if value}
    return _with(settings, found, number) if found else settings


def _read_devices(line: str, found: Fields) -> Fields:
    if match := _GPU_COUNT.search(line):
        return found | {"world_size": int(match[1]), "device": match[2]}
    if match := _GPUS.search(line):
        found.setdefault("world_size", int(match[1]))
    if match := _DEVICE_ALONE.search(line):
        found["device"] = match[1]
    return found


def _with(settings: LogSettings, found: Fields, number: int) -> LogSettings:
    heads, hidden = found.get("heads", settings.heads), found.get("hidden", settings.hidden)
    # A hidden size gives the head dimension once the heads are known, in whichever order they stand.
    if heads and hidden and "head_dim" not in found and settings.head_dim is None and hidden % heads == 0:
        found["head_dim"] = hidden // heads
    return replace(settings, **found, lines={**settings.lines, **dict.fromkeys(found, number)})


def log_names(line: str) -> list[str]:
    """Names of log files that a line quotes."""
    return _LOG_NAME.findall(line) if any(suffix in line for suffix in _LOG_SUFFIXES) else []
