"""Readers: timelines of torch.profiler, Nsight Systems and our own reduced form, as the same integer columns."""
