"""Settings that a benchmark log states in prose, lists or headings: heads, batch, GPUs, lengths, device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ringprof.benchmark_logs.rows import Settings

_GAP = r"[`* ]{0,4}[:=][`* ]{0,4}"
_NUMBERS = (
    ("heads", re.compile(rf"\b(?:num_attn_heads|num_attention_heads|num_heads|nheads|heads){_GAP}(\d{{1,6}})\b", re.I)),
    ("kv_heads", re.compile(rf"\b(?:num_kv_heads|num_key_value_heads|kv_heads){_GAP}(\d{{1,6}})\b", re.I)),
    ("head_dim", re.compile(rf"\b(?:head_dim|head_size|dim_per_head|head dimension){_GAP}(\d{{1,6}})\b", re.I)),
    ("batch", re.compile(rf"\b(?:batch[_ ]size|batch|bs){_GAP}(\d{{1,6}})\b", re.I)),
    ("hidden", re.compile(rf"\bhidden[_ ]size{_GAP}(\d{{1,7}})\b", re.I)),
    ("world_size", re.compile(rf"\bworld[_ ]size{_GAP}(\d{{1,7}})\b", re.I)),
)
_GPUS = re.compile(r"(?<![\w.])(\d{1,6}) ?(?:[x\u00d7*] ?)?GPUs?\b", re.IGNORECASE)
_DEVICE = (
    r"((?:RTX ?)?\b(?:A10|A40|A100|A800|A6000|B100|B200|GB200|H20|H100|H200|H800|L20|L40S?|V100"
    r"|3090|4090D?|MI\d{3}X?))\b"
)
_GPU_COUNT = re.compile(rf"(?<![\w.])(\d{{1,6}}) ?[x\u00d7*] ?(?:NVIDIA )?{_DEVICE}", re.IGNORECASE)
_DEVICE_ALONE = re.compile(_DEVICE)
_SEQS = re.compile(rf"\bseq(?:uence)?[_ ]?len(?:gths?)?s?{_GAP}(\d{{2,9}}(?: ?, ?\d{{2,9}}){{0,63}})", re.IGNORECASE)
_LOG_NAME = re.compile(r"[`'\"]((?:[\w.-]{1,80}/){0,8}[\w.-]{1,120}\.(?:log|txt|csv|jsonl?))[`'\"]")


def read_settings(settings: Settings, line: str, number: int) -> Settings:
    """``settings`` with what this line states; where it states nothing, the same object."""
    if not any(char.isdigit() for char in line):
        return settings
    found: dict[str, Any] = {}
    for name, pattern in _NUMBERS:
        if match := pattern.search(line):
            found[name] = int(match[1])
    if match := _GPU_COUNT.search(line):
        found["world_size"], found["device"] = int(match[1]), match[2]
    elif match := _GPUS.search(line):
        found.setdefault("world_size", int(match[1]))
    if "device" not in found and (match := _DEVICE_ALONE.search(line)):
        found["device"] = match[1]
    if match := _SEQS.search(line):
        seqs = tuple(int(part) for part in match[1].split(","))
        # One length is that of a run; a list is what the log says it measures.
        if len(seqs) > 1:
            found["seqs"] = seqs
    return _with(settings, {name: value for name, value in found.items() if value}, number)


def _with(settings: Settings, found: dict[str, Any], number: int) -> Settings:
    if not found:
        return settings
    heads, hidden = found.get("heads", settings.heads), found.get("hidden", settings.hidden)
    # A hidden size gives the head dimension once the heads are known, in whichever order they stand.
    if heads and hidden and "head_dim" not in found and settings.head_dim is None and hidden % heads == 0:
        found["head_dim"] = hidden // heads
    return replace(settings, **found, lines={**settings.lines, **dict.fromkeys(found, number)})


def log_names(line: str) -> list[str]:
    """Names of log files that a line quotes."""
    return _LOG_NAME.findall(line) if "." in line else []
