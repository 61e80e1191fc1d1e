"""Readers of torch.profiler traces, Nsight Systems exports and reduced traces; all return the same integer columns."""
