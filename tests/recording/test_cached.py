"""Prefill and decode through the recorder: verification before and after timing, the run's figures, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch

from ringprof.errors import VerificationError
from ringprof.iteration.shard import WorkloadShard, row_sums
from ringprof.proof.verify import verify
from ringprof.proof.verify_timed import verify_timed
from ringprof.strategies import create
from ringprof.strategies.algorithms.dcp import DecodeContextParallel
from ringprof.strategies.base import Context
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.workload import Workload
from tests.recording.command import report_of, run
from tests.strategies.cases import Case
from tests.strategies.ranks import run_ranks
from tests.strategies.test_cached import DECODE, GROUPS, PREFILL

CPU = torch.device("cpu")
BASE = Workload(
    batch=3, seq=2, heads=8, kv_heads=4, head_dim=8, dtype="bf16", backward=False, phase="decode", kv_length=2001
)
CHUNK = msgspec.structs.replace(BASE, phase="prefill", seq=64, kv_length=2112)
MASKED = {"window": 300, "prefix": 5, "sinks": "learned", "head_dim": 48, "v_head_dim": 32}


def gates(rank: int, cases: list[Case], workload: Workload) -> list[str]:
    verified = []
    for case in cases:
        strategy = create(case.name, kernel="cpu-flash", **case.params)
        before = verify(strategy, workload, CPU)
        shard = WorkloadShard.create(strategy, workload, CPU)
        last = shard.run_iteration()
        after = verify_timed(shard, row_sums(last.out), last, workload, before)
        assert after.timed is not None and after.timed.same_output
        assert before.seq < after.timed.seq == workload.kv_length
        # bf16: a result that was not computed would be off by 1.
        assert 0 < after.timed.errors["out"].rms < 0.02
        last.out[:, :, 0] += 0.5
        with pytest.raises(VerificationError, match="wrong result on rank"):
            verify_timed(shard, row_sums(last.out), last, workload, before)
        verified.append(str(case))
    return verified


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "cases", "workload"),
    [
        (2, DECODE, BASE),
        (4, GROUPS, BASE),
        (2, PREFILL, CHUNK),
        (4, DECODE + GROUPS, msgspec.structs.replace(BASE, **MASKED)),
        (2, PREFILL, msgspec.structs.replace(CHUNK, **MASKED)),
    ],
)
def test_both_verifications_refuse_one_wrong_head(world, cases, workload) -> None:
    assert len(run_ranks(world, gates, cases, msgspec.structs.replace(workload, batch=1))[0]) == len(cases)


class Forgets(DecodeContextParallel):
    """Strategy that leaves out the last keys if a rank holds more than in the verification before timing."""

    def compute(self, blocks, mask, q, k, v, kv_length):
        return super().compute(blocks, mask, q, k[:, :200], v[:, :200], min(kv_length, 400))


def forgetful(rank: int) -> str:
    strategy = Forgets(Context(Communicator(), "cpu-flash"))
    before = verify(strategy, BASE, CPU)
    shard = WorkloadShard.create(strategy, BASE, CPU)
    last = shard.run_iteration()
    with pytest.raises(VerificationError) as refused:
        verify_timed(shard, row_sums(last.out), last, BASE, before)
    return str(refused.value)


@pytest.mark.processes
def test_skipped_keys_of_a_long_cache_are_detected() -> None:
    assert "in the last timed iteration, with 2 new tokens over 2001 keys" in run_ranks(2, forgetful)[0]


SMALL = ["--heads", "8", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--world", "2", "--batch", "4"]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    command = ["record", "--strategy", "dcp", "--phase", "decode", "--kv-length", "4097", *SMALL]
    process = run(command, folder)
    assert process.returncode == 0, process.stderr
    assert "decode of 1 new token per sequence over 4097 keys, batch 4" in process.stderr
    return folder


@pytest.mark.processes
def test_a_decode_run_counts_its_work_by_the_formulas(decoded: Path) -> None:
    run_data = json.loads((decoded / "traces/run.json").read_text())
    assert run_data["name"].endswith("-dcp-4097")
    assert run_data["kernel"] == "cpu-flash"
    assert {key: run_data["workload"][key] for key in ("phase", "kv_length", "seq", "backward")} == {
        "phase": "decode", "kv_length": 4097, "seq": 1, "backward": False,
    }  # fmt: skip
    # 4 FLOPs of 4 sequences, 8 heads of 16, over 2049 keys on rank 0 and 2048 on rank 1.
    assert [rank["block_flops"] for rank in run_data["work"]] == [4 * 4 * 8 * 16 * 2049, 4 * 4 * 8 * 16 * 2048]
    # bf16: queries and outputs of 4 heads of 16 of 4 sequences, 512 bytes each; LSEs of 8 heads in float32, 128.
    sent = {(entry["channel"], entry["operation"]): entry["sent_bytes"] for entry in run_data["work"][0]["sent"]}
    assert sent == {("q", "all_gather"): 512, ("out", "all_gather"): 128, ("out", "reduce_scatter"): 512}
    assert run_data["verification"]["timed"]["seq"] == 4097


@pytest.mark.processes
def test_decode_report_has_time_per_token_and_its_bound(decoded: Path) -> None:
    shown = report_of(decoded)
    assert "decode: 1 new of 4097 tokens, 8 heads (2 kv) of 16, batch 4" in " ".join(shown.split())
    data = json.loads(report_of(decoded, "--format", "json"))["summary"]["inference"]
    assert data["new_tokens"] == 4
    # 2 · 4 sequences · 4097 keys · 2 heads · 16 numbers of 2 bytes, shared by 2 ranks.
    assert data["cache_bytes"] == 2 * 4 * 4097 * 2 * 16 * 2 // 2
    assert data["sent_bytes_per_token"] == 2 * (512 + 128 + 512) / 4
    assert data["tokens_per_second"] == pytest.approx(4 / data["step_ns"] * 1e9)
    assert sum(data["shares"].values()) == pytest.approx(1)
    assert data["bound_by"] == max(data["shares"], key=data["shares"].get)
    assert f"bound by {'reading the cache' if data['bound_by'] == 'cache' else ''}" in shown
    report_of(decoded, "--fail-if", "tokens_per_second < 1", "--fail-if", "read_gbps < 0.000001")


@pytest.mark.processes
def test_flops_of_a_window_over_a_cache_count_visible_keys(tmp_path: Path) -> None:
    command = ["record", "--strategy", "dcp", "--phase", "decode", "--kv-length", "4097", *SMALL, "--dtype", "fp32"]
    masks = ["--window-size", "100", "--prefix", "9", "--softcap", "5", "--kernel", "flex", "--sinks", "learned"]
    process = run([*command, *masks], tmp_path)
    assert process.returncode == 0, process.stderr
    run_data = json.loads((tmp_path / "traces/run.json").read_text())
    # Keys 0 to 8 and 3997 to 4096: 5 and 50 are even. 4 FLOPs of 4 sequences and 8 heads of 16.
    assert [rank["block_flops"] for rank in run_data["work"]] == [4 * 4 * 8 * 16 * 55, 4 * 4 * 8 * 16 * 54]
    assert (
        json.loads(report_of(tmp_path, "--format", "json"))["summary"]["inference"]["cache_bytes"]
        == 2 * 4 * 109 * 2 * 16 * 4 // 2
    )
    assert "causal, window of 100, prefix of 9, softcap 5, learned sinks" in process.stderr


@pytest.mark.processes
def test_a_decode_run_is_not_compared_with_training_and_not_predicted(decoded: Path) -> None:
    process = run(["predict", "--replay", "traces/run.json"], decoded)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


@pytest.mark.processes
def test_page_shows_prefill_and_decode(decoded: Path) -> None:
    report_of(decoded, "--html", str(decoded / "page.html"))
    assert "Prefill and decode" in (decoded / "page.html").read_text()
