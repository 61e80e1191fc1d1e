"""Reader of results that are printed line by line below a heading, as flash-attention's benchmarks print them.

    ### causal=True, headdim=128, batch_size=4, seqlen=4096 ###
    Flash2 fwd: 150.25 TFLOPs/s, bwd: 170.50 TFLOPs/s, fwd + bwd: 164.25 TFLOPs/s
    Fav3 fwd: 0.545ms, 126.2 TFLOPS

A heading states settings of one GPU; each line has one method's figures of one pass or of several.
"""

from __future__ import annotations

import re

from ringprof.printed.benchmarks.pipes import parse_bool, parse_integer, parse_number
from ringprof.printed.benchmarks.rows import Fields

_HEADING = re.compile(r"#{2,4} (?=[^#]{0,400}seqlen)([^#]{1,400}) #{2,4}\s*")
_SETTING = re.compile(r"(\w{1,40}) ?= ?([\w.]{1,20})")
_NAMES = {
    "causal": "causal", "headdim": "head_dim", "hdim": "head_dim", "batch_size": "batch", "batch": "batch",
    "seqlen": "seq", "seqlen_k": "seq", "nheads": "heads", "nheads_q": "heads", "nheads_k": "kv_heads",
}  # fmt: skip
_PASS = re.compile(r"(fwd \+ bwd|fwd|bwd)\b(?! \+)[^:,]{0,40}:")
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?) ?(ms|us|s)\b")
_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?) ?TFLOP", re.IGNORECASE)
_TIMES = {"fwd": "forward_ms", "fwd + bwd": "forward_backward_ms"}
_RATES = {"fwd": "tflops_forward", "bwd": "tflops_backward", "fwd + bwd": "tflops"}
_SCALES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_LONGEST_LINE = 400


def read_heading(line: str) -> Fields | None:
    """Return the settings of a heading that states a sequence length; None for any other line."""
    match = _HEADING.fullmatch(line.strip()) if "###" in line else None
    if match is None:
        return None
    settings = {name.lower(): text for name, text in _SETTING.findall(match[1])}
    fields: Fields = {"world_size": 1}
    for title, name in _NAMES.items():
        if title in settings:
            fields.setdefault(name, (parse_bool if name == "causal" else parse_integer)(settings[title]))
    return fields if fields.get("seq") else None


def read_figures(line: str) -> tuple[str, Fields] | None:
    """Return the method and the figures of a result line; None for any other line."""
    passes = list(_PASS.finditer(line, 0, _LONGEST_LINE))
    fields: Fields = {}
    steps: dict[str, float] = {}
    for match, following in zip(passes, [*passes[1:], None], strict=True):
        text = line[match.end() : following.start() if following else _LONGEST_LINE]
        for pattern, names in ((_TIME, _TIMES), (_RATE, _RATES)):
            if match[1] in names and (figure := pattern.search(text)) and (number := parse_number(figure[1])):
                scale = _SCALES[figure[2]] if pattern is _TIME else 1.0
                fields[names[match[1]]], steps[names[match[1]]] = (round(value * scale, 12) for value in number)
    return (line[: passes[0].start()].strip(), fields | {"steps": steps}) if fields else None
