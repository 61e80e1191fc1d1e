"""One rank's time: which part of the trace is looked at, and where it went."""
