"""Strategies that wrap context-parallel attention of other packages; each imports its package on creation."""
