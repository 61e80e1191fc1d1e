"""Results of reading: `load`, the `Analysis` that it returns, its frames, options, and comparisons."""
