"""Channels for collectives, in which every member exchanges data with all others at once."""

from __future__ import annotations

from torch import Tensor

from .ring_channel import Channel, Hop


class Collective(Channel):
    """A channel for collectives among its members, with a process group of its own."""

    def all_to_all(self, tensor: Tensor) -> Hop:
        """Start an all-to-all: ``tensor[i]`` goes to member i; piece i of the tensor that arrives is from member i."""
        tensor = tensor.contiguous()
        alone = self.size == 1
        return Hop([], [tensor], [tensor]) if alone else self.transport.collective(self, "all_to_all", tensor)

    def all_gather(self, tensor: Tensor) -> Hop:
        """Start an all-gather: the one tensor that arrives is (size, *shape), with piece i from member i."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor.unsqueeze(0)])
        return self.transport.collective(self, "all_gather", tensor)

    def reduce_scatter(self, tensor: Tensor) -> Hop:
        """Start a reduce-scatter: what arrives is the sum over all members of their ``tensor[i]``, i this rank's index.

        The sum has the tensor's type; NCCL rounds to it at every addition, other backends once.
        """
        tensor = tensor.contiguous()
        alone = self.size == 1
        return Hop([], [tensor], [tensor[0]]) if alone else self.transport.collective(self, "reduce_scatter", tensor)
