"""Prefill and decode: the dry runs and the predicted times of the committed runs, to which nothing was fitted."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch", reason="a dry run needs it")

from ringprof import cli
from ringprof.dryrun.schedule import AttentionOp
from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.fit import calibrate_from, observed_run, schedule_of_run
from ringprof.prediction.machine import curves_of
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.run import Run, read_run
from ringprof.workload.workload import Workload
from tests.paths import ROOT

DECODE, WINDOW, PREFILL = "h200x2-decode-1048576", "h200x2-decode-1048576-window", "h200x2-ring-prefill-262144"


def recorded(name: str) -> Run:
    return read_run(ROOT / "traces" / name / "run.json")


@pytest.mark.parametrize("name", [DECODE, WINDOW, PREFILL])
def test_the_dry_run_is_what_the_recorded_run_did(name: str) -> None:
    run = recorded(name)
    assert run.work is not None and run.peak_memory_bytes is not None
    for work, peak, program in zip(run.work, run.peak_memory_bytes, schedule_of_run(run).programs, strict=True):
        assert work == program.work
        # torch keeps 32 MiB beside.
        assert program.peak_bytes == pytest.approx((peak or 0) - (32 << 20), rel=0.01)


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "inside"),
    [(DECODE, -0.02, 0.0, True), (PREFILL, -0.07, -0.06, True), (WINDOW, -0.29, -0.27, False)],
)
def test_errors_on_the_committed_runs(name: str, lowest: float, highest: float, inside: bool) -> None:
    run = recorded(name)
    prediction = predict(Query.of_run(run), read_calibration("h200"), schedule_of)
    assert run.timings is not None
    measured_ns = run.timings.median_ns() or 0.0
    assert lowest < prediction.median_ns / measured_ns - 1 < highest
    low, _, high = prediction.interval_ns
    assert (low <= measured_ns <= high) is inside


def test_a_decode_call_takes_the_time_to_read_its_keys_and_values() -> None:
    machine = read_calibration("h200")
    block = AttentionOp(
        label="", phase="forward", batch=8, q=4, kv=1 << 19, heads=8, kv_heads=8, head_dim=128, causal=False
    )
    read_ns = 2 * 2 * 8 * (1 << 19) * 8 * 128 / 4562
    for rows in (1, 4, 32):
        estimate = curves_of(machine, "flash-attn").estimate(msgspec.structs.replace(block, q=rows))
        assert estimate.ns == pytest.approx(read_ns + 4000)


def test_a_longer_cache_and_more_sequences_take_proportionally_longer() -> None:
    def ms(**sizes: int) -> float:
        workload = Workload(
            **{"batch": 8, "seq": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "kv_length": 1 << 20, **sizes},  # type: ignore[arg-type]
            phase="decode", backward=False,
        )  # fmt: skip
        return predict(Query("dcp", workload, Cluster(1, 2)), read_calibration("h200"), schedule_of).interval_ms[1]

    assert ms(batch=16) == pytest.approx(2 * ms(), rel=0.06)
    assert ms(kv_length=1 << 21) == pytest.approx(2 * ms(), rel=0.06)


@pytest.mark.parametrize(
    ("strategy", "phase", "machine", "message"),
    [
        ("zigzag", "decode", "h200", "strategy 'zigzag' is for training, not decode"),
        ("dcp", "prefill", "h200", "strategy 'dcp' is for decode, not prefill"),
        ("dcp", "decode", "b200", "machine 'b200' has no rate at which a kernel reads a cache of keys"),
    ],
)
def test_what_cannot_be_predicted_is_refused(strategy: str, phase: str, machine: str, message: str) -> None:
    workload = Workload(
        seq=8 if phase == "prefill" else 1, heads=32, kv_heads=8, head_dim=128, kv_length=65536, backward=False,
        phase=phase,  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UnsupportedWorkloadError, match=message):
        predict(Query(strategy, workload, Cluster(1, 2)), read_calibration(machine), schedule_of)


def test_the_command_predicts_decode_and_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--heads", "32", "--kv-heads", "8", "--gpus-per-node", "2", "--machine", "h200"]
    decode = ["predict", "--strategy", "dcp", "--phase", "decode", "--kv-length", "1m", "--batch", "8"]
    assert cli.run([*decode, *sizes]) == 0
    text = capsys.readouterr().out
    assert "cache_gb_s" in text and "kernel_samples" not in text
    assert "decode of 1 token over 1048576 keys, batch 8" in text
    prefill = ["predict", "--strategy", "ring-prefill", "--phase", "prefill", "--seq", "32k", "--kv-length", "256k"]
    assert cli.run([*prefill, *sizes]) == 0
    text = capsys.readouterr().out
    assert "forward_kernel_samples" in text and "prefill of 32768 tokens over 262144 keys" in text


def test_a_run_of_decode_calibrates_the_rate_and_nothing_else() -> None:
    machine = read_calibration("h200")
    path = str(ROOT / "traces" / DECODE)
    fitted = calibrate_from([observed_run(path, machine)], machine)
    rate = fitted.kernel("flash-attn").cache_gb_s
    # The rate that `ringprof report` shows of this run.
    assert rate is not None and rate.value == pytest.approx(4643, rel=0.002) and rate.origin == "measured"
    assert fitted.kernel("flash-attn").samples == machine.kernel("flash-attn").samples


def test_a_run_of_prefill_keeps_the_backward_samples() -> None:
    machine = read_calibration("h200")
    fitted = calibrate_from([observed_run(str(ROOT / "traces" / PREFILL), machine)], machine).kernel("cudnn")
    backward = [sample for sample in machine.kernel("cudnn").samples if sample.phase == "backward"]
    assert [sample for sample in fitted.samples if sample.phase == "backward"] == backward
    assert {sample.kv for sample in fitted.samples if sample.phase == "forward"} >= {114688, 122880}
