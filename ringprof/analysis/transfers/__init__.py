"""Transfers between ranks: matching, hops, clock offsets, and the split of each transfer into wait and wire."""
