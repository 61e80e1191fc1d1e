"""Attention kernels, and the kernels that merge their results."""
