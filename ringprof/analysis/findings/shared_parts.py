"""Bring several waterfalls to the parts that all of them tell apart, so that they can be compared part by part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_COARSE = {
    "attention": ("peak", "kernel", "repeated", "slowdown"),
    "exposed_unsplit": ("imbalance", "exposed_wire", "peer_wait"),
}
"""Parts that stand for several finer ones where a run does not tell these apart."""
_OF_KERNEL = ("repeated", "slowdown")
"""Parts that ``kernel`` holds where a run does not tell them apart from it."""


def shared_parts(waterfalls: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Sum the parts that not every waterfall tells apart: the result's keys mean the same in each.

    An empty waterfall, of an entry that has none, is left alone.
    """
    into = merged_parts([set(parts) for parts in waterfalls if parts])
    results = []
    for parts in waterfalls:
        result: dict[str, float] = {}
        for name, value in parts.items():
            result[into.get(name, name)] = result.get(into.get(name, name), 0.0) + value
        results.append(result)
    return results


def merged_parts(waterfalls: Sequence[Collection[str]]) -> dict[str, str]:
    """Map each part that not every waterfall tells apart to the part that holds it in all of them."""
    into: dict[str, str] = {}
    for coarse, fine in _COARSE.items():
        present = [part for part in fine if any(part in parts for parts in waterfalls)]
        if any(coarse in parts for parts in waterfalls):
            into |= dict.fromkeys(present, coarse)
    split = [parts for parts in waterfalls if "kernel" in parts]
    for part in _OF_KERNEL:
        if part not in into and any(part in parts for parts in split) and not all(part in parts for parts in split):
            into[part] = "kernel"
    return into
