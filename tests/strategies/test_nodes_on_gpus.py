"""Strategies that treat nodes apart, on the GPUs of one host whose ranks NCCL and the launcher place on two nodes."""

from __future__ import annotations

import pytest

from ringprof.strategies import create
from ringprof.strategies.transport.hosts import OTHER_HOST, SAME_HOST
from ringprof.workload.mask import Mask
from tests.pairs import pairs
from tests.strategies.cases import Case
from tests.strategies.gpu_ranks import SIZES, needs_two_gpus, run_gpu_ranks
from tests.strategies.test_masks_on_gpu import MASKS, PROBLEMS, error_of

pytestmark = [pytest.mark.gpu, needs_two_gpus]
CASES = [
    Case("usp"), Case("usp", {"ulysses_degree": 1}), Case("usp", {"ulysses_degree": 2, "placement": "ring-first"}),
    Case("double-ring"), Case("double-ring", {"ulysses_degree": 2}), Case("burst"),
    Case("burst", {"documents_layout": "packed"}), Case("burst", {"optimized_backward": False}),
    Case("burst", {"double_ring": False}),
]  # fmt: skip


def over_two_nodes(rank: int, size: int) -> tuple[list[str], dict[str, set[str]]]:
    """Return the wrong results, and by case the links and operations of its messages."""
    wrong: list[str] = []
    operations: dict[str, set[str]] = {}
    for case, hops, problem, mask in pairs(CASES, ("auto", "copy"), PROBLEMS, [Mask(), *MASKS]):
        strategy = create(case.name, kernel="torch-flash", hops=hops, **case.params)
        assert strategy.comm.ranks_per_host() == size // 2
        off = error_of(strategy, problem, mask)
        if not off < 0.02:
            wrong.append(f"{case}, {hops}, {problem}, {mask}: {off}")
        sent = {f"{link} {operation}" for _, _, operation, link in strategy.comm.meter.sent}
        operations.setdefault(str(case), set()).update(sent)
    return wrong, operations


@pytest.mark.parametrize("size", SIZES)
def test_strategies_are_exact_over_two_nodes_and_copy_within_them_alone(size: int) -> None:
    results = run_gpu_ranks(size, over_two_nodes, size, nodes=2)
    assert [wrong for wrong, _ in results] == [[]] * size
    for case in CASES:
        sent = set().union(*(operations[str(case)] for _, operations in results))
        assert any(way.startswith(OTHER_HOST) for way in sent) and f"{OTHER_HOST} copy" not in sent, (case, sent)
        # Their inner rings are within a node, which has one rank of two.
        assert (f"{SAME_HOST} copy" in sent) == (size > 2) or case.params or case.name == "usp", (case, sent)
