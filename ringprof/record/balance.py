"""How evenly layouts deal out the work of a mask, from the mask alone: no GPU, nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.json_object import JsonObject, Params
from ringprof.record.resolve import fits, load_strategy, typed_params
from ringprof.run import Workload
from ringprof.strategies.masks.sharded_mask import busiest_over_mean, steps_over_mean

CANDIDATES: tuple[tuple[str, JsonObject], ...] = (
    ("ring", {}),
    ("zigzag", {"documents_layout": "packed"}),
    ("zigzag", {"documents_layout": "per_document"}),
    ("stripe", {}),
    ("ulysses", {}),
    ("usp", {"documents_layout": "packed"}),
    ("usp", {"documents_layout": "per_document"}),
    ("allgather", {"layout": "contiguous"}),
    ("allgather", {"layout": "zigzag", "documents_layout": "packed"}),
    ("allgather", {"layout": "zigzag", "documents_layout": "per_document"}),
)
"""Strategies and parameters whose balance differs."""
TIED = ("ring", "zigzag", "stripe", "usp")
"""Strategies whose ranks wait for each other in every step."""


@dataclass(frozen=True)
class Balance:
    """One way of dealing out the work, and what it comes to; ratios are None where it does not fit, for ``reason``."""

    strategy: str
    params: Params
    reason: str | None = None
    busiest: float | None = None
    """Work of the busiest rank over the mean."""
    steps: float | None = None
    """The same where all ranks wait for the busiest one in every step of a ring; None where nothing ties them."""
    needed: float | None = None
    """Share of the pairs of two different ranks of which one needs the other's keys."""


def balances(workload: Workload, world: int) -> list[Balance]:
    """Every way of `CANDIDATES`, the most even first; those that do not fit last."""
    candidates = [
        (name, params)
        for name, params in CANDIDATES
        if workload.documents or params.get("documents_layout") != "per_document"
    ]
    found = [_balance(name, params, workload, world) for name, params in candidates]
    return sorted(found, key=lambda one: (one.busiest is None, one.steps or one.busiest or 0.0))


def _balance(name: str, params: Params, workload: Workload, world: int) -> Balance:
    strategy = load_strategy(name)
    placed = strategy.with_placement(world, world, **typed_params(strategy, name, params))
    reason = fits(strategy, workload, world, placed)
    if reason:
        return Balance(name, params, reason)
    areas = strategy.sharded_mask(workload.mask(), workload.seq, world, **placed).areas()
    pairs = [bool(area) for rank, row in enumerate(areas) for other, area in enumerate(row) if other != rank]
    return Balance(
        name, params, busiest=busiest_over_mean(areas), steps=steps_over_mean(areas) if name in TIED else None,
        needed=sum(pairs) / len(pairs) if pairs else None,
    )  # fmt: skip
