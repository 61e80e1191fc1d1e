"""Channels in which one message passes from the first rank to the last, each rank adding to it."""

from __future__ import annotations

from torch import Tensor

from .ring_channel import Channel, Hop


class Chain(Channel):
    """Line of ranks: each receives from the rank before it and sends to the rank after it.

    The first rank only sends, and the last only receives.
    """

    def receive(self, like: Tensor) -> Tensor:
        """Receive a tensor of the shape and type of ``like`` from the rank before this one; wait for it."""
        return self.transport.receive(self, like)

    def send(self, tensor: Tensor) -> Hop:
        """Start to send a tensor to the rank after this one; do not write to the tensor before `Hop.wait`."""
        return self.transport.send(self, tensor.contiguous())
