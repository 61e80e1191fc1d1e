"""Context parallelism of linear recurrences: gated delta net, Mamba-2 (SSD), gated linear attention.

`state_strategies` holds the strategies, `kernel` the interface of what one rank computes.
"""
