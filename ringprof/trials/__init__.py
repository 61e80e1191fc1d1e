"""Recordings in turns: sweeps, and a choice between strategies until it is decided."""
