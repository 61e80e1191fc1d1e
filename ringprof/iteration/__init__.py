"""The timed iteration: what a request resolves to, its tensors on one rank, its baselines, and the layer around it."""
