"""Reduce several waterfalls to the parts that all of them separate, so that they can be compared part by part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_COARSE = {
    "attention": ("peak", "kernel", "repeated", "slowdown"),
    "exposed_unsplit": ("imbalance", "exposed_wire", "peer_wait"),
}
"""Coarse parts, each with the finer parts that it contains where a run does not separate them."""
_OF_KERNEL = ("repeated", "slowdown")
"""Parts that ``kernel`` contains where a run does not separate them from it."""


def shared_parts(waterfalls: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Sum the parts that not every waterfall separates, so that a part means the same in each result.

    An empty waterfall, of a measurement without one, stays empty.
    """
    merged = merged_parts([set(parts) for parts in waterfalls if parts])
    results = []
    for parts in waterfalls:
        result: dict[str, float] = {}
        for name, value in parts.items():
            result[merged.get(name, name)] = result.get(merged.get(name, name), 0.0) + value
        results.append(result)
    return results


def merged_parts(waterfalls: Sequence[Collection[str]]) -> dict[str, str]:
    """Map each part that not every waterfall separates to the part that contains it in all of them."""
    merged: dict[str, str] = {}
    for coarse, fine in _COARSE.items():
        present = [part for part in fine if any(part in parts for parts in waterfalls)]
        if any(coarse in parts for parts in waterfalls):
            merged |= dict.fromkeys(present, coarse)
    with_kernel = [parts for parts in waterfalls if "kernel" in parts]
    for part in _OF_KERNEL:
        if (
            part not in merged
            and any(part in parts for parts in with_kernel)
            and not all(part in parts for parts in with_kernel)
        ):
            merged[part] = "kernel"
    return merged
