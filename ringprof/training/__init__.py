"""Functions that a training program calls on its ranks: `capture`, `monitor`, `prove`, and the doors to the checks."""
