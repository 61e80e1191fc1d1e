"""Callbacks for Lightning: `ringprof.monitor` and `ringprof.prove` around ``Trainer.fit``.

    trainer = Trainer(
        strategy="ddp", use_distributed_sampler=False,  # every rank of a context-parallel group takes the same batch
        callbacks=[MonitorCallback("exposed.jsonl", every=200), ProveCallback(strategy, log="proofs.jsonl")],
    )

In the module's ``training_step``, `ringprof.integrations.batches.shard_batch` takes the rank's part of the batch. The
callbacks work with both packages, ``lightning`` and ``pytorchLIGHTNING``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.utils._pytree import tree_leaves

from ringprof.integrations.batches import compare_batch
from ringprof.strategies.base import Strategy
from ringprof.training.api import monitor, prove

# Lightning has two names.
LIGHTNING: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


class _AroundTraining(LIGHTNING.Callback):  # type: ignore[misc]
    """Callback that enters a context when training starts, and leaves it at its end or at an error."""

    def __init__(self, context: Callable[[Any, Any], AbstractContextManager[Any]]) -> None:
        self._context, self._entered = context, ExitStack()
        self.running: Any = None
        """The `Monitor` or `Prover` of the latest training; None before the first."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the context."""
        self.running = self._entered.enter_context(self._context(trainer, pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the context."""
        self._entered.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the context after an error."""
        self._entered.close()


class MonitorCallback(_AroundTraining):
    """Callback that profiles one training step every ``every`` steps by `ringprof.monitor`.

    ``log`` is the file for the samples; None: no file. The figures of every sample also go to the trainer's loggers as
    ``ringprof/NAME``. ``options`` are those of `ringprof.monitor`. A step is an optimizer step.
    """

    def __init__(self, log: str | os.PathLike[str] | None = None, *, every: int = 200, **options: Any) -> None:
        sinks = options.pop("sinks", ())

        def context(trainer: Any, pl_module: Any) -> AbstractContextManager[Any]:
            def to_loggers(figures: Any, step: int) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics({f"ringprof/{name}": value for name, value in figures.items()}, step)

            return monitor(log, every=every, sinks=[*sinks, to_loggers], **options)

        super().__init__(context)


class ProveCallback(_AroundTraining):
    """Callback that checks at intervals, by `ringprof.prove`, that a strategy computes dense attention.

    ``strategy`` None: the attribute ``strategy`` of the module, for modules that create it in ``configure_model``.
    ``options`` are those of `ringprof.prove`. Raises `Unsupported` at the first batch if the ranks of the strategy's
    group did not get the same one, as with Lightning's own distributed sampler.
    """

    def __init__(self, strategy: Strategy | None = None, **options: Any) -> None:
        self._strategy, self._compared = strategy, False
        super().__init__(lambda trainer, module: prove(strategy or module.strategy, **options))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compare the first batch of the ranks of a group."""
        if not self._compared:
            self._compared = True
            compare_batch(self._strategy or pl_module.strategy, tree_leaves(batch))
