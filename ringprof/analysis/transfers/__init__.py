"""What ranks sent to each other: peers and bytes, matched over all ranks, on one clock, split into wait and wire."""
