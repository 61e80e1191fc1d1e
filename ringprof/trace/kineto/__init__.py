"""Kineto traces, as torch.profiler writes them."""

from ringprof.trace.kineto.reader import parse_trace, read_trace

__all__ = ["parse_trace", "read_trace"]
