"""Draw the prediction of docs/python.md: ``python scripts/draw_prediction.py`` writes docs/img/prediction.png.

It shows the speed of zigzag on 4 H200 over the sequence length, predicted by the bundled machine with its 80 %
interval. The points are those of dev/benchmarks/data/h200_grid.csv; the machine was fitted to none of them.
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
KERNELS = (("cudnn", "cuDNN", 40, 40, palette.BLUE), ("flash-attn", "flash-attn 2", 32, 8, palette.ORANGE))
TOKENS = [1 << power for power in range(12, 19)]
FOUR_GPUS = ringprof.Cluster(gpus_per_host=4)
Point = tuple[int, float]


def recorded(kernel: str, heads: int, kv_heads: int) -> Iterator[tuple[int, float]]:
    """Yield tokens and milliseconds of runs with hops by copy engine."""
    with open(ROOT / "dev" / "benchmarks" / "data" / "h200_grid.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["kernel"], row["hops"], row["heads"], row["kv_heads"]) == (
                kernel, "copy", str(heads), str(kv_heads)
            ):  # fmt: skip
                yield int(row["seq"]), float(row["ms"])


def draw(ax: Any) -> None:
    for kernel, name, heads, kv_heads, colour in KERNELS:
        low, middle, high = [], [], []
        problems = [ringprof.Workload(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128) for seq in TOKENS]
        for problem in problems:
            prediction = ringprof.predict(
                "zigzag", problem, FOUR_GPUS, machine="h200", kernel=kernel, hops="copy"
            ).prediction
            for values, ms in zip((high, middle, low), prediction.interval_ms, strict=True):
                values.append(prediction.tflops(ms * 1e6))
        heads_text = f"{heads} heads" if heads == kv_heads else f"{heads} heads, {kv_heads} kv"
        ax.fill_between(TOKENS, low, high, color=colour, alpha=0.25, linewidth=0)
        ax.plot(TOKENS, middle, color=colour, label=f"predicted, {name}, {heads_text}")
        flops = {problem.seq: problem.model_flops() / FOUR_GPUS.size / 1e9 for problem in problems}
        points = [(seq, flops[seq] / ms) for seq, ms in recorded(kernel, heads, kv_heads) if seq in flops]
        ax.plot(*zip(*points, strict=True), "o", color=colour, markeredgecolor="black", label=f"recorded, {name}")
    ax.set_xscale("log", base=2)
    ax.set_xticks(TOKENS, [short_count(tokens) for tokens in TOKENS])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens, on 4 H200")
    ax.set_ylabel("TFLOP/s per GPU, forward and backward")
    ax.grid(axis="y")
    ax.set_title("zigzag, hops by copy engine: predicted, and recorded on two later days")
    ax.legend(loc="upper left")


if __name__ == "__main__":
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(ROOT / "docs" / "img" / "prediction.png", metadata={"Software": None})
