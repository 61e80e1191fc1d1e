"""Keys and values that move from prefill's layout to decode's, against the full cache."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ringprof.strategies import create, redistribute_cache
from tests.paths import ROOT
from tests.strategies.ranks import refusal, run_ranks

EXAMPLE = ROOT / "examples" / "prefill_to_decode.py"


def full_cache(tokens: int, kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in which every number is another one."""
    k = torch.arange(2 * tokens * kv_heads * 3, dtype=torch.float64).view(2, tokens, kv_heads, 3)
    return k, -k[..., :2] - 1


def moved(rank: int, cases: list[tuple[tuple[int, ...], int]]) -> list[tuple[bool, list[int]]]:
    """Move caches of given chunks to groups of given size.

    Return whether the moved keys are right, and [count, bytes] sent, for each case and way to say where the keys are.
    """
    return [result for chunks, degree in cases for result in moved_of(rank, chunks, degree)]


def moved_of(rank: int, chunks: tuple[int, ...], degree: int) -> list[tuple[bool, list[int]]]:
    prefill, decode = create("ring-prefill", kernel="reference"), create("dcp", kernel="reference", dcp_degree=degree)
    k, v = full_cache(sum(chunks))
    # Token t of the heads of group g is on rank g·N + t mod N.
    size = decode.comm.size
    heads = range(4)[4 * (rank // degree) // (size // degree) : 4 * (rank // degree + 1) // (size // degree)]
    expected = [x[:, rank % degree :: degree, heads.start : heads.stop] for x in (k, v)]
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    held = torch.cat([start + prefill.query_positions(n) for start, n in zip(starts, chunks, strict=True)])
    results = []
    for positions, options in (
        (held, {"kv_chunks": chunks}),
        (prefill.key_positions(sum(chunks), chunks[-1]), {"kv_length": sum(chunks), "new_tokens": chunks[-1]}),
    ):
        prefill.comm.meter.clear()
        arrived = redistribute_cache(prefill, decode, k[:, positions], v[:, positions], **options)
        sent = [entry for (_, _, operation, _), entry in prefill.comm.meter.sent.items() if operation == "all_to_all"]
        right = all(torch.equal(x, y) and x.is_contiguous() for x, y in zip(arrived, expected, strict=True))
        results.append((right, [sum(x) for x in zip(*sent, strict=True)]))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_keys_of_prefill_move_to_decode_with_one_all_to_all(world: int) -> None:
    # Groups share out 4 kv heads.
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0 and 4 % (world // degree) == 0]
    chunks = [(8 * world, 8 * world), (13,), (7, 5, 11), (1, 1), (2,)]
    cases = list(product(chunks, degrees))
    for results in run_ranks(world, moved, cases):
        for case, (right, sent) in zip((case for case in cases for _ in range(2)), results, strict=True):
            assert right and sent[:1] in ([], [1]), case
        if world == 2:
            # 32 keys, of which a rank has 16 and sends 8: 2 sequences, 4 heads of 3 and 2 numbers of 8 bytes.
            assert results[2][1] == [1, 8 * 2 * 4 * 5 * 8]


def back_and_refusals(rank: int) -> list[str]:
    prefill, decode = create("ring-prefill", kernel="reference"), create("dcp", kernel="reference")
    k, v = full_cache(13)
    own = [decode.shard_cache(x, 1, 4) for x in (k, v)]
    options: dict[str, Any]
    for options, new_tokens in (({"kv_length": 13}, 0), ({"kv_chunks": (13,)}, 13)):
        there = redistribute_cache(decode, prefill, *own, **options)
        held = prefill.key_positions(13, new_tokens)
        assert all(torch.equal(x, full[:, held]) for x, full in zip(there, (k, v), strict=True))
    messages = []
    narrow = create("dcp", kernel="reference", dcp_degree=1)
    for source, target, options in (
        (decode, prefill, {"kv_length": 13 + rank}),
        (decode, prefill, {"kv_length": 12}),
        (decode, prefill, {}),
        (decode, prefill, {"kv_chunks": (4,), "kv_length": 13}),
        (narrow, prefill, {"kv_length": 13}),
        (decode, create("ring-prefill", group=torch.distributed.new_group([1, 0])), {"kv_length": 13}),
    ):
        messages.append(refusal(redistribute_cache, source, target, *own, **options))
    return messages


@pytest.mark.processes
def test_keys_move_back_and_what_cannot_be_meant_is_refused_on_every_rank() -> None:
    for messages in run_ranks(2, back_and_refusals):
        for message, part in zip(
            messages,
            [
                "kv_length=14 (14 stripe) makes 7 keys per sequence on rank 1, which has k (2, 6, 4, 3)",
                "kv_length=12 (12 stripe) makes 6 keys per sequence on rank 0, which has k (2, 7, 4, 3)",
                "give kv_length",
                "kv_chunks [4] are no lengths of chunks of kv_length=13 tokens",
                "must hold all kv heads",
                "",
            ],
            strict=True,
        ):
            assert part in message


def run_example(rank: int, code: str) -> float:
    names: dict[str, Any] = {}
    exec(code, names)
    return float(names["error"])


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_example_prefills_in_chunks_moves_the_cache_and_decodes(world: int) -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    for line in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert line in code  # the ranks of the test have a group
        code = code.replace(line, "")
    assert max(run_ranks(world, run_example, code)) < 1e-12
