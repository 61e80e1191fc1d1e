"""Which ranks share a host: what every rank says of its own, put together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NODE = "#"
"""Between a host's name and the launcher's number, where several of the launcher's hosts have one name."""


class RankHost(msgspec.Struct, frozen=True):
    """Where one rank is: its host's name, and the number that the launcher gave the host; and its process."""

    name: str
    node: int
    pid: int = 0


def distinct_host_names(ranks: Sequence[RankHost]) -> list[str]:
    """The host of each rank. Containers and network namespaces may have one name: their number tells them apart."""
    nodes: dict[str, set[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank.name, set()).add(rank.node)
    return [rank.name if len(nodes[rank.name]) == 1 else f"{rank.name}{NODE}{rank.node}" for rank in ranks]


def host_numbers(names: Sequence[str]) -> list[int]:
    """Hosts counted from 0, in the order of their first ranks."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]
