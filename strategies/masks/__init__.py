"""Layouts of tokens over ranks, and masks sharded by them."""
