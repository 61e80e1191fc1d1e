"""Every strategy over hops with the worst timing that their contract allows: exact results, and one layout per hop."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringprof.strategies import Unsupported, create
from ringprof.strategies.kernels.merge import Partial
from ringprof.strategies.transport.streams import SIDE_STREAMS, SideStreams
from ringprof.workload.mask import Mask
from tests.strategies.cases import CASES, Case, WorkloadShard, dense, relative_error, whole_call
from tests.strategies.cpu_transports import copies_on_cpu, noted_hops, poisoned_nccl
from tests.strategies.ranks import run_ranks
from tests.tiers import tiered

SEQ, LONG = 48, pytest.mark.long
MASKS = [
    Mask.of(), Mask.of(causal=False), Mask.of(window=(3, 0)), Mask.of(window=(13, 0)), Mask.of(window=(20, 0)),
    Mask.of(causal=False, window=(5, 7)), Mask.of(window=(6, 0), prefix=3), Mask.of(documents=[0, 21, 36, SEQ]),
    Mask.of(documents=[0, 12, 24, 36, SEQ]), Mask.of(documents=[0, 1, 2, 9, 9, 30, SEQ]),
    Mask.of(causal=False, documents=[0, 5, 33, SEQ]), Mask.of(documents=[0, 3, 29, SEQ], window=(8, 0)),
    Mask.of(documents=[0, 3, 33, SEQ], window=(8, 0), prefix=5),
]  # fmt: skip
DOCUMENTS_LAYOUTS = [
    Case(name, {"documents_layout": layout})
    for name in ("zigzag", "burst", "megatron") for layout in ("packed", "per_document", "dealt")
]  # fmt: skip
ONE_HEAD_GROUP = [Case("usp", {"ulysses_degree": 1, "layout": layout}) for layout in ("zigzag", "contiguous")]
PROBLEMS = [
    WorkloadShard(SEQ, 1, 12, 4, 8),
    # Heads whose bytes are no multiple of a message's alignment, and rows that are no dense stretch.
    WorkloadShard(SEQ, 3, 6, 1, 9),
    WorkloadShard(SEQ, 2, 4, 2, 8, dtype=torch.bfloat16),
    WorkloadShard(SEQ, 2, 4, 1, 5, dtype=torch.bfloat16),
    WorkloadShard(SEQ, 1, 4, 2, 8, v_head_dim=5),
]
FEW_CASES = [
    Case("ring"), Case("zigzag"), Case("stripe"), Case("usp", {"ulysses_degree": 1}),
    Case("double-ring", {"ring_window": 1}), Case("burst"), Case("burst", {"ring_window": 1}),
    Case("burst", {"optimized_backward": False, "documents_layout": "packed"}), Case("megatron"),
]  # fmt: skip
FEW_MASKS = [Mask.of(), MASKS[3], MASKS[5], MASKS[7], MASKS[11]]
Truths = Sequence[tuple[WorkloadShard, Mask, Sequence[torch.Tensor]]]


def on_transport(transport: str, timing: str, folder: str) -> AbstractContextManager[None]:
    return copies_on_cpu(timing, folder) if transport == "copy" else poisoned_nccl(timing)


def truths_of(problems: Sequence[WorkloadShard], masks: Sequence[Mask]) -> Truths:
    return [(problem, mask, dense(problem, mask)) for problem in problems for mask in masks]


def wrong_calls(
    rank: int, transport: str, timing: str, folder: str, cases: Sequence[Case], truths: Truths
) -> tuple[list[str], set[str]]:
    """Return what is wrong with the cases' results and hops, and the cases whose hops were copied."""
    wrong, copied = [], set()
    with on_transport(transport, timing, folder), noted_hops() as posted:
        for case in cases:
            strategy = create(case.name, kernel="reference", **case.params)
            for problem, mask, truth in truths:
                posted.clear()
                try:
                    errors = errors_of_passes(strategy, problem, mask, truth, turned=rank % 2 == 1)
                except Unsupported as refusal:
                    if " heads" not in str(refusal):
                        raise
                    continue  # heads that this many ranks cannot split
                names = [name for name, error in errors if not error < (1e-11 if problem.dtype.itemsize == 8 else 2e-2)]
                hops: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(hops, list(posted))
                if names or any(other != hops[0] for other in hops):
                    wrong.append(f"{case}, {mask}, {problem}: {names} wrong, one layout: {hops.count(hops[0])}")
            if any(operation == "copy" for _, _, operation, _ in strategy.comm.meter.sent):
                copied.add(case.name)
    return wrong, copied


def errors_of_passes(
    strategy: Any, problem: WorkloadShard, mask: Mask, truth: Sequence[torch.Tensor], *, turned: bool
) -> list[tuple[str, float]]:
    """Return the errors of two passes: the second uses the memory that the first has left.

    In the second, q, k, v and dout of a ``turned`` rank have their heads before the sequence.
    """
    errors = []
    for number in range(2):
        turn = (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)) if turned and number else None
        whole = whole_call(strategy, problem, mask, strided=turn)
        pairs = zip(("out", "dq", "dk", "dv"), whole, truth, strict=True)
        errors += [(name, relative_error(x, true)) for name, x, true in pairs]
    return errors


def check(size: int, transport: str, timing: str, cases: Sequence[Case], truths: Truths) -> set[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        results = run_ranks(size, wrong_calls, transport, timing, folder, cases, truths)
    assert [wrong for wrong, _ in results] == [[]] * size
    return set[str].union(*(copied for _, copied in results))


@tiered("transport", ["copy", "nccl"], ["copy"], "processes")
def test_late_hops_of_two_ranks_are_exact_and_laid_out_alike(transport):
    copied = check(2, transport, "late", FEW_CASES, truths_of(PROBLEMS[:2], FEW_MASKS))
    rings = {"ring", "zigzag", "stripe", "usp", "double-ring", "burst"}
    assert copied == (rings if transport == "copy" else set())


def _carried(rank: int, can: list[bool], folder: str) -> tuple[set[str], float]:
    """Return the operations of zigzag's hops, and its error. ``can`` says which ranks have copy engines."""
    problem = WorkloadShard(seq=32)
    with copies_on_cpu("late", folder, can=can[rank]):
        strategy = create("zigzag", kernel="reference")
        errors = errors_of_passes(strategy, problem, MASKS[0], dense(problem, MASKS[0]), turned=False)
    return {operation for _, _, operation, _ in strategy.comm.meter.sent}, max(error for _, error in errors)


class JoinedStreams(SideStreams):
    """Side streams that know which results the current stream may read."""

    def __init__(self) -> None:
        self.joined: set[int] = set()

    def join(self, results: Iterable[torch.Tensor]) -> None:
        self.joined |= {id(result) for result in results}


def merged_before_joined(rank: int) -> tuple[int, int]:
    """Return how many blocks megatron merges, and how many of them before its streams have joined."""
    merged, streams = [], JoinedStreams()
    merge = Partial.merge

    def noted(partial: Partial, out: torch.Tensor, *args: Any) -> None:
        merged.append(id(out) in streams.joined)
        merge(partial, out, *args)

    with patch.dict(SIDE_STREAMS, cpu=lambda device, count: streams), patch.object(Partial, "merge", noted):
        strategy = create("megatron", kernel="reference")
        q = torch.randn(1, 16, 2, 8)
        strategy.attention(q, q, q)
    return len(merged), merged.count(False)


def test_megatron_merges_blocks_after_its_streams_have_joined():
    assert run_ranks(2, merged_before_joined) == [(2, 0)] * 2


@pytest.mark.processes
@pytest.mark.parametrize(
    ("can", "way"), [([True, True], "copy"), ([True, False], "send_recv"), ([False, False], "send_recv")]
)
def test_auto_uses_copies_if_every_rank_supports_them(can, way, tmp_path):
    for ways, error in run_ranks(2, _carried, can, str(tmp_path)):
        assert ways == {way} and error < 1e-12


@pytest.mark.processes
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.batch}x{problem.head_dim}")
@pytest.mark.parametrize("transport", ["copy", "nccl"])
@pytest.mark.parametrize(
    ("size", "timing"),
    [(2, "late"), (3, "late"), (4, "late"), (2, "early"), *(pytest.param(n, "early", marks=LONG) for n in (3, 4))],
)
def test_hops_are_exact_and_laid_out_alike(size, transport, timing, problem):
    degrees = {"ulysses_degree", "ring_degree", "ring_window"}
    fits = (lambda case: not degrees & set(case.params)) if size == 3 else (lambda case: size in case.worlds)
    cases = [case for case in (*CASES, *DOCUMENTS_LAYOUTS, *ONE_HEAD_GROUP) if fits(case)]
    check(size, transport, timing, cases, truths_of([problem], MASKS))
