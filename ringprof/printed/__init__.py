"""Readers of what programs print or dump: kernel tables, benchmark logs, communication logs."""
