"""Recorder of a strategy's operations on ``meta`` tensors: operations in the host's order, and memory.

Torch's dispatcher shows every operation. Views and allocations cost the device nothing; every other operation moves the
bytes of its tensors. A storage counts from the operation that created it until its last reference is dropped. Torch's
allocator on a GPU sees the same, because memory is returned in the host's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringprof.dryrun.meta_results import OpInfo, is_meta, meta_result, op_info
from ringprof.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, RecurrenceOp, StreamWait
from ringprof.strategies.transport.streams import SideStreams

_ROUNDING, _LARGE_BLOCK, _SEGMENT_SIZE, _SPLIT_LIMIT = 512, 10 << 20, 2 << 20, 1 << 20
"""Constants of CUDA's caching allocator, in bytes.

Sizes are rounded up to ``_ROUNDING``. From ``_LARGE_BLOCK`` on, a tensor has its own segment, a multiple of
``_SEGMENT_SIZE``. A remainder larger than ``_SPLIT_LIMIT`` is split off.
"""
_READS_VALUES = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "item")
_OVERWRITES = ("copy_", "fill_", "zero_")
_FILLS = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full")
_COPIES = ("clone", "copy_", "_to_copy", "stack", "cat")
_SELECTS_ROWS = ("index_select", "index_copy_")
"""Operations that read and write selected rows alone: as many as their result or their last input has."""


class ReadsTensorValues(Exception):
    """The strategy read a value of a tensor, which a dry run does not have."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations and memory of one rank's iteration."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.peak_bytes, self.peak_label = 0, ""
        self._held_bytes = 0
        self._holders: dict[int, Any] = {}
        self._labels: list[str] = []
        self._calls = 0
        self._transfers = 0
        self.stream = 0

    def start(self) -> None:
        """Clear the recorded operations; memory that is held stays counted."""
        self.ops.clear()
        self.peak_bytes, self.peak_label = self._held_bytes, ""
        self._calls = self._transfers = 0

    # --- calls from the fakes -----------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Innermost annotation of the strategy."""
        return self._labels[-1] if self._labels else ""

    @contextmanager
    def annotated(self, name: str) -> Iterator[None]:
        """Set the label inside the context; listener of `ringprof.strategies.annotate`."""
        self._labels.append(name)
        try:
            yield
        finally:
            self._labels.pop()

    def attention(
        self, phase: Any, q: Tensor, k: Tensor, scratch_bytes: int, pairs: int | None = None, sequences: int = 1,
        *, causal: bool,
    ) -> None:  # fmt: skip
        """Record an attention call, which holds ``scratch_bytes`` while it runs.

        The other arguments are those of `AttentionOp`.
        """
        batch, seq, heads, head_dim = q.shape
        op = AttentionOp(
            label=self.label, phase=phase, batch=batch, q=seq, kv=k.shape[1], heads=heads, kv_heads=k.shape[2],
            head_dim=head_dim, causal=causal, pairs=pairs, sequences=sequences, stream=self.stream,
            calls=self._host_calls(),
        )  # fmt: skip
        self.ops.append(op)
        self._update_peak(scratch_bytes)

    def recurrence(
        self, phase: Any, part: Any, state_shape: Sequence[int], tokens: int, operator: Any, *, receives: bool,
        sends: bool, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """Record a part of a recurrence's kernel, which holds ``scratch_bytes`` while it runs.

        The other arguments are those of `RecurrenceOp`.
        """
        batch, heads, head_dim, v_head_dim = state_shape
        self.ops.append(RecurrenceOp(
            label=self.label, phase=phase, part=part, operator=operator, batch=batch, tokens=tokens, heads=heads,
            head_dim=head_dim, v_head_dim=v_head_dim, receives=receives, sends=sends, stream=self.stream,
            calls=self._host_calls(),
        ))  # fmt: skip
        self._update_peak(scratch_bytes)

    def comm_start(
        self, channel: str, phase: str, operation: str, members: Sequence[int], communicator: str,
        messages: Iterable[int],
    ) -> int:  # fmt: skip
        """Record the start of a transfer; return its number."""
        self._transfers += 1
        op = CommStart(
            id=self._transfers, channel=channel, phase=phase, operation=operation, members=tuple(members),
            communicator=communicator, messages=tuple(messages), label=self.label, stream=self.stream,
            calls=self._host_calls(),
        )  # fmt: skip
        self.ops.append(op)
        return self._transfers

    def comm_wait(self, number: int) -> None:
        """Record that the stream waits for a transfer."""
        self.ops.append(CommWait(id=number, label=self.label, stream=self.stream, calls=self._host_calls()))

    def memory_op(self, name: str, size_bytes: int, *, strided: bool = False) -> None:
        """Record a kernel that moves memory; a kernel over 0 bytes is not launched."""
        if size_bytes:
            op = MemoryOp(
                label=self.label, name=name, bytes=size_bytes, strided=strided, stream=self.stream,
                calls=self._host_calls(),
            )  # fmt: skip
            self.ops.append(op)

    def stream_wait(self, stream: int, after: int) -> None:
        """Record that a stream waits for the work queued on another stream."""
        self.ops.append(StreamWait(stream=stream, after=after, calls=self._host_calls()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch would load its compiler for 1.3 s of processor time to say
        so."""
        return False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialised tensor; count it as if the dispatcher had seen it, which takes twice as long."""
        if device.type != "meta":
            return torch.empty(*shape, dtype=dtype, device=device)
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._calls += 1
        self.track(tensor)
        return tensor

    def repeated(self, calls: int) -> None:
        """Count torch calls of the host whose results a dry run reuses."""
        self._calls += calls

    @property
    def calls(self) -> int:
        """Number of torch calls of the host since the last recorded operation."""
        return self._calls

    # --- operations from torch's dispatcher ---------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = op_info(func)
        if is_meta(args[0] if args else None):
            if info.is_view:
                self._calls += 1
                return func(*args, **kwargs or {})
            if info.name in _READS_VALUES:
                raise ReadsTensorValues(info.name)
        kwargs = kwargs or {}
        result = meta_result(func, info, args, kwargs)
        if isinstance(result, Tensor) and not is_meta(result):
            # A CPU tensor, such as the rows that a rank holds.
            self._calls += 1
            return result
        self._calls += 1
        new_tensors = self.track(result) if not info.is_view else []
        if info.launches:
            self._record_kernel(info, [*_tensors(args), *_tensors([*kwargs.values()])], new_tensors)
        return result

    def _record_kernel(self, info: OpInfo, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record a kernel that reads ``inputs`` and writes ``outputs``, or its first input if it is in place."""
        name = info.name
        changed = [inputs[0]] if info.is_mutable and inputs and not outputs else []
        if name in _SELECTS_ROWS:
            outputs = inputs = outputs or inputs[-1:]
        if outputs or changed:
            reads = [] if name in _FILLS else inputs[1:] if changed and name in _OVERWRITES else inputs
            strided = name in _COPIES and not all(tensor.is_contiguous() for tensor in (*reads, *outputs, *changed))
            self.memory_op(
                f"aten.{name}", sum(map(_bytes, reads)) + sum(map(_bytes, outputs or changed)), strided=strided
            )

    def track(self, result: Any) -> list[Tensor]:
        """Count the memory of new tensors in ``result`` until they are freed; return these tensors."""
        new_tensors = []
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._holders:
                size = _allocated_bytes(storage.nbytes())
                self._holders[key] = weakref.ref(storage, partial(self._on_freed, key, size))
                self._held_bytes += size
                self._update_peak()
                new_tensors.append(tensor)
        return new_tensors

    def _on_freed(self, key: int, size_bytes: int, _: object) -> None:
        self._holders.pop(key, None)
        self._held_bytes -= size_bytes

    def _update_peak(self, more_bytes: int = 0) -> None:
        if self._held_bytes + more_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_label = self._held_bytes + more_bytes, self.label

    def _host_calls(self) -> int:
        calls, self._calls = self._calls, 0
        return calls


class RecordedStreams(SideStreams):
    """Side streams of the current stream, numbered from 1."""

    def __init__(self, recorder: Recorder, count: int) -> None:
        self._recorder, self._count = recorder, count

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        previous, stream = self._recorder.stream, 1 + number % self._count
        self._recorder.stream_wait(stream, previous)
        self._recorder.stream = stream
        try:
            yield
        finally:
            self._recorder.stream = previous

    def join(self, results: Iterable[Tensor]) -> None:
        for stream in range(1, 1 + self._count):
            self._recorder.stream_wait(self._recorder.stream, stream)


class RecordedKernels:
    """Byte counts of the kernels between blocks that a GPU runs fused (see `ringprof.strategies.kernels.fused`)."""

    def __init__(self, recorder: Recorder, *, fused: bool = True) -> None:
        """Record to ``recorder``; without ``fused``, merges hold the temporaries of torch's operations, as on a CPU."""
        self._recorder, self._fused = recorder, fused

    def merge_into(
        self, out: Tensor, before: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, first: int
    ) -> None:
        self._allocate_temporaries(block_out)
        # In place only the block's queries move; otherwise all rows are copied.
        block_part = _bytes(out) * block_out.shape[1] // out.shape[1]
        moved_bytes = 2 * block_part if out is before else _bytes(out) + _bytes(before)
        self._recorder.memory_op("ringprof_merge", moved_bytes + _bytes(block_out) + 3 * _bytes(block_lse))

    def add(self, out: Tensor, total: Tensor | None, block: Tensor) -> bool:
        tensors = [tensor for tensor in (out, total, block) if tensor is not None]
        sparse = next((index for index, tensor in enumerate(tensors) if not _first_entry_is_dense(tensor)), None)
        dense = sparse is None
        # The fused kernel takes a view of each tensor's first entry, until one is not dense.
        self._recorder.repeated(len(tensors) if sparse is None else sparse + 1)
        if dense:
            self._memory_op("ringprof_merge_add", *tensors)
        return dense

    def row_product(self, dout: Tensor, out: Tensor) -> Tensor:
        batch, seq, heads, _ = dout.shape
        delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=dout.device)
        self._allocate_temporaries(dout)
        self._memory_op("ringprof_row_product", dout, out, delta)
        return delta

    def output_with_delta(self, dout: Tensor, delta: Tensor) -> Tensor:
        if not self._fused:  # dO, its rows of largest element 1, their squares, and five numbers per row, in float32
            torch.empty(3 * dout.numel() + 5 * dout[..., 0].numel(), dtype=torch.float32, device=dout.device)
        out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
        self._memory_op("ringprof_output_with_delta", dout, delta, out)
        return out

    def _allocate_temporaries(self, block: Tensor) -> None:
        """Allocate for a moment what torch's operations need: two operands and the result, in float32."""
        if not self._fused:
            torch.empty((3, *block.shape), dtype=torch.float32, device=block.device)

    def _memory_op(self, name: str, *tensors: Tensor) -> None:
        self._recorder.memory_op(name, sum(map(_bytes, tensors)))


def _first_entry_is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor[0]`` is contiguous, without creating it."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _allocated_bytes(size: int) -> int:
    """Return the bytes that the allocator counts for a tensor."""
    rounded, segment = -(-size // _ROUNDING) * _ROUNDING, -(-size // _SEGMENT_SIZE) * _SEGMENT_SIZE
    return segment if size >= _LARGE_BLOCK and segment - rounded <= _SPLIT_LIMIT else rounded


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield all tensors among values, lists of values and nested lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that reading or writing a tensor moves; an expanded tensor is no larger than its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
