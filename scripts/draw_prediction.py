"""Draw the README's prediction: ``python scripts/draw_prediction.py`` writes docs/img/prediction.png.

The speed of zigzag on 4 H200 against length, foreseen by the bundled machine with the interval of four in five cases,
and the points of benchmarks/data/h200_grid.csv, of which none entered the machine.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

import ringprof
from ringprof.report import palette
from ringprof.report.plots import STYLE
from ringprof.report.text import short_count

ROOT = Path(__file__).resolve().parent.parent
DRAWN = (("cudnn", "cuDNN", 40, 40, palette.BLUE), ("flash-attn", "flash-attn 2", 32, 8, palette.ORANGE))
TOKENS = [1 << power for power in range(12, 19)]
FOUR = ringprof.Cluster(gpus_per_host=4)
Point = tuple[int, float]


def recorded(kernel: str, heads: int, kv_heads: int) -> Iterator[tuple[int, float]]:
    """Tokens and milliseconds of hops by copy engine."""
    with open(ROOT / "benchmarks" / "data" / "h200_grid.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["kernel"], row["hops"], row["heads"], row["kv_heads"]) == (
                kernel, "copy", str(heads), str(kv_heads)
            ):  # fmt: skip
                yield int(row["seq"]), float(row["ms"])


def draw(ax: Any) -> None:
    for kernel, name, heads, kv_heads, colour in DRAWN:
        low, middle, high = [], [], []
        problems = [ringprof.Workload(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128) for seq in TOKENS]
        for problem in problems:
            one = ringprof.predict("zigzag", problem, FOUR, machine="h200", kernel=kernel, hops="copy").prediction
            for kept, ms in zip((high, middle, low), one.interval_ms, strict=True):
                kept.append(one.tflops(ms * 1e6))
        heads_text = f"{heads} heads" if heads == kv_heads else f"{heads} heads, {kv_heads} kv"
        ax.fill_between(TOKENS, low, high, color=colour, alpha=0.25, linewidth=0)
        ax.plot(TOKENS, middle, color=colour, label=f"predicted, {name}, {heads_text}")
        flops = {problem.seq: problem.model_flops() / FOUR.size / 1e9 for problem in problems}
        points = [(seq, flops[seq] / ms) for seq, ms in recorded(kernel, heads, kv_heads) if seq in flops]
        ax.plot(*zip(*points, strict=True), "o", color=colour, markeredgecolor="black", label=f"recorded, {name}")
    ax.set_xscale("log", base=2)
    ax.set_xticks(TOKENS, [short_count(tokens) for tokens in TOKENS])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens, on 4 H200")
    ax.set_ylabel("TFLOP/s per GPU, forward and backward")
    ax.grid(axis="y")
    ax.set_title("zigzag, hops by copy engine: foreseen, and what was recorded on two days since")
    ax.legend(loc="upper left")


if __name__ == "__main__":
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(ROOT / "docs" / "img" / "prediction.png", metadata={"Software": None})
