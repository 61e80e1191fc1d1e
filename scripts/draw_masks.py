"""Draw masks and layouts: ``python scripts/draw_masks.py`` writes docs/img/masks.png of docs/workloads.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ringprof.report import palette
from ringprof.report.plots import STYLE
from ringprof.strategies.kernels.reference import KeyStretches
from ringprof.strategies.masks.layouts import LAYOUTS, Layout
from ringprof.strategies.masks.sharded_mask import busiest_over_mean, sharded_mask_of
from ringprof.workload.mask import Mask

IMAGE = Path(__file__).resolve().parent.parent / "docs" / "img" / "masks.png"
SEQ, RANKS = 32, 4
DOCUMENTS = (0, 4, 25, 32)
PACKED = Mask.of(documents=DOCUMENTS)
ZIGZAG = LAYOUTS["zigzag"]
COLOURS = ListedColormap(["#FFFFFF", *palette.LINES[:RANKS]])
PANELS: tuple[tuple[str, Mask, Layout], ...] = (
    ("causal, zigzag", Mask.of(), ZIGZAG),
    ("documents of 4, 21 and 7, packed", PACKED, ZIGZAG),
    ("window of 6", Mask.of(window=(5, 0)), ZIGZAG),
    ("documents and window", Mask.of(documents=DOCUMENTS, window=(5, 0)), ZIGZAG),
    ("these documents, contiguous", PACKED, LAYOUTS["contiguous"]),
    ("these documents, stripe", PACKED, LAYOUTS["stripe"]),
    ("these documents, zigzag per document", PACKED, ZIGZAG.per_document(DOCUMENTS)),
    ("window of 6, prefix of 3", Mask.of(window=(5, 0), prefix=3), LAYOUTS["contiguous"]),
)


def cells(mask: Mask, layout: Layout) -> torch.Tensor:
    """Return a matrix (S, S): 0 if a query does not attend to a key, else 1 + the rank that holds the query."""
    positions = torch.arange(SEQ)
    visible = KeyStretches.of(mask, positions, SEQ).shown(positions)
    owners = torch.empty(SEQ, dtype=torch.int64)
    for rank in range(RANKS):
        owners[layout.positions(SEQ, RANKS, rank)] = rank + 1
    return torch.where(visible, owners[:, None], 0)


def draw(ax: Any, title: str, mask: Mask, layout: Layout) -> None:
    ax.imshow(cells(mask, layout).numpy(), cmap=COLOURS, vmin=0, vmax=RANKS, interpolation="nearest")
    for bound in range(SEQ + 1):
        ax.axhline(bound - 0.5, color="white", linewidth=0.4)
        ax.axvline(bound - 0.5, color="white", linewidth=0.4)
    ax.set_xticks([])
    ax.set_yticks([])
    busiest = busiest_over_mean(sharded_mask_of(mask, layout, RANKS, SEQ).areas())
    ax.set_title(title, fontsize=9.5)
    ax.set_xlabel(f"keys · busiest rank {busiest:.2f} times the mean", fontsize=8.5)


def main() -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 6.1), layout=ConstrainedLayoutEngine(hspace=0.08))
        for ax, panel in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
            draw(ax, *panel)
            if panel in (PANELS[0], PANELS[4]):
                ax.set_ylabel("queries, first on top", fontsize=8.5)
        handles = [figure.axes[0].plot([], [], "s", color=palette.LINES[rank])[0] for rank in range(RANKS)]
        figure.legend(
            handles, [f"queries of rank {rank}" for rank in range(RANKS)], loc="outside lower center", ncols=4
        )
        figure.savefig(IMAGE, dpi=100)


if __name__ == "__main__":
    main()
