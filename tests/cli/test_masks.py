"""Packed documents and windows on the command line: recording, the report of it, `advise` and `kernels`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof import cli
from ringprof.run import read_run

CPU = ["--heads", "4", "--head-dim", "8", "--device", "cpu", "--world", "2", "--iters", "2", "--dtype", "fp32"]


@pytest.mark.processes
def test_record_packed_documents_with_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300 100 100 100 500")
    options = ["--seq", "1024", "--documents", str(lengths), "--window-size", "64"]
    # The file has 1100 tokens: 424 tokens of its last document fit.
    output = str(tmp_path / "run.json")
    assert cli.run(["record", "--strategy", "ring", *options, *CPU, "-o", output, "--controls"]) == 0
    run = read_run(output)
    assert run.workload is not None and run.work is not None and run.verification is not None
    assert run.workload.documents == (300, 100, 100, 100, 424) and run.workload.window == 64
    windows = [64 * 65 // 2 + (length - 64) * 64 for length in run.workload.documents]
    # Four FLOPs forward and ten backward per pair, head and dimension.
    assert sum(work.block_flops or 0 for work in run.work) == 14 * 4 * 8 * sum(windows)
    assert run.verification.timed is not None and run.verification.timed.seq == 1024
    assert run.controls is not None and sum(run.controls.solo_flops) == sum(work.block_flops or 0 for work in run.work)
    assert cli.run(["report", output, "--width", "200"]) == 0
    shown = capsys.readouterr().out
    assert "causal, 5 documents of 100 to 424 tokens, window of 64" in shown
    assert "attention work over the ranks: 1.0" in shown and "on rank 0; layout: contiguous" in shown


@pytest.mark.processes
def test_record_names_the_layout_that_auto_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has half of the long document, and two of the four short ones: the same work, to a pair."""
    output = str(tmp_path / "run.json")
    options = ["--seq", "2048", "--documents", "256x4,1024"]
    assert cli.run(["record", "--strategy", "zigzag", *options, *CPU, "-o", output]) == 0
    run = read_run(output)
    assert run.strategy is not None and run.work is not None
    assert (run.strategy.params["documents_layout"], run.strategy.layout) == (
        "auto", "dealt documents, the longest cut in zigzag"
    )  # fmt: skip
    assert {work.block_flops for work in run.work} == {14 * 4 * 8 * (256 * 257 + 1024 * 1025 // 4)}
    assert cli.run(["report", output, "--width", "200"]) == 0
    assert "; layout: dealt documents, the longest cut in zigzag" in capsys.readouterr().out


@pytest.mark.processes
def test_a_prefix_lm_is_recorded_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "run.json")
    options = ["--seq", "256", "--documents", "200,56", "--prefix", "72", "--no-causal"]
    assert cli.run(["record", "--strategy", "zigzag", *options, *CPU, "-o", output]) == 0
    run = read_run(output)
    assert run.workload is not None and run.work is not None and run.verification is not None
    # Causal; in addition, the first 72 tokens (or the whole shorter document) attend to all of each other.
    pairs = 200 * 201 // 2 + 72 * 71 // 2 + 56 * 56
    assert sum(work.block_flops or 0 for work in run.work) == 14 * 4 * 8 * pairs == run.workload.model_flops()
    assert run.verification.timed is not None
    assert cli.run(["report", output, "--width", "200"]) == 0
    assert "prefix LM, 2 documents of 56 to 200 tokens, prefix of 72" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--documents", "500,500"], "1000 tokens together, the sequence has 1024"),
        (["--documents", "lognormal:mean=none"], "as in lognormal:mean=8192"),
        (["--softcap", "nan"], "'nan' is not a finite number"),
        (["--window-size", "0"], "--window-size must be at least 1"),
        (["--window-size", "8", "--prefix", "0"], "--prefix must be at least 1"),
        (["--prefix", "8"], "--prefix 8 needs --window-size or, for a prefix LM, --no-causal"),
        (["--prefix", "8", "--no-causal", "--cp-sizes", "2,1"], "--prefix does not go with --cp-sizes"),
        (["--documents", "512x2", "--strategy", "torch-cp"], "those that do are ring, zigzag, stripe"),
        (["--window-size", "64", "-p", "documents_layout=per_documents"], "is not auto|packed|per_document|dealt"),
    ],
)
def test_contradictory_mask_options_are_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    output = ["-o", str(tmp_path / "run.json")]
    code = cli.run(["record", "--strategy", "zigzag", "--seq", "1024", *CPU, *output, *options])
    err = capsys.readouterr().err
    assert code == 2 and message in err and "Traceback" not in err


def test_balance_ranks_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "--seq", "64", "--documents", "40,24", "--gpus-per-node", "4"]
    assert cli.run([*command, "--format", "json"]) == 0
    rows = {
        (row["strategy"], row["params"].get("documents_layout")): row
        for row in json.loads(capsys.readouterr().out)["rows"]
    }
    area = 40 * 41 // 2 + 24 * 25 // 2
    # Contiguous pieces of 16: the third rank has 8 rows of the first document, 33 to 40 keys each, and 8 of the second.
    assert rows["ring", None]["busiest"] == pytest.approx((16 * 16 + 136) * 4 / area)
    assert rows["ulysses", None]["busiest"] == 1.0
    assert rows["zigzag", "per_document"]["busiest"] == pytest.approx(1.0, abs=0.03)
    assert cli.run(command) == 0
    assert "64 tokens on 4 ranks, causal, 2 documents of 24 to 40 tokens" in capsys.readouterr().out


def test_kernels_are_listed_installed_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    from ringprof.strategies.kernels.registry import KERNELS

    assert cli.run(["kernels", "--format", "json"]) == 0
    rows = {row["kernel"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == list(KERNELS)
    assert rows["cpu-flash"]["here"].startswith("yes") and rows["cpu-flash"]["windows"] == "yes"
    assert all(row["tried"] == "yes" for row in rows.values())
    assert (rows["cudnn"]["head_dim"], rows["cudnn"]["windows"]) == ("up to 128 in steps of 8", "no")
    assert (rows["flash-attn"]["documents"], rows["flash-attn"]["types"]) == ("in one call", "bf16 and fp16")
    assert rows["reference"]["delta"] == "yes"


def test_kernels_measure_names_the_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringprof.prediction.measured_rates.WARM_UP", 0)
    monkeypatch.setattr("ringprof.prediction.measured_rates.CALLS", 2)
    command = ["calibrate", "--rates", "--device", "cpu", "--seq", "64", "--heads", "2", "--head-dim", "8"]
    assert cli.run([*command, "--dtype", "fp32", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rates = {(row["kernel"], row["mask"]): row for row in document["rates"]}
    assert document["device_type"] == "cpu" and document["workload"]["seq"] == 64
    assert {mask for _, mask in rates} == {"full", "causal", "documents", "window", "softcap"}
    # Four FLOPs forward per pair and dimension of a head; a window of 8 has 8 · 9 / 2 + 56 · 8 pairs.
    window = rates["cpu-flash", "window"]
    assert window["forward_tflops"] == pytest.approx(4 * 2 * 8 * (36 + 448) / window["forward_ns"] / 1e3)
    full = rates["cpu-flash", "full"]
    assert full["backward_tflops"] == pytest.approx(10 * 2 * 8 * 64 * 64 / full["backward_ns"] / 1e3)
    assert rates["cpu-flash", "softcap"]["reason"] == "takes no softcap"
    assert rates["cudnn", "full"]["reason"] == "needs a CUDA device with cuDNN"
