"""``ringprof kernels --prove``: verdicts on the installed kernels, in the table and in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringprof import cli
from ringprof.cli import kernels
from ringprof.strategies.kernels import proof
from ringprof.strategies.kernels.torch_kernels import CpuFlashKernel


def test_verdicts_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(proof, "_files_read", set())
    monkeypatch.setattr(kernels, "_PROVEN_SIZES", (64, 72))
    monkeypatch.setattr("ringprof.strategies.kernels.flex.FlexKernel.missing", classmethod(lambda *_: "is left out"))
    right = CpuFlashKernel._forward

    def wrong_for_72(self: Any, q: torch.Tensor, *args: Any) -> Any:
        out, lse = right(self, q, *args)
        return (out.roll(1, 1) if q.shape[-1] == 72 else out), lse

    monkeypatch.setattr(CpuFlashKernel, "_forward", wrong_for_72)
    assert cli.run(["kernels", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["proofs"] == [] for row in rows)
    assert cli.run(["kernels", "--prove", "-o", str(tmp_path / "table")]) == 0
    table = (tmp_path / "table").read_text()
    # Two sizes, two types, four kinds of blocks: kv heads are repeated and documents computed one by one.
    assert "8 right, 8 wrong" in table and table.count("heads of 72 wrongly: out is off by") == 8
    assert cli.run(["kernels", "--format", "json"]) == 0
    (proofs,) = (row["proofs"] for row in json.loads(capsys.readouterr().out)["rows"] if row["proofs"])
    assert {(x["device"], x["error"] is None, "heads of 64" in x["case"]) for x in proofs} == {
        ("cpu", True, True), ("cpu", False, False),
    }  # fmt: skip
