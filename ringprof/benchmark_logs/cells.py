"""Parsers of the cells and headings of benchmark logs: numbers with the value of their last digit, and systems."""

from __future__ import annotations

import re
from functools import lru_cache

_NUMBER = re.compile(r"[0-9]{1,15}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,12})?")
_SEQUENCE = re.compile(r"([0-9]{1,12}(?:,[0-9]{3}){0,3})\s?([kKM]?)")
_SCALE = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20}
NO_NUMBER = frozenset({"x", "X", "\u00d7", "-", "--", "—", "n/a", "N/A", "NA", "nan", "NaN", ""})
"""Texts of cells that hold no value."""

# The first pattern that a heading matches names the system. Burst's logs name other systems only in other headings.
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
    """Parse a cell as (value, value of one unit in the last printed digit); None where it holds no number."""
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        return None
    plain = text.replace(",", "")
    return float(plain), 10.0 ** -len(plain.partition(".")[2])


def parse_integer(cell: str) -> int | None:
    """Parse a whole number; None for every other cell."""
    number = parse_number(cell)
    return int(number[0]) if number is not None and "." not in cell else None


def parse_sequence(cell: str) -> int | None:
    """Parse a sequence length: ``131072``, ``131,072``, ``128k`` (k is 1024) or ``1M``; None for every other cell."""
    match = _SEQUENCE.fullmatch(cell.strip())
    return int(match[1].replace(",", "")) * _SCALE[match[2]] if match else None


def parse_bool(cell: str) -> bool | None:
    """Parse a printed boolean; None for every other cell."""
    return {"true": True, "false": False, "yes": True, "no": False}.get(cell.strip().lower())


@lru_cache(maxsize=256)
def system_of(label: str) -> str:
    """Return the system that a heading names; ``unknown`` where it names no known system."""
    return next((system for system, pattern in _SYSTEMS if pattern.search(label)), "unknown")


def placement_of(label: str) -> str | None:
    """Return ``head_first`` or ``ring_first`` if a heading states the placement, else None."""
    plain = label.lower().replace("_", " ").replace("-", " ")
    if "ring first" in plain or "context first" in plain:
        return "ring_first"
    return "head_first" if "head first" in plain else None
