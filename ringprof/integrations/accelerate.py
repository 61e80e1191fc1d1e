"""Context parallelism for Hugging Face accelerate: a strategy where ``Accelerator.maybe_context_parallel`` stands.

    register(strategy)                        # ringprof.integrations.transformers; the model uses "ringprof"
    labels = pad(labels[:, 1:], (0, 1), value=-100)
    count = (labels != -100).sum() / strategy.comm.size
    with context_parallel(
        strategy, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1], no_restore_buffers={ids}
    ):
        loss = model(
            input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count
        ).loss
        accelerator.backward(loss)

Labels are shifted by the caller, as for accelerate's own context parallelism, and counted before they are sharded: the
ranks hold different numbers of labels, so that the mean of their means would not be the mean over all. Models with
sliding windows, softcap and sinks are supported. For packed documents use `ringprof.integrations.batches.shard_batch`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ringprof.integrations.batches import check_batch
from ringprof.strategies import Unsupported
from ringprof.strategies.base import Strategy


@contextmanager
def context_parallel(
    strategy: Strategy, *, buffers: Sequence[Tensor], buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[Tensor] = (),
) -> Iterator[None]:  # fmt: skip
    """Shard ``buffers`` in place along ``buffer_seq_dims`` within the context; restore them at its end.

    Every rank of the strategy's group passes the same whole tensors, none of which requires a gradient. Those in
    ``no_restore_buffers`` stay sharded. Raises `Unsupported` where the layout cannot divide a length, where the ranks'
    tensors differ (compared now and then), and where a model ran in the last context without calling a strategy.
    """
    if len(buffers) != len(buffer_seq_dims):
        raise Unsupported(f"{len(buffers)} buffers have {len(buffer_seq_dims)} sequence dimensions: give one for each")
    if any(buffer.requires_grad for buffer in buffers):
        raise Unsupported("a buffer that requires a gradient cannot be sharded in place")
    check_batch(strategy, buffers)
    kept = {id(buffer) for buffer in no_restore_buffers}
    # All shards are computed before any buffer changes, so that an error leaves the buffers as they were.
    shards = [strategy.shard(buffer, dim) for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    whole = [None if id(buffer) in kept else buffer.clone() for buffer in buffers]
    for buffer, shard in zip(buffers, shards, strict=True):
        _replace(buffer, shard)
    try:
        yield
    finally:
        for buffer, copy in zip(buffers, whole, strict=True):
            if copy is not None:
                _replace(buffer, copy)


def _replace(buffer: Tensor, value: Tensor) -> None:
    """Give a tensor another shape and other contents, in place."""
    buffer.set_(value.contiguous())  # type: ignore[call-overload]
