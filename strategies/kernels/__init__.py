"""Attention kernels, and the merge kernels beside them."""
