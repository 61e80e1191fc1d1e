"""Ring steps: which attention block hides which hop."""
