"""Recordings that cannot be: refused in one line before anything starts, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof import cli

TWO = ["--device", "cpu", "--world", "2"]
DYNAMIC = ["--strategy", "zigzag", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seq", "512"]
SCORES = ["--strategy", "zigzag", "--seq", "64", "--heads", "2", "--head-dim", "8", "--dtype", "fp32"]
CACHE = ["--heads", "8", "--kv-heads", "2", "--head-dim", "16", "--batch", "4"]
RECURRENCE = ["--operator", "gdn", "--strategy", "state-scan", "--seq", "64"]
GRAPH = ["--strategy", "zigzag", "--cuda-graph", "--seq", "2048", "--heads", "2", "--head-dim", "64"]

CASES = {
    "steps of dynamic CP": (DYNAMIC, [
        (["--cp-sizes", "3"], "groups of 3 ranks do not divide 2"),
        (["--cp-sizes", "2,1", "--controls"], "--controls does not go with --cp-sizes"),
        (["--cp-sizes", "2,1", "--window-size", "8"], "--window-size does not go with --cp-sizes"),
        (["--cp-sizes", "2,x"], "--cp-sizes"),
        (["--cp-sizes", "1", "--seq", "511"], "511 tokens are not 2 even sequences"),
    ]),
    "a pattern of layers": (["--layer", "ddp", "--seq", "64"], [
        (["--strategy", "zigzag", "--pattern", "gdn,attention"], "strategies with the contiguous layout are"),
        (["--strategy", "ring", "--pattern", "gdn,gdn"], "needs a layer of attention"),
        (["--strategy", "ring", "--pattern", "gdnn,attention"], "gdn"),
        (["--strategy", "ring", "--recurrent-strategy", "state-a2a"], "goes with a --pattern"),
        (["--strategy", "ring", "--pattern", "gdn,attention", "--no-causal"], "in their order"),
        (["--strategy", "ring", "--pattern", "gdn,attention", "--recurrent-strategy", "state-a2a", "--heads", "3",
          "--kv-heads", "1"], "do not divide"),
    ]),
    "scores and heads": (SCORES, [
        (["--v-head-dim", "16"], "--v-head-dim 16: heads of v are at most as large as those of q and k, 8"),
        (["--softcap", "0"], "--softcap"),
        (["--softcap", "5", "--kernel", "cpu-flash"], "takes no softcap (those here that do: flex, reference)"),
        (["--sinks", "fixed"], "learned"),
        (["--sinks", "learned", "--layer", "ddp"], "--sinks does not go with --layer"),
        (["--documents", "32,32", "--phase", "decode", "--kv-length", "64"], "--documents does not go with --phase"),
    ]),
    "a cache": (CACHE, [
        (["--strategy", "zigzag", "--phase", "decode", "--kv-length", "64"], "for --phase decode there are: dcp"),
        (["--strategy", "dcp", "--seq", "64"], "is for decode; for --phase training there are: ring, zigzag"),
        (["--strategy", "dcp", "--phase", "decode"], "--phase decode needs --kv-length"),
        (["--strategy", "ring", "--seq", "64", "--kv-length", "64"], "--kv-length goes with --phase"),
        (["--strategy", "dcp", "--phase", "decode", "--seq", "65", "--kv-length", "64"], "at least 65"),
        (["--strategy", "ring-prefill", "--phase", "prefill", "--kv-length", "64"], "Missing option '--seq'"),
        (["--strategy", "dcp", "--phase", "decode", "--kv-length", "64", "--controls"], "--controls does not go with"),
        (["--strategy", "dcp", "--phase", "decode", "--kv-length", "64", "--documents", "64"], "not go with --phase"),
        (["--strategy", "dcp", "--phase", "decode", "--kv-length", "8g"], "is not a number of tokens"),
        (["--strategy", "dcp", "--phase", "decode", "--kv-length", "4096m"], "--kv-length"),
        (["--strategy", "ring", "--seq", "64", "--layers", "2"], "--layers goes with --layer"),
        (["--strategy", "ring", "--seq", "64", "--layer", "ddp", "--mlp-size", "0"], "--mlp-size must be at least 1"),
        (["--strategy", "ring", "--seq", "64", "--layer", "ddp", "--softcap", "5"], "--softcap does not go with"),
        (["--strategy", "dcp", "--phase", "decode", "--kv-length", "64", "--prefix", "4"], "needs --window-size"),
        (["--strategy", "ring", "--seq", "64", "--layer", "ddp", "--controls"], "--controls does not go with --layer"),
    ]),
    "a recurrence": (RECURRENCE, [
        (["--softcap", "30"], "--softcap does not go with --operator gdn"),
        (["--sinks", "learned"], "--sinks does not go with --operator gdn"),
        (["--window-size", "16"], "--window-size does not go with --operator gdn"),
        (["--no-causal"], "--no-causal: --operator gdn reads the tokens in their order"),
        (["--phase", "prefill", "--kv-length", "128"], "--kv-length does not go with --operator gdn"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads 3 does not divide the 4 heads"),
        (["--hops", "copy"], "--hops copy does not go with --operator gdn"),
        (["--cp-sizes", "2,1"], "--cp-sizes does not go with --operator gdn"),
        (["-p", "documents_layout=packed"], "--param does not go with --operator gdn"),
        (["--kernel", "flex"], "no kernel 'flex' for recurrences; there are: auto, fla, reference"),
        (["--kernel", "fla"], "kernel fla: needs tensors on a GPU"),
        (["--strategy", "zigzag"], "'zigzag' is for attention; for --operator gdn there are: state-ring"),
        (["--seq", "65"], "2 ranks do not divide a sequence of 65 tokens (try 64)"),
        (["--strategy", "state-a2a", "--heads", "3"], "2 ranks do not divide 3 heads"),
        (["--seq", "4", "--conv-width", "8"], "2 tokens per rank are fewer than the 7 that a rank sends on"),
        (["--operator", "attention"], "strategy 'state-scan' is for recurrences: ringprof record --operator gdn"),
        (["--operator", "attention", "--conv-width", "4"], "--conv-width 4 goes with a recurrence"),
        (["--operator", "gnd"], "'gnd' is not one of attention, gdn"),
    ]),
    "a CUDA graph": (GRAPH, [
        ([], "--cuda-graph needs GPUs"),
        (["--operator", "gdn", "--strategy", "state-scan"], "--cuda-graph needs GPUs"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"), [([*base, *more], reason) for base, cases in CASES.values() for more, reason in cases]
)
def test_impossible_recording_is_refused_in_one_line(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.run(["record", *TWO, *options]) == 2
    errors = capsys.readouterr().err
    # Where a size is refused, the plan of two lines stands before it.
    assert reason in errors.splitlines()[-1] and len(errors.splitlines()) in (1, 3), errors
    assert not list(tmp_path.iterdir())
