"""Kept and scaled tapes against those that are made anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a tape runs a strategy on shapes")

from msgspec.structs import replace as changed

from ringprof.foresee import tapes
from ringprof.foresee.links import Cluster
from ringprof.foresee.question import Question
from ringprof.foresee.tape import tape, tape_of
from ringprof.record.tape.program import Tape
from ringprof.run import Workload

HERE = Cluster(2, 2, nic_gbit=400.0)
PROBLEM = Workload(seq=4096, heads=8, kv_heads=4, head_dim=128)


@pytest.mark.parametrize(
    ("strategy", "causal"),
    [("zigzag", True), ("ring", True), ("ring", False), ("burst", True), ("ulysses", True), ("stripe", True),
     ("megatron", True), ("allgather", False)],
)  # fmt: skip
def test_another_length_is_as_if_made_anew(strategy: str, causal: bool) -> None:
    """Where ranks between do otherwise than the ends, as in stripe, whose blocks lack a row, all are run."""
    kept = tapes.Tapes()
    asked = Question(strategy, changed(PROBLEM, causal=causal), HERE, "cudnn")
    assert kept.of(asked, HERE, None) is kept.of(asked, HERE, None)
    for seq in (2048, 16384):
        other = replace(asked, workload=changed(asked.workload, seq=seq))
        found, anew = kept.of(other, HERE, None), tape_of(other, HERE, None)
        assert found.workload.seq == seq and [one.ops for one in found.programs] == [one.ops for one in anew.programs]
        for one, truth in zip(found.programs, anew.programs, strict=True):
            assert one.peak_bytes == pytest.approx(truth.peak_bytes, rel=2e-3)


def test_of_another_length_only_the_ends_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(*given: Any, ranks: Any, **more: Any) -> Tape:
        made.append(ranks)
        return tape(*given, ranks=ranks, **more)

    monkeypatch.setattr(tapes, "tape", counted)
    kept, asked = tapes.Tapes(), Question("zigzag", PROBLEM, HERE, "cudnn")
    for seq in (4096, 8192):
        kept.of(replace(asked, workload=changed(PROBLEM, seq=seq)), HERE, None)
    assert made == [None, [0, 3]]
