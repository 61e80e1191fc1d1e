"""Lightning's callbacks around monitor and prove. The example's losses are compared in tests/test_examples.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from ringprof.integrations.lightning import LIGHTNING, MonitorCallback, ProveCallback
from ringprof.strategies import Unsupported, create
from ringprof.training.monitor import Monitor
from tests.strategies.ranks import run_ranks

# Lightning itself uses what torch and Python call deprecated.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


class Linear(LIGHTNING.LightningModule):  # type: ignore[misc]
    """A linear layer, whose training fails at a given batch."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.layer, self.fails_at = torch.nn.Linear(8, 8), fails_at

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise ZeroDivisionError
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Logger(LIGHTNING.loggers.CSVLogger):  # type: ignore[misc]
    """A logger that keeps what it gets."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step or 0))


def fit(module: Any, callback: Any, folder: Path, **options: Any) -> Logger:
    logger = Logger(folder)
    LIGHTNING.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    ).fit(module, torch.ones(8, 1, 8))  # fmt: skip
    return logger


def test_samples_go_to_the_log_the_loggers_and_the_sinks(tmp_path: Path) -> None:
    seen: list[int] = []
    callback = MonitorCallback(tmp_path / "log", every=2, sinks=[lambda figures, step: seen.append(step)])
    logger = fit(Linear(), callback, tmp_path, accumulate_grad_batches=2)
    (line,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert isinstance(callback.running, Monitor) and callback.running.steps == 4
    assert line["step"] == 4 and seen == [4]
    ((figures, step),) = [row for row in logger.rows if "ringprof/step_ms" in row[0]]
    assert step == 4 and figures["ringprof/step_ms"] == line["step_ms"]
    assert figures["ringprof/exposed_comm_share"] == 0.0


def test_an_error_in_training_ends_the_monitor(tmp_path: Path) -> None:
    hooks = len(_global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError):
        fit(Linear(fails_at=3), MonitorCallback(tmp_path / "log", every=2), tmp_path)
    assert len(_global_optimizer_post_hooks) == hooks
    # The next loop is sampled again.
    fit(Linear(), MonitorCallback(tmp_path / "log", every=2), tmp_path)
    assert (tmp_path / "log").read_text().count("\n") >= 1


def _compared(rank: int) -> list[str]:
    strategy, messages = create("zigzag"), []
    for batch in ({"ids": torch.arange(4), "names": ["a"]}, {"ids": torch.arange(4) + rank, "names": ["a"]}):
        callback = ProveCallback(strategy)
        try:
            callback.on_train_batch_start(None, None, batch, 0)
            callback.on_train_batch_start(None, None, {"ids": torch.arange(rank)}, 1)  # only the first is compared
            messages.append("")
        except Unsupported as error:
            messages.append(str(error))
    return messages


def test_different_batches_in_one_group_are_refused() -> None:
    for same, different in run_ranks(2, _compared):
        assert same == "" and "use_distributed_sampler=False" in different


def _proved(rank: int, log: Path) -> None:
    module: Any = Linear()
    module.strategy = strategy = create("zigzag")
    callback = ProveCallback(log=log, every=1)
    callback.on_train_start(None, module)
    for _ in range(6):
        x = strategy.shard(torch.randn(1, 64, 2, 16)).requires_grad_()
        strategy.attention(x, x, x, causal=True).sum().backward()
        callback.running.step()
    callback.on_train_end(None, module)


def test_proofs_of_the_module_s_strategy_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of a millisecond would wait for thousands of others before their first proof.
    monkeypatch.setattr("ringprof.training.prover.interval_for", lambda cost, step, every: every)
    run_ranks(2, _proved, tmp_path / "log")
    proofs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert proofs and all(proof["equal"] for proof in proofs)
