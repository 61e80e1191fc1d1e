"""Softcap, learned sinks and heads of two sizes through the recorder: both gates, the count, what a run says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch
from torch import Tensor

from ringprof import cli
from ringprof.errors import VerificationError
from ringprof.iteration.resolve import why_unsupported
from ringprof.iteration.shard import WorkloadShard, row_sums
from ringprof.prediction.text import described
from ringprof.proof.dense import draw_inputs, reference_results
from ringprof.proof.verify import verify
from ringprof.proof.verify_timed import verify_timed
from ringprof.run import read_run
from ringprof.strategies import create, names
from ringprof.strategies.peers.ring_flash_attn import RingFlashAttnRing
from ringprof.workload.workload import Workload
from tests.strategies.ranks import run_ranks

CPU = torch.device("cpu")
BASE = Workload(seq=64, heads=4, kv_heads=2, head_dim=12, dtype="fp32")
WORKLOADS = {
    "softcap": msgspec.structs.replace(BASE, softcap=0.7),
    "sinks": msgspec.structs.replace(BASE, sinks="learned", window=20),
    "all": msgspec.structs.replace(BASE, sinks="learned", softcap=0.7, v_head_dim=8, documents=(40, 24)),
}


def dense(workload: Workload, sinks: Tensor | None) -> dict[str, Tensor]:
    """Compute attention of the verification's inputs by the plain formula and torch's autograd, in float64."""
    full = draw_inputs(workload, CPU)
    q, k, v = leaves = [x.double().requires_grad_() for x in (full.q, full.k, full.v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * workload.head_dim**-0.5
    if workload.softcap:
        scores = workload.softcap * (scores / workload.softcap).tanh()
    position = torch.arange(workload.seq)
    seen = position <= position[:, None]
    if workload.window:
        seen &= position > position[:, None] - workload.window
    if workload.documents:
        first = workload.documents[0]
        seen &= (position < first) == (position < first)[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sinks = sinks.detach().double().requires_grad_()
        leaves.append(sinks)
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, workload.seq, 1)], -1)
    weights = scores.softmax(-1)[..., : workload.seq]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    gradients = torch.autograd.grad(out, leaves, full.dout.double())
    return dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out.detach(), *gradients), strict=False))


@pytest.mark.parametrize("name", WORKLOADS)
def test_reference_equals_dense_attention_with_score_options(name: str) -> None:
    from ringprof.iteration.shard import drawn_sinks

    workload = WORKLOADS[name]
    truth = dense(workload, drawn_sinks(workload, CPU))
    results = reference_results(draw_inputs(workload, CPU), workload)
    assert set(results) == set(truth)
    for key, exact in truth.items():
        value = results[key].sum((0, 1, 3)) if key == "dsinks" else results[key]
        # The sinks are float32.
        assert float((value - exact).norm()) < 1e-6 * float(exact.norm()), key


def gates(rank: int, damage: str) -> list[str]:
    """Verify every strategy before and after timing; return the errors after the result named ``damage`` is changed."""
    said = []
    for name in names() if not damage else ["zigzag"]:
        for label, workload in WORKLOADS.items():
            strategy = create(name, kernel="flex" if workload.softcap else "cpu-flash")
            before = verify(strategy, workload, CPU)
            shard = WorkloadShard.create(strategy, workload, CPU)
            last = shard.run_for_verification()
            assert (last.dsinks is not None) == (workload.sinks is not None)
            if damage and rank == 1:
                wrong = getattr(last, damage)
                last = last if wrong is None else replace(last, **{damage: wrong * 1.5})
            try:
                timed = verify_timed(shard, row_sums(last.out), last, workload, before).timed
                assert timed is not None and ("dsinks" in timed.errors) == (workload.sinks is not None)
            except VerificationError as error:
                said.append(f"{label}: {error}")
    return said


@pytest.mark.long
def test_both_verifications_pass_every_strategy() -> None:
    assert run_ranks(2, gates, "") == [[]] * 2


@pytest.mark.processes
def test_verification_finds_a_wrong_sink_gradient_on_one_rank() -> None:
    for said in run_ranks(2, gates, "dsinks"):
        assert [line.split(":")[0] for line in said] == ["sinks", "all"]
        assert all("dsinks is off by" in line for line in said)


def test_flops_of_two_head_sizes_by_hand() -> None:
    workload = Workload(batch=2, seq=10, heads=3, kv_heads=3, head_dim=192, v_head_dim=128)
    # A pair: scores 192 and output 128 forward; backward scores, dQ and dK of 192, dP and dV of 128; two FLOPs each.
    assert workload.exact_flops() == 2 * 3 * 55 * 2 * (192 + 128 + 3 * 192 + 2 * 128)
    assert workload.model_flops() == 2 * 3 * 50 * 2 * (192 + 128 + 3 * 192 + 2 * 128)
    forward = msgspec.structs.replace(workload, backward=False)
    assert forward.exact_flops() == 2 * 3 * 55 * 2 * (192 + 128)
    same = msgspec.structs.replace(workload, v_head_dim=None)
    assert same.exact_flops() == 2 * 3 * 55 * 14 * 192


@pytest.mark.processes
def test_run_file_keeps_sinks_and_head_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "run.json")
    sizes = ["--seq", "64", "--heads", "2", "--head-dim", "12", "--v-head-dim", "8", "--sinks", "learned"]
    where = ["--device", "cpu", "--world", "2", "--iters", "1", "--dtype", "fp32", "-o", output]
    assert cli.run(["record", "--strategy", "megatron", *sizes, *where]) == 0
    run = read_run(output)
    assert run.workload is not None and run.verification is not None and run.verification.timed is not None
    assert (run.workload.v_head_dim, run.workload.sinks, run.workload.softcap) == (8, "learned", None)
    assert "dsinks" in run.verification.timed.errors
    # What is computed is of the larger size, what is needed of both.
    assert sum(work.block_flops or 0 for work in run.work or ()) == 14 * 2 * 12 * 64 * 65 // 2
    assert run.workload.exact_flops() == 2 * 2 * (4 * 12 + 3 * 8) * 64 * 65 // 2
    assert cli.run(["report", output, "--width", "200"]) == 0
    assert "2 heads of 12 (v 8) · causal, learned sinks · fp32" in capsys.readouterr().out


def test_workload_description_names_both_head_sizes() -> None:
    workload = Workload(seq=4096, heads=16, kv_heads=4, head_dim=192, v_head_dim=128)
    assert described(workload) == "4096 tokens, 16 heads (4 kv) of 192 (v 128) · causal · bf16 · forward and backward"


def test_unsupported_score_options_are_refused_with_the_reason() -> None:
    peer = RingFlashAttnRing
    assert "takes no softcap" in str(why_unsupported(peer, WORKLOADS["softcap"], 2, {}))
    sinks = msgspec.structs.replace(BASE, sinks="learned")
    assert "gives no LSE, which sinks need" in str(why_unsupported(peer, sinks, 2, {}))


def test_an_untrusted_run_with_larger_heads_of_v_is_refused() -> None:
    with pytest.raises(ValueError, match="at most as large as those of q and k"):
        Workload(seq=8, heads=1, kv_heads=1, head_dim=8, v_head_dim=9)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"seq": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "softcap": -1.0}, Workload)
