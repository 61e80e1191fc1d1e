"""Proofs: results of strategies, of a user's attention and of a whole model, compared with dense float64 ones."""
