"""Adapters of the bundled strategies to training libraries. Each module needs its library and torch, and nothing here
is imported unless the user imports it."""
