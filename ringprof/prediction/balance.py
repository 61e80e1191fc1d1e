"""Load balance of a mask's work under each layout, derived from the mask alone: no GPU, no attention is computed."""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.common.json_object import JsonObject, Params
from ringprof.iteration.resolve import load_strategy, typed_params, why_unsupported
from ringprof.strategies.masks.sharded_mask import busiest_over_mean, steps_over_mean
from ringprof.workload.workload import Workload

CANDIDATES: tuple[tuple[str, JsonObject], ...] = (
    ("ring", {}),
    ("zigzag", {"documents_layout": "auto"}),
    ("zigzag", {"documents_layout": "packed"}),
    ("zigzag", {"documents_layout": "per_document"}),
    ("zigzag", {"documents_layout": "dealt"}),
    ("stripe", {}),
    ("ulysses", {}),
    ("usp", {"documents_layout": "auto"}),
    ("usp", {"documents_layout": "packed"}),
    ("usp", {"documents_layout": "per_document"}),
    ("allgather", {"layout": "contiguous"}),
    ("allgather", {"layout": "zigzag", "documents_layout": "auto"}),
    ("allgather", {"layout": "zigzag", "documents_layout": "packed"}),
    ("allgather", {"layout": "zigzag", "documents_layout": "per_document"}),
)
"""Strategies and parameters that balance work differently from each other."""
TIED = ("ring", "zigzag", "stripe", "usp")
"""Strategies whose ranks wait for each other in every ring step."""


@dataclass(frozen=True)
class Balance:
    """Load balance of one strategy with its parameters; the ratios are None if ``reason`` says why it cannot run."""

    strategy: str
    params: Params
    reason: str | None = None
    layout: str | None = None
    """Name of the layout, which ``documents_layout=auto`` chooses by the documents."""
    busiest: float | None = None
    """Work of the busiest rank, divided by the mean over the ranks."""
    steps: float | None = None
    """Work of the busiest rank of each ring step, summed over the steps and divided by the mean rank's total.

    None for a strategy whose ranks do not wait for each other in every step."""
    needed: float | None = None
    """Share (0 to 1) of the ordered pairs of different ranks in which the first needs keys of the second."""


def balances(workload: Workload, world: int) -> list[Balance]:
    """Return the balance of every entry of `CANDIDATES`, best first; entries that cannot run come last."""
    candidates = [
        (name, params)
        for name, params in CANDIDATES
        if workload.documents or params.get("documents_layout", "packed") == "packed"
    ]
    results = [_balance(name, params, workload, world) for name, params in candidates]
    return sorted(results, key=lambda balance: (balance.busiest is None, balance.steps or balance.busiest or 0.0))


def _balance(name: str, params: Params, workload: Workload, world: int) -> Balance:
    strategy = load_strategy(name)
    placed_params = strategy.with_placement(world, world, **typed_params(strategy, name, params))
    reason = why_unsupported(strategy, workload, world, placed_params)
    if reason:
        return Balance(name, params, reason)
    mask = strategy.sharded_mask(workload.mask(), workload.seq, world, **placed_params)
    areas = mask.areas()
    pairs = [bool(area) for rank, row in enumerate(areas) for other, area in enumerate(row) if other != rank]
    return Balance(
        name, params, layout=mask.layout.name, busiest=busiest_over_mean(areas),
        steps=steps_over_mean(areas) if name in TIED else None,
        needed=sum(pairs) / len(pairs) if pairs else None,
    )  # fmt: skip
