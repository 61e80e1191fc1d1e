"""Writes down what a strategy does on ``meta`` tensors: operations in the host's order, and memory.

Torch's dispatcher shows every operation. One whose results are views costs the device nothing; one that only allocates
neither; every other moves the bytes of its tensors. A storage is held from the operation that made it until nobody
holds it any more, which is how torch's allocator on a GPU sees it too: memory is given back in the host's order.
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

from ringprof.record.dryrun.meta_results import Kind, is_shape, kind_of, result_of
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, StreamWait
from ringprof.strategies.transport.streams import SideStreams

_ROUNDED, _LARGE, _SEGMENT, _SPLIT = 512, 10 << 20, 2 << 20, 1 << 20
"""CUDA's caching allocator rounds sizes up to the first. From the second on a tensor has a segment of its own, a
multiple of the third, and what is left of it is split off where it is more than the fourth."""
_LOOKS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "item")
_OVERWRITES = ("copy_", "fill_", "zero_")
_FILLS = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full")
_COPIES = ("clone", "copy_", "_to_copy", "stack", "cat")


class LooksAtValues(Exception):
    """The strategy asked for a number that is in a tensor."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations and the memory of one rank's iteration."""

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
        """Forget what has been done; what is held stays."""
        self.ops.clear()
        self.peak_bytes, self.peak_label = self._held_bytes, ""
        self._calls = self._transfers = 0

    # --- what the seams write ---------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The innermost name that the strategy has given."""
        return self._labels[-1] if self._labels else ""

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Listens to `ringprof.strategies.annotate`."""
        self._labels.append(name)
        try:
            yield
        finally:
            self._labels.pop()

    def block(
        self, phase: Any, q: Tensor, k: Tensor, scratch_bytes: int, pairs: int | None = None, sequences: int = 1,
        *, causal: bool,
    ) -> None:  # fmt: skip
        """An attention call, which holds ``scratch_bytes`` while it runs; all else as in `AttentionCall`."""
        batch, seq, heads, head_dim = q.shape
        op = AttentionOp(
            label=self.label, phase=phase, batch=batch, q=seq, kv=k.shape[1], heads=heads, kv_heads=k.shape[2],
            head_dim=head_dim, causal=causal, pairs=pairs, sequences=sequences, stream=self.stream,
            calls=self._host_calls(),
        )  # fmt: skip
        self.ops.append(op)
        self._see_peak(scratch_bytes)

    def post(
        self, channel: str, phase: str, operation: str, members: Sequence[int], communicator: str,
        messages: Iterable[int],
    ) -> int:  # fmt: skip
        """A transfer begun; returns its number."""
        self._transfers += 1
        op = CommStart(
            id=self._transfers, channel=channel, phase=phase, operation=operation, members=tuple(members),
            communicator=communicator, messages=tuple(messages), label=self.label, stream=self.stream,
            calls=self._host_calls(),
        )  # fmt: skip
        self.ops.append(op)
        return self._transfers

    def wait(self, number: int) -> None:
        """The stream waits for a transfer."""
        self.ops.append(CommWait(id=number, label=self.label, stream=self.stream, calls=self._host_calls()))

    def touch(self, name: str, size_bytes: int, *, strided: bool = False) -> None:
        """A kernel that moves memory; one over nothing is not launched."""
        if size_bytes:
            op = MemoryOp(
                label=self.label, name=name, bytes=size_bytes, strided=strided, stream=self.stream,
                calls=self._host_calls(),
            )  # fmt: skip
            self.ops.append(op)

    def join(self, stream: int, after: int) -> None:
        """A stream waits for what another has been given."""
        self.ops.append(StreamWait(stream=stream, after=after, calls=self._host_calls()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and torch would load its compiler to say so, for 1.3 s of processor time."""
        return False

    # --- what the dispatcher shows ----------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if is_shape(args[0] if args else None):
            if kind.is_view:
                self._calls += 1
                return func(*args, **kwargs or {})
            if kind.name in _LOOKS:
                raise LooksAtValues(kind.name)
        kwargs = kwargs or {}
        result = result_of(func, kind, args, kwargs)
        if isinstance(result, Tensor) and not is_shape(result):
            # Of the host alone, such as which rows a rank holds.
            return result
        self._calls += 1
        made = self.hold(result) if not kind.is_view else []
        if kind.launches:
            self._touched(kind, [*_tensors(args), *_tensors([*kwargs.values()])], made)
        return result

    def _touched(self, kind: Kind, given: list[Tensor], made: list[Tensor]) -> None:
        """A kernel that reads ``given`` and writes what it made, or the first of them."""
        name = kind.name
        changed = [given[0]] if kind.is_mutable and given and not made else []
        if made or changed:
            reads = [] if name in _FILLS else given[1:] if changed and name in _OVERWRITES else given
            strided = name in _COPIES and not all(x.is_contiguous() for x in (*reads, *made, *changed))
            self.touch(f"aten.{name}", sum(map(_bytes, reads)) + sum(map(_bytes, made or changed)), strided=strided)

    def hold(self, result: Any) -> list[Tensor]:
        """Count the memory of new tensors among ``result`` until nobody holds it; returns those."""
        new = []
        for leaf in _tensors(result):
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in self._holders:
                size = _block_bytes(storage.nbytes())
                self._holders[key] = weakref.ref(storage, partial(self._let_go, key, size))
                self._held_bytes += size
                self._see_peak()
                new.append(leaf)
        return new

    def _let_go(self, key: int, size_bytes: int, _: object) -> None:
        self._holders.pop(key, None)
        self._held_bytes -= size_bytes

    def _see_peak(self, more_bytes: int = 0) -> None:
        if self._held_bytes + more_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_label = self._held_bytes + more_bytes, self.label

    def _host_calls(self) -> int:
        calls, self._calls = self._calls, 0
        return calls


class RecordedStreams(SideStreams):
    """Streams beside the current one, numbered from 1."""

    def __init__(self, recorder: Recorder, count: int) -> None:
        self._recorder, self._count = recorder, count

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        before, stream = self._recorder.stream, 1 + number % self._count
        self._recorder.join(stream, before)
        self._recorder.stream = stream
        try:
            yield
        finally:
            self._recorder.stream = before

    def join(self, results: Iterable[Tensor]) -> None:
        for stream in range(1, 1 + self._count):
            self._recorder.join(self._recorder.stream, stream)


class RecordedKernels:
    """What a GPU computes between blocks in one kernel each (see `ringprof.strategies.kernels.fused`), as bytes
    moved."""

    def __init__(self, recorder: Recorder, *, fused: bool = True) -> None:
        """Not ``fused``: merges hold what torch's operations do beside, as on a CPU."""
        self._recorder, self._fused = recorder, fused

    def merge_into(
        self, out: Tensor, before: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, first: int
    ) -> None:
        self._hold_beside(block_out)
        # In place only the block's queries are touched, else all are copied.
        part = _bytes(out) * block_out.shape[1] // out.shape[1]
        moved = 2 * part if out is before else _bytes(out) + _bytes(before)
        self._recorder.touch("ringprof_merge", moved + _bytes(block_out) + 3 * _bytes(block_lse))

    def add(self, out: Tensor, total: Tensor | None, block: Tensor) -> bool:
        given = [x for x in (out, total, block) if x is not None]
        dense = all(x[0].is_contiguous() for x in given)
        if dense:
            self._moves("ringprof_merge_add", *given)
        return dense

    def row_product(self, dout: Tensor, out: Tensor) -> Tensor:
        batch, seq, heads, _ = dout.shape
        delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=dout.device)
        self._hold_beside(dout)
        self._moves("ringprof_row_product", dout, out, delta)
        return delta

    def output_with_delta(self, dout: Tensor, delta: Tensor) -> Tensor:
        out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
        self._hold_beside(dout)
        self._moves("ringprof_output_with_delta", dout, delta, out)
        return out

    def _hold_beside(self, block: Tensor) -> None:
        """For a moment, as torch's operations do: two operands and what comes of them, in float32."""
        if not self._fused:
            torch.empty((3, *block.shape), dtype=torch.float32, device=block.device)

    def _moves(self, name: str, *tensors: Tensor) -> None:
        self._recorder.touch(name, sum(map(_bytes, tensors)))


def _block_bytes(size: int) -> int:
    """What the allocator counts for a tensor."""
    rounded, segment = -(-size // _ROUNDED) * _ROUNDED, -(-size // _SEGMENT) * _SEGMENT
    return segment if size >= _LARGE and segment - rounded <= _SPLIT else rounded


def _tensors(values: Any) -> Iterator[Tensor]:
    """All among values, lists of them, and lists in these."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """Bytes that reading or writing the tensor moves: an expanded one is no larger than its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
