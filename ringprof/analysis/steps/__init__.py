"""Ring steps: the attention block of each step and the hops that it should hide."""
