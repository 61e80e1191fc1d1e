"""Colours of every report that is drawn: Okabe and Ito's, which people with any colour vision tell apart.

Source: M. Okabe, K. Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW, GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#8A8A8A",
)  # fmt: skip

KINDS: dict[str, str] = {
    "flash_fwd": BLUE,
    "flash_bwd": SKY,
    "merge": GREEN,
    "gemm": YELLOW,
    "other": GREY,
    "memcpy": PURPLE,
    "memset": PURPLE,
    "other_groups": GREY,
}
"""Of computation and memory; communication is drawn by what it does."""

WIRE, WAIT, UNSPLIT = ORANGE, VERMILION, "#A6761D"
"""Communication on the wire, waiting, and not told apart."""

PARTS: dict[str, str] = {
    "compute": BLUE,
    "exposed_comm": ORANGE,
    "exposed_other_groups": YELLOW,
    "exposed_memory": PURPLE,
    "idle": GREY,
}
"""Of a rank's time."""

WATERFALL: dict[str, str] = {
    "peak": GREEN,
    "kernel": BLUE,
    "repeated": SKY,
    "slowdown": SKY,
    "attention": BLUE,
    "imbalance": VERMILION,
    "exposed_wire": ORANGE,
    "peer_wait": VERMILION,
    "exposed_unsplit": UNSPLIT,
    "other_groups": YELLOW,
    "merge_and_copies": PURPLE,
    "launch_gaps": GREY,
}

LINES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY, "#000000", YELLOW)
"""Of entries side by side, in their order."""


def kind_colour(kind: str) -> str:
    """The colour of an activity's kind."""
    return KINDS.get(kind, WIRE)
