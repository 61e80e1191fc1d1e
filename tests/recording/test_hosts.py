"""Hosts of ranks in any launcher order, and the kind of link between any two ranks."""

from __future__ import annotations

import pytest

from ringprof.ranks.machine import RankHost, distinct_host_names, host_numbers
from ringprof.strategies import Unsupported
from ringprof.strategies.transport.hosts import Hosts


def test_unique_host_names_are_kept() -> None:
    assert distinct_host_names([RankHost("a", 0), RankHost("a", 0), RankHost("b", 1)]) == ["a", "a", "b"]


def test_hosts_with_equal_names_are_numbered() -> None:
    assert distinct_host_names([RankHost("pod", 0), RankHost("pod", 1), RankHost("b", 2)]) == ["pod#0", "pod#1", "b"]


@pytest.mark.parametrize(
    ("names", "numbers", "ranks_per_host"),
    [("aabb", [0, 0, 1, 1], 2), ("bbaa", [0, 0, 1, 1], 2), ("abab", [0, 1, 0, 1], 4), ("aabbbb", [0, 0, 1, 1, 1, 1], 6),
     ("aaaa", [0, 0, 0, 0], 4), ("abcd", [0, 1, 2, 3], 1), ("aabaab", [0, 0, 1, 0, 0, 1], 6),
     ("aabbb", [0, 0, 1, 1, 1], 5)],
)  # fmt: skip
def test_host_numbers_and_link_classes(names: str, numbers: list[int], ranks_per_host: int) -> None:
    assert host_numbers(names) == numbers
    hosts = Hosts.from_arguments(len(names), None, numbers)
    assert hosts is not None and hosts.per_host(range(len(names))) == ranks_per_host
    for rank, first in enumerate(names):
        for other, second in enumerate(names):
            assert hosts.link(rank, other) == ("same_host" if first == second else "other_host")


def test_user_option_takes_precedence_over_the_launcher() -> None:
    hosts = Hosts.from_arguments(4, 2, [0, 0, 0, 0])
    assert hosts is not None and hosts.link(1, 2) == "other_host"
    with pytest.raises(Unsupported):
        Hosts.from_arguments(4, None, [0, 0, 0])
