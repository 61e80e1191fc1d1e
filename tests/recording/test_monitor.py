"""`ringprof.monitor` around a training loop: when it samples, what it reports and leaves, and what it may cost."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="monitoring needs torch")

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import ringprof
from ringprof.errors import MissingExtraError, UsageError
from ringprof.scale.pipeline import attribute
from ringprof.strategies import create
from ringprof.trace.reduced import reduce_trace
from ringprof.training import monitor
from ringprof.training.api import SampleLog, sample_figures, waited_for
from ringprof.training.steps import interval_for
from tests.analysis.transfers.test_hops import ring
from tests.strategies.ranks import run_ranks


def train(steps: int, monitored: Any = None) -> None:
    """Run steps of an optimizer over a small product; call ``step`` of ``monitored`` after each, if given."""
    weight = torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (torch.randn(64, 64) @ weight).square().mean().backward()
        optimizer.step()
        if monitored is not None:
            monitored.step()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_monitor_counts_optimizer_steps_and_writes_a_line_per_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three steps, one to warm up, one that is profiled; the next sample is delayed, because these steps are tiny."""
    log = tmp_path / "exposed.jsonl"
    with caplog.at_level(logging.INFO, "ringprof.monitor"), ringprof.monitor(log, every=3) as monitored:
        train(8)
    assert monitored.steps == 8
    (line,) = lines(log)
    assert line["step"] == 5 and line["ranks"] == 1 and line["interval"] == 3
    assert line["exposed_comm_share"] == {"mean": 0.0, "worst": 0.0, "rank": 0}
    assert line["wall_ms"] > 0 and line["step_ms"] > 0 and line["straggler"] is None
    assert monitored.interval > 3
    (message,) = caplog.messages
    assert message == f"step 5: 0.0 % exposed communication (rank 0: 0.0 %), {line['step_ms']:,.1f} ms per step"
    assert list(tmp_path.iterdir()) == [log]


def test_explicit_steps_replace_optimizer_steps_and_hooks_are_removed(tmp_path: Path) -> None:
    with ringprof.monitor(tmp_path / "log", every=100) as monitored:
        train(7, monitored)
    # The first step was counted by the optimizer hook; from then on only calls of `step` count.
    assert monitored.steps == 8
    train(3)
    assert monitored.steps == 8


def test_failing_sample_does_not_end_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringprof.training.api.sample_figures", lambda attribution: 1 / 0)
    with ringprof.monitor(tmp_path / "log", every=2) as monitored:
        train(6)
    assert monitored.steps == 6
    assert "the sample failed" in caplog.text


def test_monitor_passes_on_errors_of_the_loop(tmp_path: Path) -> None:
    """The profiler is off after an error in the middle of a sample, too."""
    for steps in (2, 3):
        with pytest.raises(ZeroDivisionError), ringprof.monitor(tmp_path / "log", every=2):
            train(steps)
            raise ZeroDivisionError
    with ringprof.monitor(tmp_path / "log", every=2):
        train(4)
    assert len(lines(tmp_path / "log")) == 1


@pytest.mark.parametrize("own", [{}, {"schedule": schedule(wait=2, warmup=2, active=2)}], ids=["at work", "scheduled"])
def test_monitor_takes_no_sample_beside_another_profiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: dict[str, Any]
) -> None:
    log = tmp_path / "log"
    with ringprof.monitor(log, every=2):
        with profile(activities=[ProfilerActivity.CPU], **own) as recording:
            train(6, recording)
        assert not log.exists() and "has a torch.profiler of its own: no sample" in caplog.text
        assert "aten::mm" in {event.name for event in recording.events()} if own == {} else True
    # The next loop is sampled again.
    with ringprof.monitor(log, every=2):
        train(5)
    assert [line["step"] for line in lines(log)] == [4]


def test_invalid_monitor_arguments_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every must be at least 1, not 0"), ringprof.monitor(every=0):
        raise AssertionError("entered")
    for path in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(UsageError, match="cannot write samples here"), ringprof.monitor(path):
            raise AssertionError("entered")


@pytest.mark.parametrize(("cost_ns", "step_ns", "every", "interval"), [
    (10**8, 10**9, 200, 200), (4 * 10**9, 10**9, 200, 400), (10**6, 10**6, 3, 100),
])  # fmt: skip
def test_samples_take_at_most_1_percent_of_the_time(cost_ns: int, step_ns: int, every: int, interval: int) -> None:
    assert interval_for(cost_ns, step_ns, every) == interval
    assert cost_ns <= 0.01 * interval * step_ns * (1 + 1e-9)


def attend(rank: int, log: Path) -> int:
    strategy = create("zigzag")
    with ringprof.monitor(log, every=2) as monitored:
        for _ in range(4):
            x = strategy.shard(torch.randn(1, 128, 4, 16)).requires_grad_()
            strategy.attention(x, x, x).sum().backward()
            monitored.step()
    return monitored.interval


@pytest.mark.processes
def test_ranks_sample_together_and_rank_0_reports(tmp_path: Path) -> None:
    intervals = run_ranks(2, attend, tmp_path / "log")
    (line,) = lines(tmp_path / "log")
    assert line["step"] == 4 and line["ranks"] == 2
    assert 0 < line["exposed_comm_share"]["mean"] < 1
    assert len(set(intervals)) == 1


def test_the_next_sample_waits_for_the_largest_interval_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two needs an interval of 10 steps, rank 1 one of 400."""
    monkeypatch.setattr(monitor, "gather_tensor", lambda interval, group: [torch.tensor([10]), torch.tensor([400])])
    ranks: Any = SimpleNamespace(size=2, rank=0, device=torch.device("cpu"), group=None)
    monitored = monitor.Monitor(10, ranks, lambda path: b"", lambda *sample: None)
    monitored.step()
    monitored._schedule_next(0)
    monitored.close()
    assert monitored.interval == 400


def test_monitor_attributes_waiting_to_the_late_rank() -> None:
    """Rank 3 is 500 ns late: ranks 0 and 2 wait for it."""
    builders = ring([1000, 1000, 1000, 1500], [2500, 2000, 2500, 2500], tensors=1)
    attribution = attribute([builder.trace() for builder in builders])
    assert waited_for(attribution) == {3: 1000}
    figures = sample_figures(attribution)
    assert figures["waited_for"] == {"3": 0.001} and figures["straggler"] == 3
    assert (figures["wait_ms"], figures["wire_ms"]) == pytest.approx((1000 / 4 / 1e6, 4000 / 4 / 1e6))


def test_consecutive_samples_with_the_same_straggler_are_counted(tmp_path: Path) -> None:
    looks = SampleLog(tmp_path / "log")
    for number, late in enumerate((3, 3, 1)):
        starts = [1500 if rank == late else 1000 for rank in range(4)]
        traces = [reduce_trace(builder.trace()) for builder in ring(starts, [2500] * 4, tensors=1)]
        looks.add(number, traces, {"step_ms": 1.0, "interval": 2})
    assert [(line["straggler"], line["looks"]) for line in lines(tmp_path / "log")] == [(3, 1), (3, 2), (1, 1)]


def test_missing_tensorboard_error_shows_how_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="pip install tensorboard"), ringprof.monitor(tensorboard=tmp_path):
        pass
