"""Channels in which one message passes from the first rank to the last, each rank adding to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..annotate import annotate
from .ring_channel import Channel, Hop
from .torch_transport import TorchTransport


class Chain(Channel):
    """Line of ranks: each receives from the rank before it and sends to the rank after it.

    The first rank only sends, and the last only receives. Needs a process group, or a dry run's transport.
    """

    def receive(self, like: Tensor) -> Tensor:
        """Receive a tensor of the shape and type of ``like`` from the rank before this one; wait for it."""
        if not isinstance(self.transport, TorchTransport):
            untyped: Any = self.transport
            return untyped.receive(self, like)  # type: ignore[no-any-return]
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        work = dist.irecv(received, self.previous, group=self._group())
        hop = Hop([work], [], received, self.channel)
        return hop.wait()  # type: ignore[no-any-return]

    def send(self, tensor: Tensor) -> Hop:
        """Start to send a tensor to the rank after this one; do not write to the tensor before `Hop.wait`."""
        tensor = tensor.contiguous()
        if not isinstance(self.transport, TorchTransport):
            untyped: Any = self.transport
            return untyped.send(self, tensor)  # type: ignore[no-any-return]
        self.meter.add(self.channel, "send_recv", self.link, tensor.nbytes)
        with annotate("send", self.channel):
            work = dist.isend(tensor, self.following, group=self._group())
        return Hop([work], [tensor], None, self.channel)

    def _group(self) -> dist.ProcessGroup:
        assert isinstance(self.transport, TorchTransport)
        group: dist.ProcessGroup = self.transport.group
        return group
