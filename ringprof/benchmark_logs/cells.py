"""Cells and names of benchmark logs: numbers with the worth of their last digit, systems, headings."""

from __future__ import annotations

import re
from functools import lru_cache

_NUMBER = re.compile(r"[0-9]{1,15}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,12})?")
_SEQUENCE = re.compile(r"([0-9]{1,12}(?:,[0-9]{3}){0,3})\s?([kKM]?)")
_SCALE = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20}
NO_NUMBER = frozenset({"x", "X", "\u00d7", "-", "--", "—", "n/a", "N/A", "NA", "nan", "NaN", ""})
"""What says that there is no value."""

# The first that a heading contains names the system. Burst's own tables name its rivals only in other headings.
_SYSTEMS = (
    ("burst", re.compile(r"burst", re.IGNORECASE)),
    ("double_ring", re.compile(r"double[ _-]?ring|loong", re.IGNORECASE)),
    ("usp", re.compile(r"\busp\b|unified sequence|yunchang", re.IGNORECASE)),
    ("megatron_cp", re.compile(r"(?i:megatron|transformer ?engine|DotProductAttention)|\bTE\b")),
    ("ulysses", re.compile(r"ulysses", re.IGNORECASE)),
    ("zigzag", re.compile(r"zig-?zag", re.IGNORECASE)),
    ("stripe", re.compile(r"strip", re.IGNORECASE)),
    ("ring", re.compile(r"\bring\b|ring ?att", re.IGNORECASE)),
)
LAYOUT_NAMES = {"basic": "contiguous", "ring": "contiguous", "zigzag": "zigzag", "stripe": "stripe", "strip": "stripe"}


def parse_number(cell: str) -> tuple[float, float] | None:
    """(value, worth of the last printed digit) of a cell; None where it holds no number."""
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        return None
    plain = text.replace(",", "")
    return float(plain), 10.0 ** -len(plain.partition(".")[2])


def integer(cell: str) -> int | None:
    """A whole number, None for anything else."""
    found = parse_number(cell)
    return int(found[0]) if found is not None and "." not in cell else None


def sequence(cell: str) -> int | None:
    """A sequence length: ``131072``, ``131,072``, ``128k`` (of 1024) or ``1M``."""
    match = _SEQUENCE.fullmatch(cell.strip())
    return int(match[1].replace(",", "")) * _SCALE[match[2]] if match else None


def truth(cell: str) -> bool | None:
    """A printed boolean."""
    return {"true": True, "false": False, "yes": True, "no": False}.get(cell.strip().lower())


@lru_cache(maxsize=256)
def system_of(label: str) -> str:
    """The system that a heading names; ``unknown`` where none is known."""
    return next((system for system, pattern in _SYSTEMS if pattern.search(label)), "unknown")


def placement_of(label: str) -> str | None:
    """``head_first`` or ``ring_first`` where a heading says so."""
    plain = label.lower().replace("_", " ").replace("-", " ")
    if "ring first" in plain or "context first" in plain:
        return "ring_first"
    return "head_first" if "head first" in plain else None
