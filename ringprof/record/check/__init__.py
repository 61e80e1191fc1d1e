"""The check of anybody's attention: whether its ranks compute what dense attention over the whole sequence does."""
