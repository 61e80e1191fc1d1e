"""Draw the metrics: ``python scripts/draw_metrics.py`` writes the pictures of docs/metrics.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ringprof.report import palette
from ringprof.report.plots import STYLE

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
Span = tuple[float, float, str, str]


def lanes(ax: Any, rows: list[tuple[str, list[Span]]], end: float) -> None:
    """Draw rows of labelled bars over one time axis; a span is (start, end, colour, label)."""
    for height, (_, spans) in enumerate(rows):
        for start, stop, colour, label in spans:
            ax.broken_barh([(start, stop - start)], (height - 0.36, 0.72), facecolors=colour)
            ax.text((start + stop) / 2, height, label, ha="center", va="center", fontsize=8.5)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, end)
    ax.set_xticks([])
    ax.set_xlabel("time")


def breakdown(ax: Any) -> None:
    wire, flash = palette.WIRE, palette.SKY
    rows: list[tuple[str, list[Span]]] = [
        ("computation K", [(0, 4, flash, "flash"), (6, 9, flash, "flash")]),
        ("communication C", [(2, 6.7, wire, "send/recv")]),
        ("memory M", [(5.6, 6.0, palette.PURPLE, ""), (9, 9.6, palette.PURPLE, "")]),
        ("counts as", [
            (0, 4, "#7FB8D8", "compute"), (4, 6, wire, "exposed comm"), (6, 9, "#7FB8D8", "compute"),
            (9, 9.6, palette.PURPLE, "mem"), (9.6, 10.4, "#C4C4C4", "idle"),
        ]),
    ]  # fmt: skip
    lanes(ax, rows, 11)
    ax.broken_barh([(10.4, 0.5)], (-0.36, 0.72), facecolors=flash)
    ax.set_title("every instant is one part: compute, else exposed communication, else memory, else idle")


def hop(ax: Any) -> None:
    wait, wire = "#E9A27A", palette.WIRE
    rows: list[tuple[str, list[Span]]] = [
        ("rank 0's hop", [(0, 4, wait, "waits for rank 1"), (4, 7, wire, "wire")]),
        ("rank 1's hop", [(2, 4, wait, "waits"), (4, 7, wire, "wire")]),
        ("rank 2's hop", [(4, 7, wire, "wire")]),
    ]
    lanes(ax, rows, 8)
    ax.axvline(4, color="black", linestyle="--", linewidth=1)
    ax.text(4.05, -0.52, "ready: the last of the peers, and of their peers in the same hop", fontsize=8.5, va="center")
    ax.set_title("waiting and wire of a hop", pad=14)


def step(ax: Any) -> None:
    wire = palette.WIRE
    rows: list[tuple[str, list[Span]]] = [
        ("attention", [(0, 4, palette.SKY, "block of step 1"), (5, 9, palette.SKY, "block of step 2")]),
        ("hop", [(0, 5, wire, "hop of step 1"), (5, 7.5, wire, "hop of step 2")]),
        ("step", [(0, 5, "#D8DEE4", "step 1, bound by the wire"), (5, 9, "#D8DEE4", "step 2, bound by compute")]),
    ]
    lanes(ax, rows, 9.6)
    ax.broken_barh([(4, 1)], (0.64, 0.72), facecolors="none", edgecolors="black")
    ax.annotate("exposed", (4.5, 0.62), (4.5, 0.5), ha="center", fontsize=8.5)
    ax.set_title("a ring step: its block, and the hop that the block should hide")


def main() -> None:
    with rc_context(STYLE):
        for draw, height in ((breakdown, 2.5), (hop, 2.2), (step, 2.2)):
            ax = Figure(figsize=(9, height), layout="constrained").add_subplot()
            draw(ax)
            ax.get_figure().savefig(IMAGES / f"{draw.__name__}.png", dpi=110)  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
