"""Text fits the terminal, or 100 columns in a pipe, and nothing is omitted."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="strategies need it")

from ringprof import cli
from ringprof.proof.result import Check, QueryAndKey, Seen, SentInCall, TensorCheck
from ringprof.workload.workload import Workload
from tests.paths import DATA

PREDICT = ("predict", "--strategy", "burst", "--seq", "1m", "--heads", "64", "--kv-heads", "8", "--nodes", "2",
           "--machine", "h100", "--nic", "400")  # fmt: skip
FURTHEST = QueryAndKey(query=1_048_575, key=1_000_000, rank=127)
ERRORS = {
    name: TensorCheck(
        rms=0.0123, max_abs=1.0, allowed_rms=0.001, kernel_rms=0.0005, rank=127, wrong_tokens=1_048_576,
        first_token=1_000_000, first_rank=127,
    )
    for name in ("out", "dq")
}  # fmt: skip
CHECK = Check(
    equal=False, workload=Workload(seq=1 << 20, heads=64, kv_heads=8, head_dim=128), ranks=128, layout="contiguous",
    device="cuda", calls=3, call=2, errors=ERRORS, reasons=["another scale: " + "softmax_scale " * 10],
    sent=[SentInCall(operations={"all_to_all_single": 64, "batch_isend_irecv": 128}, size_bytes=1 << 32)] * 128,
    seen=Seen(pairs=100, of=200, leaks=3, first_leak=FURTHEST, missing=2, first_missing=FURTHEST),
)  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [PREDICT, ("strategies",), ("strategies", "zigzag"), ("report", str(DATA / "tables" / "first-rows.txt")),
     ("check", "json:thing", "--layout", "contiguous")],
    ids=lambda command: " ".join(command[:2]),
)  # fmt: skip
def test_lines_fit_the_width_without_losing_text(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringprof.cli.check.run_check", lambda _: CHECK)
    monkeypatch.delenv("COLUMNS", raising=False)
    cli.run([*command])
    in_pipe = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    cli.run([*command])
    narrow = capsys.readouterr().out
    assert 80 < max(map(len, in_pipe.splitlines())) <= 100
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == in_pipe.split()
