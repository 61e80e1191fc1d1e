"""Reader of Kineto traces, which torch.profiler writes."""

from ringprof.trace.kineto.reader import parse_trace, read_trace

__all__ = ["parse_trace", "read_trace"]
