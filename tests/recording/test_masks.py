"""Packed documents and windows through the recorder: verification with the mask, FLOPs of its area, and balance."""

from __future__ import annotations

from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch

from ringprof.errors import UsageError, VerificationError
from ringprof.iteration.shard import Results, WorkloadShard
from ringprof.prediction.balance import balances
from ringprof.proof import dense as dense_module
from ringprof.proof import verify_timed as subject
from ringprof.proof.dense import draw_inputs, kernel_results, whole_block
from ringprof.proof.verify import verify
from ringprof.strategies import create
from ringprof.strategies.algorithms.zigzag import Zigzag
from ringprof.strategies.base import Context
from ringprof.strategies.kernels.torch_kernels import CpuFlashKernel
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.workload import Workload
from tests.strategies import cases
from tests.strategies.cases import Case, dense, inputs
from tests.strategies.ranks import run_ranks

BASE = Workload(batch=2, seq=96, heads=4, kv_heads=2, head_dim=8, dtype="fp32")
WORKLOADS = [
    msgspec.structs.replace(BASE, documents=(1, 50, 5, 40)),
    msgspec.structs.replace(BASE, window=17),
    msgspec.structs.replace(BASE, documents=(60, 36), window=9, causal=False),
    msgspec.structs.replace(BASE, documents=(60, 36), window=9, prefix=5),
    msgspec.structs.replace(BASE, documents=(60, 36), prefix=41, causal=False),
]
CASES = [
    Case("zigzag"), Case("zigzag", {"documents_layout": "per_document"}), Case("stripe"), Case("ulysses"),
    Case("usp", {"ulysses_degree": 2}), Case("allgather", {"layout": "zigzag", "documents_layout": "per_document"}),
]  # fmt: skip


def test_single_kernel_returns_the_dtype_of_its_inputs() -> None:
    """torch's flash on a GPU takes no output for its backward pass that is wider than its queries."""
    workload = msgspec.structs.replace(BASE, window=9, prefix=5, dtype="bf16")
    full = draw_inputs(workload, torch.device("cpu"))
    dtypes = []

    class Strict(CpuFlashKernel):
        def _backward_parts(self, dout, q, k, v, lse, out, *others):
            dtypes.append(out.dtype)
            return super()._backward_parts(dout, q, k, v, lse, out, *others)

    results = kernel_results(Strict(), full.q, full.k, full.v, full.dout, whole_block(workload))
    assert dtypes == [torch.bfloat16] and results["out"].dtype == torch.bfloat16


def gates(rank: int) -> None:
    for workload in WORKLOADS:
        case_shard = cases.WorkloadShard(96, 2, 4, 2, 8, dtype=torch.float32, kernel="cpu-flash")
        mask = workload.mask()
        truth = dense(case_shard, mask)
        for case in CASES:
            strategy = create(case.name, kernel="cpu-flash", **case.params)
            assert verify(strategy, workload, torch.device("cpu")).passed
            shard = WorkloadShard.create(strategy, workload, torch.device("cpu"))
            for name, whole in zip("qkv", inputs(case_shard), strict=False):
                setattr(shard, name, strategy.shard(whole, documents=mask.documents).contiguous())
            shard.dout = strategy.shard(inputs(case_shard)[3], documents=mask.documents).contiguous()
            with patch.dict(subject.BLOCK_NUMBERS, cpu=256), patch.object(subject, "KEYS_AT_A_TIME", 16):
                sample = subject._RowSample(shard, workload)
                expected = sample.reference_rows() | sample.reference_keys(1)
            right = Results(*(strategy.shard(x, documents=mask.documents) for x in truth))
            for name, value in sample.select_results(right, 1).items():
                assert (value - expected[name]).norm() < 1e-12 * right.out.norm(), (case, workload, name)
            for name, value in sample.kernel_rows(1).items():
                reference = expected[name] if name in ("dk", "dv") else expected[name][:1, :, 2:]
                reference = reference[:, :, -value.shape[2] :]
                assert (value - reference).norm() < 1e-5 * right.out.norm(), (case, workload, name)


@pytest.mark.processes
def test_both_verifications_use_the_mask() -> None:
    run_ranks(4, gates)


class Leaking(Zigzag):
    """Strategy that ignores the ends of documents."""

    def attention(self, *tensors, documents=None, **options):
        return super().attention(*tensors, **options)


def leaking(rank: int) -> str:
    strategy = Leaking(Context(Communicator(), "cpu-flash"))
    with pytest.raises(VerificationError) as refused:
        verify(strategy, WORKLOADS[0], torch.device("cpu"))
    return str(refused.value)


@pytest.mark.processes
def test_verification_finds_attention_across_documents() -> None:
    assert all("wrong result on rank" in said for said in run_ranks(2, leaking))


class OneToken(Zigzag):
    """Strategy whose output is a tenth too small at the last token of rank 1."""

    def attention(self, *tensors, **options):
        out = super().attention(*tensors, **options)
        factor = torch.ones_like(out)
        factor[:, -1] = 0.9 if self.comm.rank == 1 else 1.0
        return out * factor


def wrong_at_one_token(rank: int) -> str:
    strategy = OneToken(Context(Communicator(), "cpu-flash"))
    workload = Workload(seq=1024, heads=4, kv_heads=2, head_dim=8, dtype="bf16", backward=False)
    with patch.dict(dense_module.TOKENS_PER_RANK, cpu=512), pytest.raises(VerificationError) as refused:
        verify(strategy, workload, torch.device("cpu"))
    return str(refused.value)


@pytest.mark.processes
def test_verification_finds_one_wrong_token() -> None:
    """Zigzag on 2 ranks: the last token of rank 1, which holds tokens 256 to 767."""
    assert (
        run_ranks(2, wrong_at_one_token)
        == [
            "wrong result on rank 1: out is off by more than rounding explains at 1 token, the first is token 767, at"
            " sequence 1024; nothing was timed"
        ]
        * 2
    )


def test_flops_and_rates_count_the_mask_area() -> None:
    packed, window = WORKLOADS[:2]
    pairs = 1 + 50 * 51 // 2 + 15 + 40 * 41 // 2
    assert packed.exact_flops() == 14 * 2 * 4 * 8 * pairs
    # By the model's convention half the squares of the documents; of a window, its area.
    assert packed.model_flops() == 7 * 2 * 4 * 8 * (1 + 2500 + 25 + 1600)
    assert window.model_flops() == window.exact_flops() == 14 * 2 * 4 * 8 * (17 * 18 // 2 + (96 - 17) * 17)


def test_shortened_workload_scales_its_mask() -> None:
    short = msgspec.structs.replace(BASE, documents=(48, 48), window=16).at(48)
    assert (short.seq, short.documents, short.window) == (48, (24, 24), 8)
    both_ways = msgspec.structs.replace(BASE, prefix=20, causal=False).at(48)
    assert (both_ways.prefix, both_ways.mask().window) == (10, (-1, 0))
    # A document may vanish; what is left is one.
    assert msgspec.structs.replace(BASE, documents=(95, 1)).at(32).documents == (32,)


def test_documents_must_fill_the_sequence() -> None:
    with pytest.raises(ValueError, match="91 tokens together, the sequence has 96"):
        Workload(seq=96, heads=1, kv_heads=1, head_dim=8, documents=(90, 1))
    with pytest.raises(ValueError, match="--prefix 4 needs --window-size"):
        Workload(seq=96, heads=1, kv_heads=1, head_dim=8, prefix=4)


def test_balance_by_hand() -> None:
    """4 ranks, 4 documents of a rank's size: contiguous pieces need nothing of each other, zigzag does."""
    workload = Workload(seq=64, heads=4, kv_heads=4, head_dim=8, documents=(16, 16, 16, 16))
    by_name = {(balance.strategy, balance.params.get("documents_layout")): balance for balance in balances(workload, 4)}
    ring, zigzag = by_name["ring", None], by_name["zigzag", "packed"]
    assert (ring.busiest, ring.steps, ring.needed) == (1.0, 1.0, 0.0)
    # Chunks of 8; rank 0 holds the first of document 0 and the last of document 3: 36 own pairs, 64 + 36 of the late.
    assert zigzag.busiest == 1.0 and zigzag.needed == pytest.approx(4 / 12)
    causal = {balance.strategy: balance for balance in balances(Workload(seq=64, heads=4, kv_heads=4, head_dim=8), 4)}
    assert causal["ring"].busiest == pytest.approx((16 * 48 + 136) / (64 * 65 / 2 / 4))


def test_balance_orders_rings_by_waiting_per_step() -> None:
    """With two documents, contiguous pieces are more balanced than zigzag's over the pass, but less in each step."""
    workload = Workload(seq=1024, heads=4, kv_heads=4, head_dim=64, documents=(600, 424))
    order = balances(workload, 4)
    named = [(balance.strategy, balance.params.get("documents_layout")) for balance in order]
    zigzag, ring = (order[named.index(name)] for name in (("zigzag", "packed"), ("ring", None)))
    assert zigzag.busiest and ring.busiest and zigzag.steps and ring.steps
    assert zigzag.busiest > ring.busiest and zigzag.steps < ring.steps
    assert order.index(zigzag) < order.index(ring)


def test_balance_states_why_a_size_is_unsupported() -> None:
    workload = Workload(seq=60, heads=4, kv_heads=4, head_dim=8, documents=(30, 30))
    reasons = {balance.strategy: balance.reason for balance in balances(workload, 4) if balance.reason}
    assert "divisible by 8: not 60" in reasons["zigzag"]


def test_document_lengths_from_text(tmp_path) -> None:
    from ringprof.workload.documents import document_lengths

    assert document_lengths("64k,32768x4", 196608) == (65536, *[32768] * 4)
    drawn = document_lengths("lognormal:mean=8192,sigma=1.2,seed=7", 2**24)
    assert sum(drawn) == 2**24 and drawn == document_lengths("lognormal:mean=8192,sigma=1.2,seed=7", 2**24)
    # 2048 draws of that mean and spread: their mean is within some percent.
    assert sum(drawn) / len(drawn) == pytest.approx(8192, rel=0.15)
    file = tmp_path / "lengths.txt"
    file.write_text("10 20\n30, 40\n")
    assert document_lengths(str(file), 55) == (10, 20, 25)
    for text, said in {
        "10,20": "30 tokens together, the sequence has 100",
        "10,twenty": "'twenty' is neither a file nor a length",
        str(file): None,
        "lognormal:mean=0": "as in lognormal:mean=8192",
        "lognormal:median=3": "as in lognormal:mean=8192",
        "0x3": "is not a valid document length",
    }.items():
        if said is None:
            assert len(document_lengths(text, 100)) == 4
            continue
        with pytest.raises(UsageError, match=said):
            document_lengths(text, 100)
